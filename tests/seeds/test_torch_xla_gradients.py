"""torch_xla's layouts of gradients, and its barrier between the gradients of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from xla_meshes import refuses, xy_mesh

from partitioning.compat.torch_xla import (
    apply_backward_optimization_barrier,
    mark_sharding,
    mark_sharding_with_gradients,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize('jitted', [False, True])
def test_D14_gradients_over_auto_axes(jitted):
    mesh = xy_mesh()

    def loss(t):
        return mark_sharding_with_gradients(t, mesh, ('x', None)).sum()

    gradient = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)
    grad = gradient(mark_sharding(np.zeros((8, 2)), mesh, (None, None)))
    assert grad.sharding.is_equivalent_to(NamedSharding(mesh, P('x')), 2)
    assert grad.tolist() == np.ones((8, 2)).tolist()


@pytest.mark.parametrize('jitted', [False, True])
def test_D14_gradients_over_explicit_axes(jitted):
    """The gradient of an array has the type of the array; the result's gradient has the mark."""
    mesh = xy_mesh('explicit')
    seen = []

    @jax.custom_vjp
    def look(t):
        return t

    def backward(_, gradient):
        seen.append(jax.typeof(gradient).sharding.spec)
        return (gradient,)

    look.defvjp(lambda t: (t, None), backward)

    def loss(t):
        return look(mark_sharding_with_gradients(t, mesh, ('x', None))).sum()

    gradient = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)
    with jax.set_mesh(mesh):
        for own in (P(None, None), P('x', None), P(None, 'y')):
            grad = gradient(mark_sharding(np.zeros((8, 2)), mesh, own))
            assert grad.sharding == NamedSharding(mesh, own)
            assert grad.tolist() == np.ones((8, 2)).tolist()
    assert set(seen) == {P('x', None)}


def test_D14_the_gradient_of_an_inner_layer():
    """A mark between two layers lays out the array and its gradient."""
    mesh, w = xy_mesh(), jnp.ones((8, 8))

    def loss(t):
        h = mark_sharding_with_gradients(jnp.sin(t), mesh, ('x', 'y'))
        return (h @ w).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((8, 8))).jaxpr
    constraints = [e for e in jaxpr.eqns if e.primitive.name == 'sharding_constraint']
    assert [e.params['sharding'].spec for e in constraints] == [P('x', 'y')] * 2


def layer(params, x, *, scale=2.0, name='layer'):
    return jnp.tanh(x @ params['w']).sum(-1) * params['steps'] * scale


def barriers(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'optimization_barrier']


def test_a_barrier_in_the_backward_pass():
    params = {'w': jnp.ones((3, 4)), 'steps': 3}
    x = jnp.arange(15.0).reshape(5, 3)
    barred = apply_backward_optimization_barrier(layer)
    assert barred.__name__ == 'layer'
    np.testing.assert_array_equal(
        barred(params, x, scale=3.0, name='a'), layer(params, x, scale=3.0)
    )

    def gradients(fn):
        return jax.grad(lambda w, x: fn({**params, 'w': w}, x).sum(), argnums=(0, 1))

    for mine, theirs in zip(
        gradients(barred)(params['w'], x), gradients(layer)(params['w'], x), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert not barriers(jax.make_jaxpr(gradients(layer))(params['w'], x).jaxpr)
    [barrier] = barriers(jax.make_jaxpr(gradients(barred))(params['w'], x).jaxpr)
    assert sorted(v.aval.shape for v in barrier.invars) == [(3, 4), (5, 3)]
    text = jax.jit(gradients(barred)).lower(params['w'], x).as_text()
    assert text.count('optimization_barrier') == 1
    assert not barriers(jax.make_jaxpr(lambda x: barred(params, x))(x).jaxpr)


def test_a_barrier_without_gradients_and_twice_differentiated():
    assert apply_backward_optimization_barrier(lambda n=3: n)() == 3
    second = jax.grad(jax.grad(apply_backward_optimization_barrier(jnp.sin)))
    assert second(0.5) == pytest.approx(-np.sin(0.5))
    refuses(lambda: apply_backward_optimization_barrier(np.ones(3)), 'must be a function')
