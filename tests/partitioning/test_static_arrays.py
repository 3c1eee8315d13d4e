"""Arrays in static fields, and arrays that outlive their trace: right, or named."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_line_errors import error_of

from partitioning import AxisRules, MeshConfig, PjitPartitioner

pytestmark = pytest.mark.core
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


@flax.struct.dataclass
class Net:
    """A module that keeps an array, a list of them and a nested module in static fields."""

    w: jax.Array
    bias: jax.Array = flax.struct.field(pytree_node=False)
    others: dict = flax.struct.field(pytree_node=False)

    @jax.jit
    def __call__(self, x):
        return x @ self.w + self.bias + self.others['two'][1]


def net_of(key):
    bias = jnp.where(jnp.arange(8) > 3, 1.0, -1.0)
    w = jax.random.normal(key, (8, 8))
    return Net(w, bias, {'two': [jnp.arange(8.0), jnp.tri(8)], 'name': 'a'})


def train(net, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(net.replace(w=w)(x) ** 2))(net.w)
    return net.replace(w=net.w - gradient), loss


KEY = jax.random.key(0)


def losses(mesh):
    rules = [('.*', ('embed', 'mlp'))]
    partitioner = PjitPartitioner(mesh, AxisRules(names=rules))
    state, step, _ = partitioner.setup(net_of, train, KEY)
    found = []
    for _ in range(3):
        state, loss = step(state, X)
        found.append(float(loss))
    assert step.num_compilations() == 1
    np.testing.assert_array_equal(state.others['two'][1], np.tri(8))
    return found


def test_static_arrays_on_several_meshes():
    """Inner functions of jax.jit keep what they have compiled for the states of earlier meshes."""
    w, expected = np.asarray(jax.random.normal(KEY, (8, 8))), []
    constant = np.where(np.arange(8) > 3, 1.0, -1.0) + np.tri(8)
    for _ in range(3):
        y = X @ w + constant
        expected.append((y**2).mean())
        w = w - X.T @ (2 * y / y.size)
    for sizes in ((8, 1), (4, 2), (1, 8)):
        mesh = MeshConfig(axes=dict(zip(('data', 'model'), sizes, strict=True)))
        np.testing.assert_allclose(losses(mesh), expected, rtol=1e-5)


@pytest.mark.parametrize('name', ['equinox_static_array', 'returns_none'])
def test_modules_of_equinox(name):
    eqx = pytest.importorskip('equinox')

    class Module(eqx.Module):
        w: jax.Array
        bias: jax.Array = eqx.field(static=True)

        def __init__(self, key):
            self.w, self.bias = jax.random.normal(key, (8, 8)), jnp.tri(8)

        @jax.jit
        def __call__(self, x):
            return x @ self.w + self.bias

    def step(net, x):
        loss, gradient = eqx.filter_value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        return eqx.apply_updates(net, gradient), loss

    def run(partitioner):
        state, partitioned, _ = partitioner.setup(Module, step, KEY)
        return float(partitioned(state, X)[1])

    expected = ((X @ np.asarray(jax.random.normal(KEY, (8, 8))) + np.tri(8)) ** 2).mean()
    with pytest.warns(UserWarning, match='static'):
        if name == 'equinox_static_array':
            np.testing.assert_allclose(eqx.filter_jit(step)(Module(KEY), X)[1], expected, rtol=1e-5)
        for _ in range(2):
            found = run(PjitPartitioner(layout='fsdp'))
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_static_field_must_be_a_constant():
    partitioner = PjitPartitioner(layout='fsdp')

    def random_bias(key):
        return net_of(key).replace(bias=jax.random.normal(key, (8,)))

    message, _ = error_of(partitioner.init, random_bias, KEY)
    assert 'Net.bias' in message and 'random_bias' in message and 'pytree_node=False' in message

    def remade(net, x):
        return net.replace(w=net.w + x.mean(), bias=jnp.ones(8)), x.mean()

    setup = PjitPartitioner(layout='fsdp').setup(net_of, remade, KEY)
    message, _ = error_of(setup.step, setup.state, X)
    assert 'remade' in message and 'Net.bias' in message


def test_two_states_with_static_arrays():
    """jax cannot say whether their static fields are equal, and is quoted as the cause."""
    partitioner, first = PjitPartitioner(layout='fsdp'), net_of(KEY)
    specs = partitioner.plan(first).specs
    step = partitioner.partition(train, (specs, None), (specs, None))
    step(first, X)
    message, cause = error_of(step, net_of(KEY), X)
    assert 'train' in message and 'Net.bias of net' in message
    assert 'metadata' in str(cause)


def test_an_array_that_outlives_its_trace():
    kept = []

    def step(state, x):
        if kept:
            state = state + kept[0]
        kept.append(x.mean())
        return state, x.mean()

    def init(key):
        return jnp.zeros((8, 8))

    def late_init(key):
        return jnp.zeros((8, 8)) + kept[0]

    partitioner = PjitPartitioner(layout='fsdp')
    state, call, _ = partitioner.setup(init, step, KEY)
    state, _ = call(state, X)
    line = step.__code__.co_firstlineno + 3
    for failing, args in ((call, (state, np.ones((16, 8)))), (partitioner.init, (late_init, KEY))):
        message, cause = error_of(failing, *args)
        assert f'made in step at test_static_arrays.py:{line}' in message, message
        assert isinstance(cause, jax.errors.UnexpectedTracerError)


def test_a_trace_that_did_not_end_has_no_result():
    """No message describes the result of a function that has not returned."""

    class Odd:
        def __eq__(self, other):
            raise ValueError('cannot be compared')

        __hash__ = object.__hash__

    @jax.tree_util.register_pytree_node_class
    class Node:
        def tree_flatten(self):
            return (jnp.ones(3),), Odd()

        @classmethod
        def tree_unflatten(cls, static, children):
            return cls()

    inner = jax.jit(lambda node: 1.0)

    def step(x):
        return x, inner(Node()) + inner(Node())

    partitioner = PjitPartitioner(layout='fsdp')
    call = partitioner.partition(step, (None,), (None, None))
    message, cause = error_of(call, X)
    assert 'returns' not in message and 'static field' in message
    assert 'test_static_arrays.py' in message and cause is not None


def test_values_that_are_static_as_a_whole():
    """Such a value is its own static data, so that a search for arrays in it would not end."""

    @jax.tree_util.register_static
    @dataclasses.dataclass(frozen=True)
    class Sizes:
        width: int = 8

    init = lambda: {'w': jnp.ones((8, 8)), 'sizes': Sizes()}  # noqa: E731
    state, step, _ = PjitPartitioner(layout='fsdp').setup(init, lambda s, x: (s, x.sum()))
    assert step(state, X)[0]['sizes'] == Sizes()
