"""Products of rows and weights, and sums that are scattered over mesh axes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from partitioning import AxisRules, MeshConfig, PjitPartitioner
from partitioning.products import in_rounds, multiply, scatter_sum

pytestmark = pytest.mark.core

RULES = [
    ('batch', ('replica', 'data')),
    ('length', None),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('kv', None),
    ('embed', 'data'),
]
IN = ('BLD,DF->BLF', ('batch', 'length', 'embed'), ('embed', 'mlp'))
OUT = ('BLHN,HND->BLD', ('batch', 'length', 'heads', 'kv'), ('heads', 'kv', 'embed'))
SPECS = (P('data', 'model'), P('model', None, 'data'))
X_SPEC = P(('replica', 'data'))


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (16, 32), (8, 4, 16), (8, 4, 16)
    w, out, x = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return (w, out), x


def two_layers(weights, x, product):
    """A product in, a function that is not linear, a product out, and a number."""
    hidden = product(IN[0], x, weights[0], *IN[1:])
    y = product(OUT[0], jnp.sin(hidden).reshape(8, 4, 8, 4), weights[1], *OUT[1:])
    return jnp.mean(jnp.square(y))


def plain(equation, x, w, *_):
    return jnp.einsum(equation, x, w)


def scanned(weights, x, product):
    """The same in a loop over layers that recomputes its products."""

    @jax.checkpoint
    def layer(total, weights):
        return total + two_layers(weights, x, product), None

    stacked = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), weights)
    return jax.lax.scan(layer, jnp.float32(0), stacked)[0]


def partitioned(function, sizes, rules=RULES, specs=SPECS, **settings):
    """The value and the gradients of a function of weights and rows, over a mesh."""
    mesh = MeshConfig(axes={'replica': 1, **sizes}, **settings)
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    gradients = jax.value_and_grad(functools.partial(function, product=multiply), (0, 1))
    return partitioner.partition(gradients, (specs, X_SPEC), (None, (specs, X_SPEC)))


@pytest.mark.parametrize(
    'sizes',
    [
        {'data': 4, 'model': 2},
        {'data': 1, 'model': 8},
        {'replica': 2, 'data': 2, 'model': 2},
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_device(sizes):
    weights, x = arrays()
    expected = jax.value_and_grad(functools.partial(scanned, product=plain), (0, 1))(weights, x)
    step = partitioned(scanned, sizes)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        step(weights, x),
        expected,
    )
    scattered = re.findall(r'stablehlo.reduce_scatter', step.lower(weights, x).as_text())
    assert len(scattered) == (2 if sizes['data'] > 1 else 0)


def test_gradients_follow_the_rules_of_the_optimizer():
    """Under ZeRO, weights are whole over the batch's axes and their gradients are not."""
    weights, x = arrays()
    rules = [rule for rule in RULES if rule[0] != 'embed']
    partitioner = PjitPartitioner(
        MeshConfig(axes={'replica': 1, 'data': 4, 'model': 2}),
        AxisRules([*rules, ('embed', None)], optimizer=RULES),
    )
    gradients = jax.grad(functools.partial(scanned, product=multiply))
    of_weights = P(None, 'model'), P('model')
    step = partitioner.partition(gradients, (of_weights, X_SPEC), SPECS)
    expected = jax.grad(functools.partial(scanned, product=plain))(weights, x)
    check = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(check, step(weights, x), expected)
    assert step.lower(weights, x).as_text().count('stablehlo.reduce_scatter') == 2


def test_sums_in_another_dtype():
    """With float32 sums of bfloat16 rows, neither the addends nor the gradient are rounded."""
    (w, _), x = arrays()
    x = x.astype(jnp.bfloat16)
    partitioner = PjitPartitioner(
        mesh=MeshConfig(axes={'replica': 1, 'data': 8, 'model': 1}), logical_axis_rules=RULES
    )

    def loss(w, x, dtype):
        y = multiply(*IN[:1], x, w, *IN[1:], gradient_dtype=dtype)
        assert y.dtype == jnp.bfloat16
        return jnp.sum(y.astype(jnp.float32))

    expected = np.broadcast_to(x.astype(np.float32).sum((0, 1))[:, None], (16, 32))
    for dtype, tolerance in ((None, 0.1), (jnp.float32, 1e-5)):
        fn = jax.grad(functools.partial(loss, dtype=dtype))
        found = partitioner.partition(fn, (P('data'), P('data')), P('data'))(w, x)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        assert (np.abs(found - expected).max() > 1e-3) == (dtype is None)
    unsharded = jax.grad(functools.partial(loss, dtype=jnp.float32))(w, x)
    np.testing.assert_allclose(unsharded, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ('why', 'rules', 'settings'),
    [
        ('only the batch is sharded', [('batch', ('replica', 'data')), ('embed', None)], {}),
        (
            'an axis that is not summed divides it first',
            [*RULES[:2], ('embed', ('model', 'data'))],
            {},
        ),
        ('jax lays out gradients', RULES, {'axis_types': (AxisType.Explicit,)}),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_gradients_that_are_not_scattered(why, rules, settings):
    rules = [*rules, ('mlp', None), ('heads', None), ('kv', None), ('length', None)]
    partitioner = PjitPartitioner(
        mesh=MeshConfig(axes={'replica': 1, 'data': 4, 'model': 2}, **settings),
        logical_axis_rules=rules,
    )
    (w, _), x = arrays()

    def loss(w, x, product):
        return jnp.sum(product(IN[0], x, w, *IN[1:]) ** 2)

    gradients = jax.value_and_grad(functools.partial(loss, product=multiply), (0, 1))
    step = partitioner.partition(gradients, (P(), X_SPEC), None)
    assert 'shard_map' not in str(step.trace(w, x).jaxpr)
    expected = jax.value_and_grad(functools.partial(loss, product=plain), (0, 1))(w, x)
    check = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    jax.tree.map(check, step(w, x), expected)
    if why != 'jax lays out gradients':
        product = next(e for e in step.trace(w, x).jaxpr.eqns[::-1] if 'dot' in e.primitive.name)
        assert product.invars[0].aval.shape == x.shape, 'CPUs transpose the first of the two'


def test_without_a_mesh_it_is_an_einsum():
    (w, _), x = arrays()
    tangents = jax.jvp(lambda w: multiply(IN[0], x, w, *IN[1:]), (w,), (w,))
    np.testing.assert_array_equal(*tangents)
    with pytest.raises(ValueError, match=r"'BLD,DF->LF' is not a product.*'BLD,DF->BLF'"):
        multiply('BLD,DF->LF', x, w, *IN[1:])


def over_stages(weights, x, product):
    """The rows of each part of a batch that vmap shards over 'model'."""
    batched = jax.vmap(
        lambda x: jnp.mean(jnp.square(product(IN[0], x, weights[0], *IN[1:]))),
        spmd_axis_name='model',
    )
    return jnp.sum(batched(jnp.stack([x, 2 * x])))


def inside_shard_map(weights, x, product):
    """Within a function that is Manual over 'model', which divides the rows' length."""

    def inner(w, x):
        y = product(IN[0], x, w, *IN[1:])
        return jax.lax.psum(jnp.sum(jnp.square(y)), 'model')

    return jax.shard_map(
        inner, in_specs=(P(), P(None, 'model')), out_specs=P(), axis_names={'model'}
    )(weights[0], x)


@pytest.mark.parametrize('function', [over_stages, inside_shard_map])
def test_inside_transformations(function):
    (w, _), x = arrays()
    rules = [rule for rule in RULES if rule[0] != 'mlp'] + [('mlp', None)]
    step = partitioned(function, {'data': 4, 'model': 2}, rules, (P('data'),))
    value, gradients = step((w,), x)
    scale = 5 / (8 * 4 * 32) if function is over_stages else 1

    def expected(w, x):
        return scale * jnp.sum(jnp.square(jnp.einsum(IN[0], x, w)))

    found = value, (gradients[0][0], gradients[1])
    check = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3)
    jax.tree.map(check, found, jax.value_and_grad(expected, (0, 1))(w, x))
    assert 'reduce_scatter' in step.lower((w,), x).as_text()


# Scattered sums.


@pytest.mark.parametrize(
    ('sizes', 'rounds'),
    [
        ({'data': 8}, {}),
        ({'data': 8}, {'data': (2, 4)}),
        ({'data': 8}, {'data': (2, 2, 2)}),
        ({'data': 4, 'model': 2}, {'data': (2, 2)}),
        ({'data': 1, 'model': 8}, {'model': (4, 2)}),
    ],
    ids=str,
)
@pytest.mark.parametrize('dimension', [0, 1])
def test_each_device_keeps_its_shard_of_the_sum(sizes, rounds, dimension):
    mesh = MeshConfig(axes=sizes).build()
    addends = np.random.default_rng(0).integers(-9, 9, (8, 16, 24)).astype(np.float32)
    axes = tuple(sizes)

    def scatter(x_1DF):
        return scatter_sum(x_1DF[0], axes, dimension)

    with in_rounds(rounds):
        mapped = jax.shard_map(
            scatter, mesh=mesh, in_specs=P(axes), out_specs=P(*(None,) * dimension, axes)
        )
        compiled = jax.jit(mapped).lower(jnp.asarray(addends))
    found = compiled.compile()(addends)
    # The global array is in the order of the axes only if each device has the right shard.
    np.testing.assert_array_equal(found, addends.sum(axis=0))
    steps = sum(len(rounds.get(axis, (size,))) for axis, size in sizes.items() if size > 1)
    assert compiled.as_text().count('stablehlo.reduce_scatter') == steps
