"""The floating-point operations of functions, by formulas, and the speed of a run on a clock."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import Mesh, PartitionSpec

from partitioning.products.flops import count_flops, count_jaxpr_flops
from train.reporting import meter

pytestmark = pytest.mark.core

A, B = np.ones((3, 5), np.float32), np.ones((5, 7), np.float32)
MATMUL = 2 * 3 * 5 * 7


def loop(a, b):
    return jax.lax.scan(lambda x, _: (x @ b @ b.T, None), a, length=11)[0]


def batched(a, b):
    return jnp.einsum('bij,bjk->bik', jnp.stack([a] * 4), jnp.stack([b] * 4))


def branches(a, b):
    return jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: a @ b @ b.T @ b)


def gradients(a, b):
    return jax.grad(lambda a, b: (a @ b).sum() ** 2, (0, 1))(a, b)


def ragged(a, b):
    """Six rows of two groups: each meets one of two matrices."""
    rows, sizes = jnp.concatenate([a, a]), jnp.array([4, 2])

    def total(rows, matrices):
        return (jax.lax.ragged_dot(rows, matrices, sizes) ** 2).sum()

    return jax.grad(total, (0, 1))(rows, jnp.stack([b, b]))


def sharded(a, b):
    """Each of 2 x 2 devices multiplies its rows of 12 by all of b."""
    mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ('x', 'y'))
    rows = PartitionSpec(('x', 'y'))
    multiply = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
    )
    return multiply(jnp.concatenate([a] * 4), b)


def kernel(a, b):
    """A grid of 2 x 3 blocks."""

    def multiply(a_ref, b_ref, out_ref):
        out_ref[...] = a_ref[...] @ b_ref[...]

    out = jax.ShapeDtypeStruct((3, 7), jnp.float32)
    return pallas.pallas_call(multiply, out_shape=out, grid=(2, 3), interpret=True)(a, b)


def convolution(groups):
    """2 images of 8x8, from 3 to 6 features by kernels of 3x3."""

    def convolve(a, b):
        images, kernels = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3 // groups, 6))
        layout = ('NHWC', 'HWIO', 'NHWC')
        return jax.lax.conv_general_dilated(
            images, kernels, (1, 1), 'SAME', dimension_numbers=layout, feature_group_count=groups
        )

    return convolve


@pytest.mark.parametrize(
    'function, expected',
    [
        (lambda a, b: a @ b + 1.0, MATMUL),
        (batched, 4 * MATMUL),
        (loop, 11 * 2 * MATMUL),
        (jax.jit(loop), 11 * 2 * MATMUL),
        (jax.checkpoint(lambda a, b: a @ b), MATMUL),
        (branches, 3 * MATMUL),
        (sharded, 4 * MATMUL),
        (kernel, 6 * MATMUL),
        (ragged, 3 * 2 * 6 * 5 * 7),  # forward, and for each factor
        (gradients, 3 * MATMUL),  # the product, and one of the same size for each factor
        (convolution(1), 2 * (2 * 8 * 8 * 6) * (3 * 3 * 3)),
        (convolution(3), 2 * (2 * 8 * 8 * 6) * (3 * 3)),
    ],
)
def test_the_flops_of_products_and_convolutions(function, expected):
    assert count_flops(function, A, B) == expected


def test_the_flops_of_groups_of_rows_alone():
    both = jax.make_jaxpr(lambda a, b: (ragged(a, b), loop(a, b)))(A, B)
    assert count_jaxpr_flops(both.jaxpr, dense=False) == count_flops(ragged, A, B)


def test_the_speed_of_the_steps_between_two_records(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(meter, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(meter, 'peak_flops', lambda devices: 1e6 * len(devices))
    monkeypatch.setattr(meter, 'memory_in_use', lambda: 12345)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    batch = {'decoder_input_tokens': tokens, 'decoder_target_tokens': tokens}
    measured = meter.Meter(batch, jax.devices()[:8], total_steps=100, step=10, flops=2e6)
    now[0] += 30
    measured.skip(10.0)  # an evaluation
    assert measured.read(20, waited=5.0) == pytest.approx(
        {
            'train/tokens_per_second': 8 * 16 / 2,
            'train/seconds_per_step': 2.0,
            'train/input_wait': 5 / 20,
            'train/seconds_left': 160.0,
            'train/mfu': 2e6 / 2 / 8e6,
            'train/device_memory_bytes': 12345,
        }
    )
    now[0] += 1
    assert measured.read(21, waited=5.5)['train/input_wait'] == pytest.approx(0.5)


def test_the_peak_of_known_chips():
    devices = [types.SimpleNamespace(device_kind='TPU v5 lite')] * 4
    assert meter.peak_flops(devices) == 4 * 197e12  # of bfloat16, as Google publishes it
    assert meter.peak_flops(jax.devices()) is None
