"""Programs of jax that train with the layouts of AutoDist's planners, and what is saved of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import TrainState, create_mesh
from partitioning.compat.autodist import (
    PS,
    AllReduce,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    UnevenPartitionedPS,
    VariablePartitioner,
    compress_gradients,
    shard_gradients,
)

pytestmark = pytest.mark.core


def mesh_of(*shape, names=('data', 'model')):
    return create_mesh(shape, names[: len(shape)], devices=jax.devices()[: int(np.prod(shape))])


# AutoDist's linear regression.


def line(seed):
    """The 1000 points of AutoDist's linear regression."""
    random = np.random.RandomState(seed)
    x = random.randn(1000)
    return x, 3.0 * x + 2.0 + random.randn(1000)


def objective(params, x, y):
    return jnp.mean((params['W'] * x + params['b'] - y) ** 2)


# W and b after one step from 5 and 0 on all points of one seed, or of both.
AFTER_A_STEP = {(123,): (4.95768529, 0.04175035), (123, 456): (4.95938883, 0.04115171)}


@pytest.mark.parametrize('seeds', AFTER_A_STEP, ids=str)
def test_A13_one_step_on_a_mesh(seeds):
    mesh, tx = mesh_of(8, 1), optax.sgd(0.01)
    points = [np.concatenate(x).astype('float32') for x in zip(*map(line, seeds), strict=True)]
    x, y = jax.device_put(points, NamedSharding(mesh, P('data')))
    state = TrainState.create({'W': jnp.float32(5), 'b': jnp.float32(0)}, tx)
    state, plan = VariablePartitioner(mesh).apply(state, PartitionedPS())

    @functools.partial(jax.jit, out_shardings=plan.shardings)
    def step(state, x, y):
        grads = jax.grad(objective)(state.params, x, y)
        return state.apply_gradients(shard_gradients(grads, plan), tx)

    params = step(state, x, y).params
    w, b = AFTER_A_STEP[seeds]
    np.testing.assert_allclose(params['b'], b, rtol=1e-5)
    np.testing.assert_allclose(params['W'], w, rtol=1e-6)


def test_A13_workers_of_different_sizes():
    """One worker has two devices, each with its whole set: the mean is over devices."""
    ratio = (2, 1)
    mesh = mesh_of(3, names=('data',))
    x, y = (
        np.stack([a] * ratio[0] + [b] * ratio[1]).astype('float32')
        for a, b in zip(line(123), line(456), strict=True)
    )
    tx = optax.chain(compress_gradients('float32', axis_name='data'), optax.sgd(0.01))
    params = {'W': jnp.float32(5), 'b': jnp.float32(0)}

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P('data'), P('data')), out_specs=P()
    )
    def step(params, x, y):
        own = jax.lax.pcast(params, 'data', to='varying')
        updates, _ = tx.update(jax.grad(objective)(own, x, y), tx.init(params))
        return optax.apply_updates(params, updates)

    stepped = step(params, x, y)
    # AutoDist's gradients of W and b for each seed.
    of_seeds = (4.231471367403939, 3.890762517830649), (-4.175034879114915, -4.05530707554011)
    means = [np.average(gradients, weights=ratio) for gradients in of_seeds]
    np.testing.assert_allclose(stepped['W'], 5 - 0.01 * means[0], rtol=1e-6)
    np.testing.assert_allclose(stepped['b'], -0.01 * means[1], rtol=1e-5)
    np.testing.assert_allclose(stepped['b'], 0.0413512, rtol=1e-5)


# A small language model.


def two_layers():
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(0, 0.3, shape).astype('float32'))

    return {'emb': normal(32, 8), 'dense': {'kernel': normal(8, 32), 'bias': normal(32)}}


TOKENS = np.random.default_rng(1).integers(0, 32, (16, 4), np.int32)


def next_token_loss(params, tokens):
    logits = params['emb'][tokens] @ params['dense']['kernel'] + params['dense']['bias']
    return optax.softmax_cross_entropy_with_integer_labels(logits, (tokens + 1) % 32).mean()


def losses_of(state, tokens, tx, plan=None):
    """The losses of three steps, and the state after them."""

    def step(state, tokens):
        loss, grads = jax.value_and_grad(next_token_loss)(state.params, tokens)
        grads = grads if plan is None else shard_gradients(grads, plan)
        return state.apply_gradients(grads, tx), loss

    shardings = {} if plan is None else {'out_shardings': (plan.shardings, None)}
    step, losses = jax.jit(step, **shardings), []
    for _ in range(3):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    return losses, state


@functools.cache
def losses_of_one_device():
    tx = optax.adam(1e-2)
    return losses_of(TrainState.create(two_layers(), tx), TOKENS, tx)[0]


# The shards of 'emb', (32, 8), over an axis of size n: AutoDist's planners, with what each splits.
SPLIT = {
    PS(): lambda n: (32, 8),
    PSLoadBalancing(): lambda n: (32, 8),
    PartitionedPS(): lambda n: (32 // n, 8),
    UnevenPartitionedPS(): lambda n: (32 // n, 8),
    AllReduce(): lambda n: (32, 8),
    PartitionedAR(): lambda n: (32 // n, 8),
    RandomAxisPartitionAR(seed=1): lambda n: (32, 8 // n),
    Parallax(sparse=('emb',)): lambda n: (32 // n, 8),
}
SIZES = {(1, 8): 8, (2, 4): 2, (8, 1): 8}  # of 'data', or of the only axis larger than 1


@pytest.mark.parametrize('planner', SPLIT, ids=lambda p: type(p).__name__)
def test_A13_what_every_planner_splits(planner):
    state = jax.eval_shape(lambda: TrainState.create(two_layers(), optax.adam(1e-2)))
    for shape, size in SIZES.items():
        laid_out, _ = VariablePartitioner(mesh_of(*shape)).apply(state, planner)
        mu = laid_out.opt_state[0].mu['emb']
        for emb in laid_out.params['emb'], mu:
            assert emb.sharding.shard_shape(emb.shape) == SPLIT[planner](size)


@pytest.mark.parametrize(
    'planner, shape',
    [
        (AllReduce(), (8, 1)),
        (PartitionedPS(), (2, 4)),
        (RandomAxisPartitionAR(seed=1), (2, 4)),
        (Parallax(sparse=['emb']), (8, 1)),
    ],
    ids=lambda x: str(x) if isinstance(x, tuple) else type(x).__name__,
)
def test_A13_every_layout_trains_as_one_device(planner, shape):
    """One planner for each of the four layouts that the eight can choose."""
    mesh, tx = mesh_of(*shape), optax.adam(1e-2)
    state = TrainState.create(two_layers(), tx)
    state, plan = VariablePartitioner(mesh).apply(state, planner)
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P('data')))
    losses, state = losses_of(state, tokens, tx, plan)
    np.testing.assert_allclose(losses, losses_of_one_device(), rtol=1e-5)
    moments = state.opt_state[0].mu['emb']
    assert moments.sharding.is_equivalent_to(state.params['emb'].sharding, 2)


def test_A14_saved_sharded_restored_anywhere(tmp_path):
    """Saved from 4 x 2, and restored by a plain program on one device and on 2 x 4.

    The state has the rounding errors of four workers, which are along 'data', then along 'model'.
    """
    ocp = pytest.importorskip('orbax.checkpoint')

    def abstract_on(shape, axis):
        mesh = mesh_of(*shape)
        compressed = compress_gradients(error_feedback=True, axis_name=axis, mesh=mesh)
        tx = optax.chain(compressed, optax.adam(1e-2))
        state = jax.eval_shape(lambda: TrainState.create(two_layers(), tx))
        partitioner = VariablePartitioner(mesh, mesh_axis=axis)
        return partitioner.apply(state, PartitionedPS())[0].state_dict()

    def numbers(x):
        values = np.arange(x.size).reshape(x.shape).astype(x.dtype)
        return jax.device_put(values, x.sharding)

    held = jax.tree.map(numbers, abstract_on((4, 2), 'data'))
    assert held['params']['emb'].sharding.spec == P('data', None)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'saved', held)
    with ocp.StandardCheckpointer() as checkpointer:
        described = checkpointer.metadata(tmp_path / 'saved')
    written = {
        jax.tree_util.keystr(path, simple=True, separator='/'): tuple(x.shape)
        for path, x in jax.tree_util.tree_leaves_with_path(
            described.item_metadata.tree, is_leaf=lambda x: hasattr(x, 'shape')
        )
    }
    shapes = {'emb': (32, 8), 'dense/kernel': (8, 32), 'dense/bias': (32,)}
    assert written == {
        **{f'params/{name}': shape for name, shape in shapes.items()},
        **{f'opt_state/0/error/{name}': (4, *shape) for name, shape in shapes.items()},
        **{f'opt_state/1/0/mu/{name}': shape for name, shape in shapes.items()},
        **{f'opt_state/1/0/nu/{name}': shape for name, shape in shapes.items()},
        **{'opt_state/1/0/count': (), 'step': ()},
    }, 'the names of the whole variables, and no part of any'
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for target in (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), held),
        abstract_on((2, 4), 'model'),
    ):
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / 'saved', target)
        for (path, saved), (same, found), wanted in zip(
            jax.tree_util.tree_leaves_with_path(held),
            jax.tree_util.tree_leaves_with_path(restored),
            jax.tree.leaves(target),
            strict=True,
        ):
            assert path == same and saved.shape == found.shape
            assert found.sharding.is_equivalent_to(wanted.sharding, found.ndim)
            np.testing.assert_array_equal(np.asarray(saved), np.asarray(found))
    assert restored['params']['emb'].sharding.mesh.shape == {'data': 2, 'model': 4}
    assert restored['opt_state']['0']['error']['emb'].sharding.spec == P('model', 'data', None)


def test_A17_split_weights_in_control_flow():
    w = np.random.default_rng(0).normal(0, 0.4, (8, 8)).astype('float32')
    params, _ = VariablePartitioner(mesh_of(2, 4)).apply({'w': jnp.asarray(w)}, PartitionedPS())
    assert params['w'].sharding.shard_shape((8, 8)) == (4, 8)

    @jax.jit
    def run(params, x):
        def turn(x):
            return jnp.tanh(x @ params['w'])

        scanned, _ = jax.lax.scan(lambda x, _: (turn(x), None), x, length=5)
        _, looped = jax.lax.while_loop(
            lambda carry: carry[0] < 5, lambda carry: (carry[0] + 1, turn(carry[1])), (0, x)
        )
        chosen = x
        for _ in range(5):
            chosen = jax.lax.cond(chosen.sum() > -1e9, turn, lambda x: x, chosen)
        return scanned, looped, chosen

    x = wanted = np.ones((4, 8), 'float32')
    for _ in range(5):
        wanted = np.tanh(wanted @ w)
    for found in run(params, x):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
