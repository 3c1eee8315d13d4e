"""The exchanges and products of traced functions, against counts by hand and compiled programs."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from meshwright import read_costs
from meshwright.jaxpr import list_collectives, trace_function
from meshwright.time import estimate_work
from partitioning.hardware import CHIPS

pytestmark = pytest.mark.core

BATCH, WIDTH, HIDDEN = 1024, 64, 256
WEIGHTS = WIDTH * HIDDEN * 4  # bytes of one of two float32 matrices
ACTIVATIONS = BATCH * WIDTH * 4


@pytest.fixture(scope='module')
def mesh():
    return jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)


def step(weights, x):
    """A step of gradient descent of two layers with a residual."""

    def loss(weights):
        up, down = weights
        hidden = jax.nn.relu(x @ up)
        return jnp.sum((x + hidden @ down) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def laid_out(mesh, up, down, x):
    def on(spec):
        return NamedSharding(mesh, spec)

    jitted = jax.jit(
        step,
        in_shardings=((on(up), on(down)), on(x)),
        out_shardings=(on(up), on(down)),
        donate_argnums=0,
    )
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH), (BATCH, WIDTH)
    a, b, c = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return jitted, ((a, b), c)


def sent(collectives):
    """The bytes that a device sends, by kind and axes, without scalars."""
    found = collections.Counter()
    for collective in collectives:
        if collective.total_bytes > 100:
            found[collective.kind, collective.axes] += collective.total_bytes
    return dict(found)


CASES = {
    # Each device sums the gradients of its rows: an all-reduce moves them twice.
    'data parallel': ((P(), P(), P('data')), {('all-reduce', ('data',)): 2 * 2 * WEIGHTS * 3 / 4}),
    # Each matrix is gathered for the forward pass, and kept; the gradients are scattered.
    'fsdp': (
        (P('data'), P('data'), P('data')),
        {
            ('all-gather', ('data',)): 2 * WEIGHTS * 3 / 4,
            ('reduce-scatter', ('data',)): 2 * WEIGHTS * 3 / 4,
        },
    ),
    # The rows of the second product are partial sums; x needs no gradient.
    'tensor parallel': (
        (P(None, 'model'), P('model'), P()),
        {('all-reduce', ('model',)): 2 * ACTIVATIONS / 2},
    ),
    'data and tensor parallel': (
        (P(None, 'model'), P('model'), P('data')),
        {
            ('all-reduce', ('model',)): 2 * ACTIVATIONS / 4 / 2,
            ('all-reduce', ('data',)): 2 * 2 * WEIGHTS / 2 * 3 / 4,
        },
    ),
}


@pytest.mark.parametrize('name', CASES)
def test_exchanges_are_those_counted_by_hand(mesh, name):
    specs, expected = CASES[name]
    function, args = laid_out(mesh, *specs)
    assert sent(list_collectives(trace_function(function, *args))) == expected


@pytest.mark.parametrize('name', CASES)
def test_a_compiled_program_exchanges_as_much(mesh, name):
    """On CPUs, a reduce-scatter is an all-reduce, of which each device keeps a part."""
    specs, _ = CASES[name]
    function, args = laid_out(mesh, *specs)
    compiled = sent(read_costs(function.lower(*args).compile(), mesh).collectives)
    found = sent(list_collectives(trace_function(function, *args)))
    for (kind, axes), nbytes in list(found.items()):
        if kind == 'reduce-scatter':
            del found[kind, axes]
            found['all-reduce', axes] = found.get(('all-reduce', axes), 0) + 2 * nbytes
    assert found == compiled


def test_sums_over_devices_that_are_added_are_one(mesh):
    """Each device along 'data' multiplies its 4 of 16 rows, and adds both products before."""
    rows = NamedSharding(mesh, P('data'))
    arrays = [jax.ShapeDtypeStruct((16, 8), 'float32', sharding=rows)] * 2
    found = list_collectives(trace_function(jax.jit(lambda x, y: x.T @ y + y.T @ x), *arrays))
    assert [(c.kind, c.axes, c.count) for c in found] == [('all-reduce', ('data',), 1)]


def test_products_are_divided_among_the_devices(mesh):
    function, args = laid_out(mesh, P(None, 'model'), P('model'), P('data'))
    work = estimate_work(trace_function(function, *args), CHIPS['v5e'])
    # Two products forward, and three backward: x needs no gradient.
    assert work.matmul_flops == 5 * 2 * BATCH * WIDTH * HIDDEN / 8
    assert (work.origin, work.chip, work.kernels, work.host_bytes) == ('jaxpr', 'v5e', (), 0)


def test_tiled_arrays_are_not_in_memory():
    """A row of 128 numbers is repeated inside of the loop that multiplies by it."""

    def scale(x, row):
        return x * jnp.tile(row, (1024, 1))

    args = jax.ShapeDtypeStruct((1024, 128), 'float32'), jax.ShapeDtypeStruct((1, 128), 'float32')
    mesh = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Auto,))
    traced = trace_function(jax.jit(scale), *args, mesh=mesh)
    assert estimate_work(traced, CHIPS['v5e']).other_bytes == 4 * 128 * (1024 + 1 + 1024)
    view = trace_function(jax.jit(jnp.ravel), args[0], mesh=mesh)
    assert estimate_work(view, CHIPS['v5e']).other_bytes == 0


def test_exchanges_in_loops_count_once_per_iteration(mesh):
    def many(weights, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]

    function = jax.jit(
        many, in_shardings=(NamedSharding(mesh, P(None, 'data')), NamedSharding(mesh, P('data')))
    )
    weights = jax.ShapeDtypeStruct((7, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    (found,) = list_collectives(trace_function(function, weights, x))
    assert (found.kind, found.axes, found.group_size, found.count) == (
        'all-gather',
        ('data',),
        4,
        7,
    )
    assert found.wire_bytes == WIDTH * WIDTH * 4 * 3 / 4
    assert found.source.startswith(__file__)


def test_gradients_cross_between_slices_as_shards(mesh):
    """Two slices along 'data': a sum within a slice of two devices, then one between slices."""
    function, args = laid_out(mesh, P(), P(), P('data'))
    traced = trace_function(function, *args, slices={'data': 2})
    found = collections.Counter()
    for collective in list_collectives(traced):
        if collective.total_bytes > 100:
            found[collective.network, collective.group_size] += collective.total_bytes
    assert found == {('ici', 2): 2 * WEIGHTS, ('dcn', 2): 2 * WEIGHTS / 2}


def add_up_by_parts(head, up, parts, *, of_up):
    """Adds up the gradients of a loss by its parts, which do not use `up`."""

    def loss(weights, part):
        return jnp.sum(jnp.tanh(part @ weights['head']))

    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, part)), None

    weights = {'head': head} | ({'up': up} if of_up else {})
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), parts)
    used = jnp.tanh(up)
    return head + total['head'], used + total['up'] if of_up else used


def test_zeros_that_a_loop_adds_up_cost_nothing(mesh):
    """Compilers do not carry them, so it is as if nobody had asked for the gradient of `up`."""
    shapes = (WIDTH, HIDDEN), (8 * WIDTH, HIDDEN), (4, 128, WIDTH)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = []
    for of_up in True, False:
        traced = trace_function(
            jax.jit(functools.partial(add_up_by_parts, of_up=of_up)), *args, mesh=mesh
        )
        (loop,) = (step for step in traced.block.steps if step.name == 'scan')
        assert [value.shape for value in loop.outputs] == [(WIDTH, HIDDEN)]
        found.append(estimate_work(traced, CHIPS['v5e']).other_bytes)
    assert found[0] == found[1]
