"""The train step: the same numbers on every mesh, a fixed point of layouts, one compilation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from small import RULES, Bigram, Steps, model

from partitioning import AxisRules
from train import Optimizer
from train.optimizers import global_norm


@pytest.fixture(scope='module')
def single_device_losses():
    return Steps(1, 1).losses(20)


def assert_same_losses(run, expected, steps=6):
    np.testing.assert_allclose(run.losses(steps), expected[:steps], rtol=1e-5)


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def test_the_model_learns(single_device_losses):
    assert single_device_losses[-1] < 0.8 * single_device_losses[0]


@pytest.mark.long
@pytest.mark.core
def test_losses_do_not_depend_on_mesh_remat_and_microbatches(single_device_losses):
    run = Steps(1, 8, net=model(remat='dots'), microbatches=4)
    assert_same_losses(run, single_device_losses)


@pytest.mark.core
def test_shardings_are_a_fixed_point_and_the_step_compiles_once(single_device_losses):
    run = Steps(4, 2)
    first, before = run.state, shardings(run.state)
    assert jax.tree.leaves(before) == jax.tree.leaves(
        jax.tree.map(
            lambda spec: jax.sharding.NamedSharding(run.partitioner.mesh, spec),
            run.specs,
            is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
        )
    )
    assert_same_losses(run, single_device_losses)
    assert shardings(run.state) == before
    assert run.traces == 1
    assert run.step._pjitted_fn._cache_size() == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params)), 'the state is donated'


def test_a_variant_of_the_model_has_the_same_losses_on_a_mesh():
    changes = {'num_layers': 1, 'scan_layers': False, 'num_kv_heads': 2, 'tie_embeddings': True}
    one = Steps(1, 1, net=model(**changes))
    many = Steps(4, 2, net=model(**changes, remat='full'))
    assert_same_losses(many, one.losses(4), steps=4)


def test_bfloat16_compute_keeps_float32_parameters_and_similar_losses(single_device_losses):
    run = Steps(4, 2, net=model(dtype='bfloat16'))
    np.testing.assert_allclose(run.losses(6), single_device_losses[:6], rtol=3e-2)
    assert {x.dtype for x in jax.tree.leaves(run.state.params)} == {np.dtype('float32')}


def test_optimizer_state_is_sharded_like_the_parameters():
    run = Steps(4, 2, net=Bigram(), tx=optax.adafactor(3e-3))
    before = shardings(run.state)
    run.losses(1)
    assert shardings(run.state) == before
    sharded = {x.shape for x in jax.tree.leaves(run.state.params) if not _replicated(x)}
    moments = [x for x in jax.tree.leaves(run.state.opt_state) if x.shape in sharded]
    assert moments
    assert not [x.shape for x in moments if _replicated(x)]


def _replicated(x):
    return x.sharding.is_fully_replicated


def test_microbatches_sum_shards_of_gradients_as_the_optimizer_holds_them(single_device_losses):
    """With ZeRO, the parameters are whole along 'data', and the optimizer's state is not."""
    parameter_rules = [('embed', 'model') if rule == ('embed', 'data') else rule for rule in RULES]
    zero = {'logical_axis_rules': AxisRules(parameter_rules, optimizer=RULES)}
    run = Steps(4, 2, microbatches=2, partitioning=zero)
    assert run.specs.params['layers']['mlp']['up'] == P(None, None, 'model')
    # What one device carries from part to part is a shard of [2, 64, 96] over both axes.
    text = run.step.lower(run.state, run.batch(0)).compile().as_text()
    [loop] = re.findall('^  .* while\\(', text[text.index('ENTRY') :], re.M)
    assert 'f32[2,16,48]' in loop
    assert_same_losses(run, single_device_losses, steps=3)


@pytest.mark.long
def test_gradients_and_their_sums_in_bfloat16(single_device_losses):
    """The optimizer gets bfloat16, and keeps its state in float32."""
    seen, tx = [], Optimizer(transform=optax.adamw, learning_rate=3e-3).build()

    def update(grads, *arguments):
        seen.extend(x.dtype for x in jax.tree.leaves(grads))
        return tx.update(grads, *arguments)

    spied = optax.GradientTransformation(tx.init, update)
    dtypes = {'gradient_dtype': 'bfloat16', 'accumulation_dtype': 'bfloat16'}
    run = Steps(2, 4, microbatches=4, tx=spied, **dtypes)
    np.testing.assert_allclose(run.losses(6), single_device_losses[:6], rtol=1e-2)
    assert set(seen) == {np.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(run.state)} == {np.dtype('float32'), np.dtype('int32')}


def test_dropout_is_a_function_of_seed_and_step():
    run, other = (Steps(4, 2, net=Bigram(), seed=seed) for seed in (0, 1))
    first, second, again = (jax.tree.map(jnp.copy, run.state) for _ in range(3))
    dropped = run.losses(3)
    run.state, other.state = first, second
    np.testing.assert_array_equal(run.losses(3), dropped)
    assert (np.abs(other.losses(3) - dropped) > 1e-5).all()
    run.state = again.replace(step=again.step + 1)
    assert abs(run.losses(1)[0] - dropped[0]) > 1e-5, 'the same batch and parameters'


def test_gradients_are_clipped_to_the_norm():
    grads = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[0.0, -4.0]])}  # of norm 5

    def update(clip_norm):
        tx = Optimizer(transform=optax.sgd, learning_rate=1.0, clip_norm=clip_norm).build()
        return tx.update(grads, tx.init(grads))[0]

    np.testing.assert_allclose(update(None)['a'], [-3.0, 0.0])
    np.testing.assert_allclose(update(0.1)['a'], [-0.06, 0.0], rtol=1e-6)
    np.testing.assert_allclose(update(0.1)['b'], [[0.0, 0.08]], rtol=1e-6)


def test_the_norm_of_gradients_in_bfloat16_is_that_of_their_values():
    grads = {'a': jnp.ones(1000, jnp.bfloat16), 'b': jnp.ones(1, jnp.bfloat16)}
    np.testing.assert_allclose(global_norm(grads), 1001**0.5, rtol=1e-6)
