"""torch_xla's manual sharding, and its layouts of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from xla_meshes import SHUFFLED, mesh_of, refuses, xy_mesh

from partitioning.compat.torch_xla import (
    ManualShards,
    apply_backward_optimization_barrier,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    local_shards,
    mark_sharding,
    mark_sharding_with_gradients,
)

pytestmark = pytest.mark.core


@pytest.fixture
def shards():
    return enable_manual_sharding(np.ones((8, 8)), xy_mesh(), ('x', 'y'))


@pytest.mark.parametrize('jitted', [False, True])
def test_D12_manual_sharding(jitted):
    mesh = mesh_of((1, 8))
    seen = []

    def add_one(t):
        shards = enable_manual_sharding(t, mesh, (0, 1))
        assert shards.shape == (8, 1)
        done = shards.apply(lambda block: (seen.append(block.shape), block + 1)[1])
        assert done.shape == (8, 1)
        return disable_manual_sharding(done, (8, 8))

    x = (jax.jit(add_one) if jitted else add_one)(jnp.zeros((8, 8)))
    assert x.tolist() == np.ones((8, 8)).tolist() and set(seen) == {(8, 1)}
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, P('0', '1')), 2)
    assert enable_manual_sharding(x, mesh, (None, None)).shape == (8, 8)


@pytest.mark.parametrize('dim, spec', [(0, ('1', None)), (-1, (None, '1'))])
def test_D12_reduce_scatter(dim, spec):
    shards = enable_manual_sharding(jnp.ones((8, 8)), mesh_of((1, 8)), (None, None))
    summed = shards.apply(
        lambda block: jax.lax.psum_scatter(
            block, '1', scatter_dimension=dim % block.ndim, tiled=True
        ),
        partition_spec=spec,
    )
    assert summed.shape == ((1, 8) if dim == 0 else (8, 1))
    assert {s.data.shape for s in local_shards(summed.array)} == {summed.shape}
    assert disable_manual_sharding(summed).tolist() == np.full((8, 8), 8.0).tolist()


@pytest.mark.parametrize('scale, of_ones, of_ranks', [(1.0, 8.0, 36.0), (0.25, 2.0, 9.0)])
def test_D12_all_reduce(scale, of_ones, of_ranks):
    """It sums ones, and values that differ per device; torch_xla's `scale` is a product."""
    shards = enable_manual_sharding(jnp.ones((8, 8)), mesh_of((1, 8)), (None, None))

    def of_rank(block):
        return block * (1 + jax.lax.axis_index('1'))

    for rank, expected in ((lambda block: block, of_ones), (of_rank, of_ranks)):
        summed = shards.apply(lambda block, rank=rank: jax.lax.psum(rank(block), '1') * scale)
        assert summed.shape == (8, 8)
        whole = disable_manual_sharding(summed)
        assert whole.tolist() == np.full((8, 8), expected).tolist()
        assert whole.sharding.is_fully_replicated


def test_D12_results_that_differ_along_an_unused_axis():
    shards = enable_manual_sharding(jnp.ones((8, 8)), mesh_of((1, 8)), (None, None))
    refuses(
        lambda: shards.apply(lambda block: block + jax.lax.axis_index('1')),
        r'\(None, None\) does not use .* 0 1 x 1 8.*psum',
    )


def test_D12_full_shape():
    shards = enable_manual_sharding(jnp.ones((8, 8)), mesh_of((1, 8)), (0, 1))
    refuses(
        lambda: disable_manual_sharding(shards, (8, 1)),
        r'an array of shape \(8, 8\), not \(8, 1\)',
    )


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_blocks_of_several_arrays(types):
    """A matrix product whose contracted dimension is sharded."""
    mesh = xy_mesh(types)
    a, b = np.arange(32.0).reshape(4, 8), np.arange(48.0).reshape(8, 6)

    def product(a, b):
        rows = enable_manual_sharding(a, mesh, ('y', 'x'))
        columns = enable_manual_sharding(b, mesh, ('x', None))
        assert rows.shape == (2, 2) and columns.shape == (2, 6)
        return rows.apply(
            lambda left, right: jax.lax.psum(left @ right, 'x'),
            columns,
            partition_spec=('y', None),
        )

    with jax.set_mesh(mesh):
        for made in (product(a, b), jax.jit(product)(a, b)):
            assert isinstance(made, ManualShards) and made.shape == (2, 6)
            np.testing.assert_allclose(disable_manual_sharding(made, (4, 6)), a @ b)
        through = jax.jit(lambda shards: shards.apply(functools.partial(jnp.multiply, 2.0)))(made)
    np.testing.assert_allclose(disable_manual_sharding(through), 2 * (a @ b))


def test_gradients_pass_manual_sharding():
    def loss(t):
        shards = enable_manual_sharding(t, xy_mesh(), ('x', None))
        return disable_manual_sharding(shards.apply(jnp.sin)).sum()

    x = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_allclose(jax.grad(loss)(x), np.cos(x), rtol=1e-6)


def test_invalid_operands_and_results(shards):
    mesh = shards.mesh
    shuffled = enable_manual_sharding(np.ones((8, 8)), xy_mesh(ids=SHUFFLED), ('x', 'y'))
    padded = mark_sharding(np.ones(9), mesh, ('x',), on_indivisible='pad')
    for call, message in [
        (lambda: shards.apply(jnp.add, np.ones(3)), 'operand 1 is ndarray, not ManualShards'),
        (lambda: shards.apply(jnp.add, shuffled), 'operand 1 is on another mesh'),
        (lambda: shards.apply(jnp.sum), r'blocks of shape \(\), but .* has 2 entries'),
        (lambda: shards.apply(lambda b: (b, b)), 'must return one array, not tuple'),
        (lambda: shards.apply(jnp.add, partition_spec=('z', None)), "'z' .* x 4 x y 2"),
        (lambda: shards.apply(lambda b: b, partition_spec=('x', None)), 'does not use all axes'),
        (lambda: enable_manual_sharding(shards, mesh, ('x', 'y')), 'ManualShards is not an array'),
        (lambda: enable_manual_sharding(padded, mesh, ('x',)), r'PaddedArray.* pass t\.array'),
        (lambda: disable_manual_sharding(np.ones(8)), 'ndarray is not ManualShards'),
        (lambda: disable_manual_sharding(shards, 8), 'full_shape=8 must be a sequence'),
    ]:
        refuses(call, message)


def test_layouts_inside_the_function(shards):
    mark = functools.partial(mark_sharding, mesh=shards.mesh, partition_spec=('x', 'y'))
    block = enable_manual_sharding(np.ones((32, 8)), shards.mesh, ('x', 'y'))
    marked = block.apply(lambda shard: mark(shard) + 1)  # the array is one shard along both axes
    np.testing.assert_array_equal(disable_manual_sharding(marked), np.full((32, 8), 2))
    refuses(lambda: block.apply(clear_sharding), 'inside a shard_map')


def test_sizes_that_are_not_divisible():
    mesh = xy_mesh()
    refuses(
        lambda: enable_manual_sharding(np.ones(9), mesh, ('x',)),
        r"size 9 is not divisible by 4.*8 or 12.* or pass mark_sharding\(..., on_indivisible='pad'",
    )
    array = mark_sharding(np.ones(9), mesh, ('x',), on_indivisible='pad').array
    assert enable_manual_sharding(array, mesh, ('x',)).shape == (3,)


@pytest.mark.parametrize('collective', ['psum', 'ppermute', 'all_gather'])
def test_collectives_over_axes_that_the_mesh_lacks(shards, collective):
    extra = ([(0, 1)],) if collective == 'ppermute' else ()
    fn = getattr(jax.lax, collective)
    refuses(lambda: shards.apply(lambda block: fn(block, 'z', *extra)), 'x 4 x y 2')


@pytest.mark.parametrize(
    'error', [ValueError('its own'), AssertionError('its own'), NameError('n')]
)
def test_errors_of_the_function_stay_unchanged(shards, error):
    def fail(block):
        raise error

    with pytest.raises(type(error)) as raised:
        shards.apply(fail)
    assert raised.value is error


def test_the_replacement_for_an_all_gather():
    mesh, x = xy_mesh(), np.arange(64.0).reshape(8, 8)
    shards = enable_manual_sharding(x, mesh, ('x', None))
    gather = functools.partial(jax.lax.all_gather, axis_name='x', tiled=True)
    refuses(
        lambda: shards.apply(gather, partition_spec=(None, None)),
        'disable_manual_sharding and then mark_sharding with None',
    )
    whole = mark_sharding(disable_manual_sharding(shards), mesh, (None, None))
    np.testing.assert_array_equal(local_shards(whole)[0].data, x)


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
