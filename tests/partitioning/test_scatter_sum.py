"""Sums that are scattered over mesh axes, in one round or several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import MeshConfig
from partitioning.products import in_rounds, scatter_sum

pytestmark = pytest.mark.core


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


def test_axes_in_any_order():
    mesh = MeshConfig(axes={'data': 4, 'model': 2}).build()
    addends = np.arange(8.0 * 16, dtype=np.float32).reshape(8, 16)
    mapped = jax.shard_map(
        lambda x_1D: scatter_sum(x_1D[0], ('model', 'data'), 0),
        mesh=mesh,
        in_specs=P(('data', 'model')),
        out_specs=P(('model', 'data')),
    )
    np.testing.assert_array_equal(jax.jit(mapped)(addends), addends.sum(axis=0))
