"""The rounds of scattered sums on described TPUs, and what the compiler makes of them."""

import re

import jax
import jax.numpy as jnp
import pytest
from described_machines import described, needs_libtpu
from jax.sharding import PartitionSpec as P

from partitioning import MeshConfig, PjitPartitioner
from partitioning.products import find_rounds, scatter_sum


@needs_libtpu
@pytest.mark.parametrize(
    ('name', 'slices', 'axes', 'expected'),
    [
        ('v5p:4x4x4', 1, {'data': 64, 'model': 1}, {'data': (16, 4)}),
        ('v5p:4x4x4', 1, {'data': 16, 'model': 4}, {}),
        ('v5p:8x8x8', 1, {'data': 512}, {'data': (64, 8)}),
        ('v5e:4x4', 1, {'data': 1, 'model': 16}, {'model': (4, 4)}),
        ('v6e:16x16', 1, {'data': 256}, {'data': (16, 16)}),
        ('v6e:16x16', 1, {'data': 32, 'model': 8}, {}),
        ('v5e:4x4', 2, {'replica': 1, 'data': 16}, {'data': (4, 4)}),
    ],
)
def test_rounds_of_an_axis_that_spans_a_slice(name, slices, axes, expected):
    topology = described(name, slices)
    mesh = MeshConfig(axes=axes, slice_axis='replica', devices=topology.devices).build()
    assert find_rounds(mesh) == expected


@needs_libtpu
def test_the_compiler_keeps_the_reduce_scatters():
    """In one round it would be an all-reduce of the whole array."""
    mesh = MeshConfig(axes={'data': 16}, devices=described('v5e:4x4').devices).build()
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=[('batch', 'data')])

    def scatter(x_NDF):
        return jax.shard_map(
            lambda x_NDF: scatter_sum(x_NDF[0], 'data', 0),
            in_specs=P('data'),
            out_specs=P('data'),
        )(x_NDF)

    step = partitioner.partition(scatter, P('data'), P('data'))
    x_NDF = jax.ShapeDtypeStruct((16, 4096, 14336), jnp.bfloat16)
    text = step.lower(x_NDF).compile().as_text()
    assert re.findall(r'= (\S+?)\{\S* reduce-scatter\(', text) == [
        'bf16[1024,14336]',
        'bf16[256,14336]',
    ]
    assert ' all-reduce(' not in text
