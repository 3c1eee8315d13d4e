"""Bytes and shapes of a state in the audit, against what arrays on the devices hold."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import AxisNames, PjitPartitioner, layout_table, unbox

pytestmark = pytest.mark.core

RULES = [('vocab', 'model'), ('embed', 'data'), ('mlp', None)]


def init(key):
    return {
        'table': nn.LogicallyPartitioned(jnp.zeros((32, 16)), ('vocab', 'embed')),
        'half': nn.LogicallyPartitioned(jnp.zeros((16, 6), jnp.bfloat16), ('embed', 'mlp')),
        'step': jnp.int32(0),
    }


@pytest.fixture(name='audit', scope='module')
def _audit():
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    state = jax.eval_shape(init, jax.random.key(0))
    axes = partitioner.get_mesh_axes(state)
    layouts = partitioner.audit(state).arrays
    arrays = partitioner.partition(lambda k: unbox(init(k)), None, axes)(jax.random.key(0))
    return layouts, arrays, partitioner.mesh


def test_layouts_are_what_devices_hold(audit):
    layouts, arrays, _ = audit
    assert {row.path for row in layouts} == arrays.keys()
    for row in layouts:
        array = arrays[row.path]
        shard = array.addressable_shards[0].data
        assert (row.shape, row.shard_shape) == (array.shape, shard.shape)
        assert np.dtype(row.dtype) == array.dtype
        assert (row.bytes_total, row.bytes_per_device) == (array.nbytes, shard.nbytes)
        assert array.sharding.spec == row.spec


def test_names_and_specs(audit):
    rows = {row.path: row for row in audit[0]}
    assert rows['table'].logical_axes == AxisNames('vocab', 'embed')
    assert rows['table'].spec == P('model', 'data')
    assert rows['half'].spec == P('data', None)
    assert rows['step'].bytes_per_device == rows['step'].bytes_total == 4


def test_table(audit):
    layouts, arrays, mesh = audit
    text = layout_table(layouts, mesh)
    assert 'data 4 x model 2 (8 devices)' in text
    total = sum(a.nbytes for a in arrays.values())
    held = sum(a.addressable_shards[0].data.nbytes for a in arrays.values())
    assert f'3 arrays, {total:,} bytes; {held:,} bytes per device' in text
    (line,) = [line for line in text.splitlines() if line.startswith('table')]
    assert '32 x 16' in line and "P('model', 'data')" in line and '16 x 4' in line
    assert line.endswith(' 256')
