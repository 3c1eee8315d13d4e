"""A partitioner: its mesh, its rules, data over the mesh, and states moved onto it."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from partitioning import (
    BasePartitioner,
    MeshConfig,
    PjitPartitioner,
    standard_logical_axis_rules,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]

SQUARE = Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))


@pytest.mark.parametrize(
    'settings',
    [
        {'num_partitions': 2},
        {'model_parallel_submesh': (1, 1, 1, 2)},
        {'backend': 'cpu'},
        {'ici_mesh_shape': (1, 4, 2), 'dcn_mesh_shape': (1, 1, 1)},
        {'dcn_mesh_shape': (1, 1, 1)},
    ],
)
@pytest.mark.parametrize('mesh', [SQUARE, MeshConfig(axes={'data': 4, 'model': 2})])
def test_a_given_mesh_decides_alone(mesh, settings):
    with pytest.raises(ValueError, match=r'mesh=.*remove') as error:
        PjitPartitioner(mesh=mesh, **settings)
    assert all(name in str(error.value) for name in settings)


def test_default_rules():
    assert PjitPartitioner(1).logical_axis_rules == tuple(standard_logical_axis_rules())
    assert PjitPartitioner(1, logical_axis_rules=()).logical_axis_rules == ()


@pytest.mark.parametrize(
    'rules, spec, size',
    [
        ([('batch', 'data')], P('data'), 4),
        ([('batch', 'model')], P('model'), 2),
        ([('batch', ('data', 'model'))], P(('data', 'model')), 8),
        ([('batch', None)], P(None), 1),
        ([('embed', 'model')], P(None), 1),
    ],
)
def test_the_batch_follows_its_rule(rules, spec, size):
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
    assert partitioner.data_partition_spec == spec
    assert partitioner.data_mesh_size == size
    batch = np.arange(16.0).reshape(8, 2)
    held = jax.device_put(batch, NamedSharding(partitioner.mesh, partitioner.data_partition_spec))
    assert held.addressable_shards[0].data.shape == (8 // size, 2)
    assert partitioner.get_data_layout().batch_size == size
    assert partitioner.data_shards == 1 and partitioner.data_shard_id == 0


def test_a_batch_rule_for_an_absent_axis():
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=[('batch', 'dta')])
    message = r"'dta'.*data 4 x model 2.*'data'"
    with pytest.raises(ValueError, match=message):
        partitioner.get_data_layout(8)
    with pytest.raises(ValueError, match=message):
        partitioner.data_partition_spec  # noqa: B018


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match='abstract'):
        BasePartitioner(num_partitions=1)
