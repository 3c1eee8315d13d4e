"""A partitioner: its mesh, its rules, data over the mesh, and states moved onto it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from partitioning import (
    BasePartitioner,
    MeshConfig,
    PjitPartitioner,
    standard_logical_axis_rules,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]

SQUARE = Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))


def test_a_given_mesh():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ('replica', 'data', 'expert'))
    partitioner = PjitPartitioner(
        mesh=mesh, logical_axis_rules=[('batch', ('replica', 'data')), ('experts', 'expert')]
    )
    assert partitioner.mesh is mesh
    assert partitioner.data_partition_spec == P(('replica', 'data'))
    assert partitioner.data_mesh_size == 4


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


def test_settings_next_to_a_mesh():
    partitioner = PjitPartitioner(
        mesh=SQUARE, params_on_devices=False, logical_axis_rules=[('batch', 'model')]
    )
    assert partitioner.mesh is SQUARE and not partitioner.params_on_devices
    assert partitioner.data_partition_spec == P('model')


@pytest.mark.parametrize(
    'mesh',
    [
        MeshConfig(axes={'data': -1, 'model': 2}, devices=jax.devices()[4:]),
        MeshConfig.from_t5x(num_partitions=2, devices=jax.devices()[4:]),
    ],
)
def test_a_description_of_a_mesh(mesh):
    partitioner = PjitPartitioner(mesh=mesh)
    assert partitioner.mesh is partitioner.mesh  # it is made once
    assert dict(partitioner.mesh.shape) == {'data': 2, 'model': 2}
    assert set(partitioner.mesh.devices.flat) == set(jax.devices()[4:])


@pytest.mark.parametrize('mesh', [(4, 2), {'data': 8}, 'data=8'])
def test_values_that_are_not_meshes(mesh):
    with pytest.raises(ValueError, match=r'mesh=.*MeshConfig\('):
        PjitPartitioner(mesh=mesh)


def test_axes_are_auto_by_default():
    assert {*PjitPartitioner(num_partitions=2).mesh.axis_types} == {AxisType.Auto}


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


def test_local_chunk_info():
    info = PjitPartitioner(2).get_local_chunk_info((8, 4), ('data', 'model'))
    assert info.slice == (slice(0, 8), slice(0, 4)) and info.replica_id == 0


def test_params_on_devices():
    partitioner = PjitPartitioner(2, params_on_devices=False)
    assert not partitioner.params_on_devices
    partitioner.params_on_devices = True
    assert partitioner.params_on_devices


def test_move_params_to_devices():
    partitioner = PjitPartitioner(num_partitions=2)
    state = {'w': np.arange(32.0).reshape(8, 4), 'b': np.arange(4.0), 'step': np.int32(7)}
    axes = {'w': P('data', 'model'), 'b': P('model'), 'step': None}
    moved = partitioner.move_params_to_devices(state, axes)
    for name, array in moved.items():
        np.testing.assert_array_equal(array, state[name])
        sharding = NamedSharding(partitioner.mesh, axes[name] or P())
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_one_step_of_data_parallel_descent():
    """Slope and intercept of a line: the mean of the gradients of two workers."""
    xs, ys = [], []
    for seed in (123, 456):
        generator = np.random.RandomState(seed)
        x, e = generator.randn(1000), generator.randn(1000)
        xs.append(x)
        ys.append(3 * x + 2 + e)

    def loss(params, x, y):
        return jnp.mean((params['w'] * x + params['b'] - y) ** 2)

    def step(params, x, y):
        grads = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    x, y = (np.concatenate(a).astype(np.float32) for a in (xs, ys))
    for num_partitions in (1, 2, 8):
        partitioner = PjitPartitioner(num_partitions=num_partitions)
        rows = partitioner.data_partition_spec
        params = partitioner.partition(step, (None, rows, rows), None)(
            {'w': np.float32(5), 'b': np.float32(0)}, x, y
        )
        np.testing.assert_allclose(params['b'], 0.0411517, rtol=1e-5)
        slope = 5 - 0.01 * (4.231471367403939 + 3.890762517830649) / 2
        np.testing.assert_allclose(params['w'], slope, rtol=1e-5)


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match='abstract'):
        BasePartitioner(num_partitions=1)
