"""The memory of traced functions, against counts by hand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwright.jaxpr import estimate_memory, trace_function
from partitioning.hardware import CHIPS

pytestmark = pytest.mark.core

ROWS, WIDTH, LAYERS = 4096, 64, 6
KEPT = ROWS // 8 * WIDTH * 4  # one float32 activation on one of 8 devices
MATRIX = WIDTH * WIDTH * 4


@pytest.fixture(scope='module')
def mesh():
    return jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def make_step(forward):
    """A step of gradient descent: (weights, x) -> weights."""

    def step(weights, x):
        gradients = jax.grad(lambda w: jnp.sum(forward(w, x) ** 2))(weights)
        return weights - 0.1 * gradients

    return step


def scanned(remat):
    def layer(x, w):
        return jnp.sin(x @ w), None

    body = jax.checkpoint(layer) if remat else layer
    return make_step(lambda weights, x: jax.lax.scan(body, x, weights)[0])


def estimate(mesh, step, *args, specs, donate=(0,)):
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    jitted = jax.jit(
        step, in_shardings=shardings, out_shardings=shardings[0], donate_argnums=donate
    )
    return estimate_memory(trace_function(jitted, *args))


WHOLE, BY_ROWS = PartitionSpec(), PartitionSpec('data')


def estimate_layers(mesh, remat, rows=ROWS):
    args = shape(LAYERS, WIDTH, WIDTH), shape(rows, WIDTH)
    return estimate(mesh, scanned(remat), *args, specs=(WHOLE, BY_ROWS))


@pytest.mark.parametrize('remat', [False, True])
def test_the_forward_pass_keeps_one_activation_per_layer(mesh, remat):
    """Its input, and without rematerialization also the cosine of its product."""
    found = estimate_layers(mesh, remat)
    assert found.arguments == LAYERS * MATRIX + KEPT
    stacks = [a for a in found.buffers if a.array == f'f32[{LAYERS},{ROWS // 8},{WIDTH}]']
    assert sum(a.nbytes for a in stacks) == LAYERS * KEPT * (1 if remat else 2)
    assert found.gradients == LAYERS * MATRIX
    # The result of the last layer is kept too, for the gradient of the sum of squares.
    assert found.activations == sum(a.nbytes for a in stacks) + KEPT
    sizes = [a.nbytes for a in found.buffers]
    assert sizes == sorted(sizes, reverse=True)
    file, _, line = found.buffers[0].source.rpartition(':')
    assert file == __file__
    assert 'jax.lax.scan' in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_donated_arguments_hold_the_results(mesh):
    args = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    specs = WHOLE, BY_ROWS
    kept = estimate(mesh, lambda w, x: w + 1.0, *args, specs=specs, donate=())
    donated = estimate(mesh, lambda w, x: w + 1.0, *args, specs=specs)
    assert kept.peak - donated.peak == LAYERS * MATRIX


def test_a_mesh_of_no_devices_will_do():
    mesh = AbstractMesh((512,), ('data',), axis_types=(AxisType.Auto,))
    found = estimate_layers(mesh, True, rows=512 * ROWS)
    assert found.arguments == LAYERS * MATRIX + ROWS * WIDTH * 4


def test_a_function_without_a_mesh_is_refused():
    with pytest.raises(ValueError, match=r'no mesh.*pass mesh='):
        trace_function(jax.jit(jnp.sin), shape(8))


def test_a_long_chain_of_operations_takes_the_memory_of_one_array(mesh):
    def chain(x):
        y = x @ jnp.ones((WIDTH, WIDTH))
        for _ in range(700):
            y = y * 1.5
        return y

    jitted = jax.jit(chain, in_shardings=NamedSharding(mesh, BY_ROWS))
    found = estimate_memory(trace_function(jitted, shape(ROWS, WIDTH)), CHIPS['v5p'])
    # The constant is part of the product. Tiles of 128 columns would be half empty, but a layout
    # with the rows last wastes nothing.
    assert found.peak == 2 * KEPT
