"""The train step: the same numbers on every mesh, a fixed point of layouts, one compilation."""

import jax
import numpy as np
import optax
import pytest
from small import Run, batch, model

from train.steps import loss_sums

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.fixture(scope='module')
def single_device_losses():
    return Run(1, 1).losses(20)


@pytest.mark.core
@pytest.mark.parametrize('data, model_axis', MESHES[1:])
def test_losses_are_equal_on_every_mesh(single_device_losses, data, model_axis):
    losses = Run(data, model_axis).losses(20)
    np.testing.assert_allclose(losses, single_device_losses, rtol=1e-5)


def test_the_model_learns(single_device_losses):
    assert single_device_losses[-1] < 0.8 * single_device_losses[0]


@pytest.mark.core
@pytest.mark.parametrize('microbatches', [2, 4])
def test_microbatches_change_nothing(single_device_losses, microbatches):
    losses = Run(2, 2, microbatches=microbatches).losses(20)
    np.testing.assert_allclose(losses, single_device_losses, rtol=1e-5)


@pytest.mark.parametrize(
    'changes',
    [
        {'remat': 'full'},
        {'remat': 'dots'},
        {'scan_layers': False, 'remat': 'full'},
        {'num_kv_heads': 2},
        {'tie_embeddings': True},
    ],
    ids=str,
)
def test_variants_of_the_model_are_equal_on_meshes(changes):
    one, many = Run(1, 1, net=model(**changes)), Run(4, 2, net=model(**changes))
    np.testing.assert_allclose(many.losses(4), one.losses(4), rtol=1e-5)


def test_remat_does_not_change_the_losses(single_device_losses):
    losses = Run(1, 1, net=model(remat='full')).losses(5)
    np.testing.assert_allclose(losses, single_device_losses[:5], rtol=1e-5)


def test_bfloat16_compute_keeps_float32_parameters_and_comes_close(single_device_losses):
    run = Run(4, 2, net=model(dtype='bfloat16'))
    losses = run.losses(10)
    assert {x.dtype for x in jax.tree.leaves(run.state.params)} == {np.dtype('float32')}
    np.testing.assert_allclose(losses, single_device_losses[:10], rtol=3e-2)


@pytest.mark.parametrize('name', ['adamw', 'sgd', 'lion', 'adafactor', 'novograd', 'amsgrad'])
def test_any_optimizer_keeps_its_state_sharded_like_the_parameters(name):
    run = Run(4, 2, transform=getattr(optax, name))
    before = jax.tree.map(lambda x: x.sharding, run.state)
    run.losses(2)
    assert jax.tree.map(lambda x: x.sharding, run.state) == before
    sharded = {x.shape for x in jax.tree.leaves(run.state.params) if not _replicated(x)}
    for leaf in jax.tree.leaves(run.state.opt_state):
        if leaf.shape in sharded:
            assert not _replicated(leaf), leaf.shape


def _replicated(x):
    return x.sharding.is_fully_replicated


@pytest.mark.core
def test_shardings_are_a_fixed_point_and_the_step_compiles_once():
    run = Run(4, 2)
    before = jax.tree.map(lambda x: x.sharding, run.state)
    assert jax.tree.leaves(before) == jax.tree.leaves(
        jax.tree.map(
            lambda spec: jax.sharding.NamedSharding(run.partitioner.mesh, spec),
            run.axes,
            is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
        )
    )
    run.losses(3)
    assert jax.tree.map(lambda x: x.sharding, run.state) == before
    assert run.traces == 1
    assert run.step._partitioned._pjitted_fn._cache_size() == 1


def test_the_state_is_donated():
    run = Run(4, 2)
    old = run.state
    run.losses(1)
    assert all(x.is_deleted() for x in jax.tree.leaves(old.params))


def test_dropout_is_a_function_of_seed_and_step():
    a, b = (Run(4, 2, net=model(dropout_rate=0.2)).losses(3) for _ in range(2))
    c = Run(4, 2, net=model(dropout_rate=0.2), seed=1).losses(3)
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3
    none = Run(4, 2).losses(1)
    assert abs(a[0] - none[0]) > 1e-4


def test_gradients_are_clipped_to_the_norm():
    free = Run(1, 1, transform=optax.sgd, learning_rate=1.0, clip_norm=None)
    clipped = Run(1, 1, transform=optax.sgd, learning_rate=1.0, clip_norm=0.1)

    def moved(run):
        before = jax.tree.map(np.asarray, run.state.params)
        run.losses(1)
        return float(optax.tree.norm(jax.tree.map(lambda a, b: a - b, run.state.params, before)))

    assert moved(free) > 0.2
    assert moved(clipped) == pytest.approx(0.1, rel=1e-4)


def test_the_loss_is_the_mean_over_weighted_targets():
    run = Run(1, 1)
    data = batch(3)
    logits = np.asarray(
        run.model.apply({'params': run.state.params}, data['decoder_input_tokens']), np.float64
    )
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = data['decoder_target_tokens'][..., None]
    nats = -np.take_along_axis(log_p, targets, -1)[..., 0] * data['decoder_loss_weights']
    _, sums = loss_sums(run.model, run.state.params, data)
    assert float(sums['nats']) == pytest.approx(nats.sum(), rel=1e-5)
    assert float(sums['weight']) == data['decoder_loss_weights'].sum()
