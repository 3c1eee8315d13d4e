"""The train step: the same numbers on every mesh, a fixed point of layouts, one compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import Run, batch, model

from partitioning import unbox
from train.optimizers import Optimizer
from train.steps import loss_sums


@pytest.fixture(scope='module')
def single_device_losses():
    return Run(1, 1).losses(20)


def assert_same_losses(run, expected, steps=6):
    np.testing.assert_allclose(run.losses(steps), expected[:steps], rtol=1e-5)


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def test_the_model_learns(single_device_losses):
    assert single_device_losses[-1] < 0.8 * single_device_losses[0]


@pytest.mark.core
@pytest.mark.parametrize(
    'data, model_axis, changes, microbatches',
    [(8, 1, {}, 1), (2, 4, {'remat': 'full'}, 4), (1, 8, {'remat': 'dots'}, 2)],
    ids=str,
)
def test_losses_do_not_depend_on_mesh_remat_and_microbatches(
    single_device_losses, data, model_axis, changes, microbatches
):
    run = Run(data, model_axis, net=model(**changes), microbatches=microbatches)
    assert_same_losses(run, single_device_losses)


@pytest.mark.core
def test_shardings_are_a_fixed_point_and_the_step_compiles_once(single_device_losses):
    run = Run(4, 2)
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
    assert run.step._partitioned._pjitted_fn._cache_size() == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params)), 'the state is donated'


def test_a_variant_of_the_model_has_the_same_losses_on_a_mesh():
    changes = {'scan_layers': False, 'num_kv_heads': 2, 'tie_embeddings': True}
    one = Run(1, 1, net=model(**changes))
    many = Run(4, 2, net=model(**changes, remat='full'))
    assert_same_losses(many, one.losses(4), steps=4)


def test_bfloat16_compute_keeps_float32_parameters_and_similar_losses(single_device_losses):
    run = Run(4, 2, net=model(dtype='bfloat16'))
    np.testing.assert_allclose(run.losses(6), single_device_losses[:6], rtol=3e-2)
    assert {x.dtype for x in jax.tree.leaves(run.state.params)} == {np.dtype('float32')}


def test_optimizer_state_is_sharded_like_the_parameters():
    run = Run(4, 2, net=model(num_layers=1), transform=optax.adafactor)
    before = shardings(run.state)
    run.losses(1)
    assert shardings(run.state) == before
    sharded = {x.shape for x in jax.tree.leaves(run.state.params) if not _replicated(x)}
    moments = [x for x in jax.tree.leaves(run.state.opt_state) if x.shape in sharded]
    assert moments
    assert not [x.shape for x in moments if _replicated(x)]


def _replicated(x):
    return x.sharding.is_fully_replicated


def test_dropout_is_a_function_of_seed_and_step(single_device_losses):
    run = Run(4, 2, net=model(dropout_rate=0.2))
    first = jax.tree.map(jnp.copy, run.state)
    dropped = run.losses(3)
    run.state = first
    other_seed = Run(4, 2, net=model(dropout_rate=0.2), seed=1).losses(3)
    np.testing.assert_array_equal(dropped, run.losses(3))
    assert np.abs(dropped - other_seed).max() > 1e-3
    assert abs(dropped[0] - single_device_losses[0]) > 1e-4


def test_gradients_are_clipped_to_the_norm():
    grads = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[0.0, -4.0]])}  # of norm 5

    def update(clip_norm):
        tx = Optimizer(transform=optax.sgd, learning_rate=1.0, clip_norm=clip_norm).build()
        return tx.update(grads, tx.init(grads))[0]

    np.testing.assert_allclose(update(None)['a'], [-3.0, 0.0])
    np.testing.assert_allclose(update(0.1)['a'], [-0.06, 0.0], rtol=1e-6)
    np.testing.assert_allclose(update(0.1)['b'], [[0.0, 0.08]], rtol=1e-6)


def test_the_loss_is_the_mean_over_weighted_targets():
    net, data = model(num_layers=1), batch(3)
    params = unbox(jax.jit(net.init)(jax.random.key(0), data['decoder_input_tokens']))['params']
    apply = jax.jit(lambda p, t: net.apply({'params': p}, t))
    logits = np.asarray(apply(params, data['decoder_input_tokens']), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = data['decoder_target_tokens'][..., None]
    nats = -np.take_along_axis(log_p, targets, -1)[..., 0] * data['decoder_loss_weights']
    _, sums = jax.jit(lambda p, d: loss_sums(net, p, d))(params, data)
    assert float(sums['nats']) == pytest.approx(nats.sum(), rel=1e-5)
    assert float(sums['weight']) == data['decoder_loss_weights'].sum()
