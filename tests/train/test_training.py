"""The train step: the same numbers on every mesh, a fixed point of layouts, one compilation."""

import jax
import numpy as np
import optax
import pytest
from small import Run, batch, model

from partitioning import unbox
from train.steps import loss_sums

MESHES = [(8, 1), (2, 4), (1, 8)]


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
@pytest.mark.parametrize('data, model_axis', MESHES)
def test_losses_are_equal_on_every_mesh(single_device_losses, data, model_axis):
    assert_same_losses(Run(data, model_axis), single_device_losses)


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


@pytest.mark.core
@pytest.mark.parametrize('microbatches', [2, 4])
def test_microbatches_do_not_change_the_losses(single_device_losses, microbatches):
    assert_same_losses(Run(2, 2, microbatches=microbatches), single_device_losses)


@pytest.mark.parametrize('remat', ['full', 'dots'])
def test_remat_does_not_change_the_losses(single_device_losses, remat):
    assert_same_losses(Run(4, 2, net=model(remat=remat)), single_device_losses, steps=4)


@pytest.mark.parametrize(
    'changes',
    [
        {'scan_layers': False, 'remat': 'full'},
        {'num_kv_heads': 2, 'tie_embeddings': True},
    ],
    ids=str,
)
def test_variants_of_the_model_have_the_same_losses_on_a_mesh(changes):
    one, many = Run(1, 1, net=model(**changes)), Run(4, 2, net=model(**changes))
    assert_same_losses(many, one.losses(4), steps=4)


def test_bfloat16_compute_keeps_float32_parameters_and_similar_losses(single_device_losses):
    run = Run(4, 2, net=model(dtype='bfloat16'))
    np.testing.assert_allclose(run.losses(6), single_device_losses[:6], rtol=3e-2)
    assert {x.dtype for x in jax.tree.leaves(run.state.params)} == {np.dtype('float32')}


@pytest.mark.parametrize('name', ['lion', 'adafactor', 'novograd', 'amsgrad'])
def test_optimizer_state_is_sharded_like_the_parameters(name):
    run = Run(4, 2, net=model(num_layers=1), transform=getattr(optax, name))
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
    dropped, again = (Run(4, 2, net=model(dropout_rate=0.2)).losses(3) for _ in range(2))
    other_seed = Run(4, 2, net=model(dropout_rate=0.2), seed=1).losses(3)
    np.testing.assert_array_equal(dropped, again)
    assert np.abs(dropped - other_seed).max() > 1e-3
    assert abs(dropped[0] - single_device_losses[0]) > 1e-4


def test_gradients_are_clipped_to_the_norm():
    settings = {'net': model(num_layers=1), 'transform': optax.sgd, 'learning_rate': 1.0}

    def update_norm(clip_norm):
        run = Run(1, 1, clip_norm=clip_norm, **settings)
        before = jax.tree.map(np.asarray, run.state.params)
        run.losses(1)
        return float(optax.tree.norm(jax.tree.map(lambda a, b: a - b, run.state.params, before)))

    assert update_norm(None) > 0.2
    assert update_norm(0.1) == pytest.approx(0.1, rel=1e-4)


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
