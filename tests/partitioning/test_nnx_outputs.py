"""Outputs of nnx modules, laid out by the output_plan of a plan."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from modules_with_outputs import MESH, TOP, Block, X, has_spec, tower, under_jit

from partitioning import create_mesh
from partitioning.compat.pytorch import ShardingPlan, shard_module

pytestmark = pytest.mark.core


@functools.cache
def expected():
    """The output of the tower on one device."""
    return under_jit(tower())


def assert_equal(out, expected):
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def split_and_merge(module):
    graphdef, state = nnx.split(module)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)


TRANSFORMS = {
    'nnx.jit': under_jit,
    'split and merge': split_and_merge,
    'nnx.remat': lambda m: nnx.jit(nnx.remat(lambda m, x: m(x)))(m, X),
    'nnx.clone': lambda m: under_jit(nnx.clone(m)),
    'copy.deepcopy': lambda m: under_jit(copy.deepcopy(m)),
    'jax.jit': lambda m: jax.jit(lambda m, x: m(x))(m, X),
}


@pytest.mark.parametrize(
    ('path', 'transform'),
    [*(('by_name/top', name) for name in TRANSFORMS), ('by_name.top', 'nnx.jit'), ('', 'nnx.jit')],
)
def test_nnx_modules(path, transform):
    module = tower(ShardingPlan({'by_name/top/kernel': P('data')}, {path: P('data', 'model')}))
    with jax.set_mesh(MESH):
        out = TRANSFORMS[transform](module)
    assert has_spec(out, P('data', 'model'))
    assert_equal(out, expected())


@pytest.mark.parametrize('path', ['blocks/0', 'blocks/1/fc2', 'blocks.0.fc1'])
def test_nnx_modules_within(path):
    module, plain = tower(ShardingPlan({}, {path: P('data', 'model')})), tower()
    for part in path.replace('.', '/').split('/'):
        module, plain = (
            m[int(part)] if part.isdigit() else getattr(m, part) for m in (module, plain)
        )
    x = np.ones((8, 64 if path.endswith('fc2') else 16), 'float32')
    with jax.set_mesh(MESH):
        out = under_jit(module, x)
    assert has_spec(out, P('data', 'model')) and isinstance(module, type(plain))
    assert type(module).__name__ == type(plain).__name__
    assert_equal(out, plain(x))


def test_gradients_and_steps():
    """The losses equal the model's losses on one device."""

    @nnx.jit
    def step(m, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(m)
        optimizer.update(m, grads)
        return loss

    def losses(module):
        optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
        return [float(step(module, optimizer, X)) for _ in range(3)]

    plan = ShardingPlan({'fc2/kernel': P(None, 'model')}, {'fc2': P('data', 'model')})
    module = shard_module(Block(nnx.Rngs(0)), plan, MESH)
    with jax.set_mesh(MESH):
        found = losses(module)
    np.testing.assert_allclose(found, losses(Block(nnx.Rngs(0))), rtol=1e-4)
    assert found[2] < found[0]
    assert module.fc2.kernel[...].sharding.spec == P(None, 'model')


class Layers(nnx.Module):
    """Two layers in one array, as nnx.vmap makes them."""

    def __init__(self):
        self.kernel = nnx.Param(np.random.default_rng(1).normal(size=(2, 16, 16)).astype('float32'))

    def __call__(self, x):
        return x @ self.kernel


class Stack(nnx.Module):
    def __init__(self):
        self.layers = Layers()

    def __call__(self, x):
        body = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return body(x, self.layers)


def test_a_scan_over_layers():
    stack = Stack()
    first, second = np.asarray(stack.layers.kernel[...])
    plan = ShardingPlan({'layers/kernel': P(None, None, 'model')}, {'layers': P('data', 'model')})
    shard_module(stack, plan, MESH)
    assert stack.layers.kernel[...].sharding.spec == P(None, None, 'model')
    with jax.set_mesh(MESH):
        out = under_jit(stack)
    assert has_spec(out, P('data', 'model'))
    assert_equal(out, X @ first @ second)


def test_other_modules_of_the_same_class_are_unchanged():
    sharded, plain = tower(TOP), tower()
    assert type(plain.by_name['top']) is nnx.Linear
    with jax.set_mesh(MESH):
        assert has_spec(under_jit(sharded), P('data', 'model'))
        assert under_jit(plain).sharding.is_fully_replicated


def test_the_mesh_of_shard_module_is_used_where_none_is_set():
    assert has_spec(under_jit(tower(TOP)), P('data', 'model'))


def test_a_second_plan_replaces_the_first():
    module = shard_module(tower(TOP), ShardingPlan({}, {'by_name/top': P('model')}), MESH)
    with jax.set_mesh(MESH):
        assert has_spec(under_jit(module), P('model'))


def test_explicit_axes():
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=AxisType.Explicit)
    module = tower(ShardingPlan({}, {'': P('data', 'model')}), mesh)
    with jax.set_mesh(mesh):
        out = under_jit(module)
    assert out.sharding == NamedSharding(mesh, P('data', 'model'))
    assert_equal(out, expected())
