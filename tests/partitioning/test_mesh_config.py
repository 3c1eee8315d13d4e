"""MeshConfig: the ways to write a mesh, its axes over slices, and settings that contradict."""

import copy
import dataclasses
import pickle

import gin
import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from mock_devices import cpus, gpus, ids, tpu_slices, tpus, v3_4x4

from partitioning.mesh import MeshConfig

pytestmark = [pytest.mark.core, pytest.mark.smoke]


# Ways to write it.


@pytest.mark.parametrize(
    'axes',
    [
        {'data': -1, 'fsdp': 2, 'model': 2},
        [('data', -1), ('fsdp', 2), ('model', 2)],
        (['data', -1], ['fsdp', np.int64(2)], ['model', 2]),
        MeshConfig.parse_axes('data=-1, fsdp=2,model=2'),
    ],
)
def test_axes_as_a_mapping_as_pairs_and_as_text(axes):
    config = MeshConfig(axes=axes)
    assert config.axes == {'data': -1, 'fsdp': 2, 'model': 2}
    assert all(type(size) is int for size in config.axes.values())
    mesh = config.build()
    assert mesh.axis_names == ('data', 'fsdp', 'model')
    assert ids(mesh) == np.arange(8).reshape(2, 2, 2).tolist()


@pytest.mark.parametrize(
    'text',
    ['data', 'data=', 'data=two', '', 'data=2=3', 'data=2,', '=2', 'data=2,data=4', 'data=0'],
)
def test_text_that_does_not_name_axes(text):
    with pytest.raises(ValueError, match=r'data=-1,model=8|appears twice|non-empty|>= 1'):
        MeshConfig.parse_axes(text)


def test_a_config_is_a_value():
    config = MeshConfig(axes={'data': -1, 'model': 2}, dcn={'data': 2}, axis_types='explicit')
    same = MeshConfig(
        axes=[('data', -1), ('model', 2)], dcn=[('data', 2)], axis_types=[AxisType.Explicit]
    )
    assert config == same and hash(config) == hash(same)
    assert config != MeshConfig(axes={'model': 2, 'data': -1}, dcn={'data': 2})
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert eval(repr(config), {'MeshConfig': MeshConfig, 'Explicit': AxisType.Explicit}) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.axes = {'data': 8}
    with pytest.raises(TypeError):
        MeshConfig({'data': 8})


def test_a_config_shows_only_what_was_set():
    assert repr(MeshConfig(axes={'data': 8})) == "MeshConfig(axes={'data': 8})"
    config = MeshConfig(axes={'data': 8}, devices=jax.devices(), granule_size=4)
    assert 'granule_size=4' in repr(config) and '8 devices' in repr(config)
    assert 'num_partitions' not in repr(MeshConfig.from_t5x(2))


def test_a_config_in_gin():
    gin.external_configurable(MeshConfig, 'ConfigUnderTest')
    gin.parse_config("""
        ConfigUnderTest.axes = {'data': -1, 'fsdp': %FSDP}
        ConfigUnderTest.dcn = [('data', 1)]
        ConfigUnderTest.axis_types = ('explicit', 'auto')
        FSDP = 4
    """)
    mesh = gin.get_configurable('ConfigUnderTest')().build()
    assert dict(mesh.shape) == {'data': 2, 'fsdp': 4}
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Auto)


# Axes over slices.


def slices_of(mesh):
    return np.vectorize(lambda d: getattr(d, 'slice_index', 0))(mesh.devices).tolist()


def test_dcn_multiplies_the_axes_it_names():
    devices = tpu_slices(4, (2, 2, 1), 'TPU v4')
    config = MeshConfig(axes={'data': 2, 'model': 2}, dcn={'data': 2, 'model': 2}, devices=devices)
    assert ids(config.build()) == [
        *([0, 1, 4, 5], [2, 3, 6, 7]),
        *([8, 9, 12, 13], [10, 11, 14, 15]),
    ]
    rows = MeshConfig(axes={'data': 2, 'model': 2}, dcn={'data': -1}, devices=devices).build()
    assert slices_of(rows) == [[n // 2] * 2 for n in range(8)]


@pytest.mark.parametrize('order', ['best', 't5x'])
def test_a_slice_axis_is_there_where_there_are_slices(order):
    config = MeshConfig(axes={'data': -1, 'model': 4}, slice_axis='pod', order=order)

    def build(devices):
        return dataclasses.replace(config, devices=devices).build()

    one = build(tpus((2, 2, 2), 'TPU v4'))
    assert dict(one.shape) == {'data': 2, 'model': 4}
    two = build(tpu_slices(2, (2, 2, 2), 'TPU v4'))
    assert dict(two.shape) == {'pod': 2, 'data': 2, 'model': 4}
    assert ids(two) == [ids(one), (np.array(ids(one)) + 8).tolist()]
    assert dict(build(gpus(8, 2)).shape) == {'data': 4, 'model': 4}
    assert dict(build(None).shape) == {'data': 2, 'model': 4}


# T5X's order, and experts.


def test_t5x_order_of_any_axes():
    """The axes before the last one divide the rows of T5X's order."""
    axes = {'data': -1, 'fsdp': 2, 'model': 4}
    mesh = MeshConfig(axes=axes, order='t5x', devices=v3_4x4()).build()
    assert mesh.devices.shape == (4, 2, 4)
    assert ids(mesh)[0] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    tile = MeshConfig(axes=axes, order='t5x', model_parallel_submesh=(2, 1, 1, 2), devices=v3_4x4())
    assert ids(tile.build()) == ids(mesh)


# Contradictions, found before any device is looked for.


@pytest.fixture
def no_devices(monkeypatch):
    def refuse(*_):
        raise AssertionError('looked for devices')

    monkeypatch.setattr(jax, 'devices', refuse)


DATA = {'axes': {'data': -1, 'model': 2}}


@pytest.mark.parametrize(
    'settings, parts',
    [
        ({'axes': 'data=4'}, ["axes='data=4'", "{'data': -1, 'model': 2}"]),
        ({'axes': ['data', 'model']}, ['pairs']),
        ({'axes': {}}, ['axes=()']),
        ({'axes': {'': 2}}, ['non-empty']),
        ({'axes': [('x', 2), ('x', 4)]}, ["'x' appears twice"]),
        ({'axes': {'data': 0}}, ["{'data': 0}", 'the size 0 ', '>= 1']),
        ({'axes': {'data': -1, 'model': -1}}, ['2 sizes of -1']),
        ({**DATA, 'dcn': {'dta': 2}}, ["'dta'", "('data', 'model')", "Did you mean 'data'?"]),
        ({**DATA, 'dcn': {'data': 2.0}}, ['dcn', 'the size 2.0 ']),
        ({**DATA, 'dcn': {'data': 2}, 'slice_axis': 'pod'}, ["slice_axis='pod'", 'dcn']),
        ({**DATA, 'dcn': {'data': 2}, 'order': 't5x'}, ["order='t5x'", 'slice_axis']),
        ({**DATA, 'slice_axis': ''}, ["slice_axis=''"]),
        ({**DATA, 'axis_types': 'fast'}, ["axis_types='fast'", 'auto, explicit, manual']),
        ({**DATA, 'axis_types': ('auto',) * 3}, ['axis_types=', "('data', 'model')"]),
        (
            {**DATA, 'dcn': {}, 'granule_size': 4, 'process_is_granule': True},
            ['granule_size=4', 'process_is_granule=True'],
        ),
        ({**DATA, 'process_is_granule': True}, ['process_is_granule=True', 'dcn']),
        ({**DATA, 'process_is_granule': 'no'}, ["process_is_granule='no'"]),
        ({**DATA, 'topology': 'v5pp:4x4x4'}, ["'v5pp:4x4x4'", "Did you mean 'v5p'?"]),
        ({**DATA, 'topology': 'v5p:4x4'}, ['v5p', '3 dimensions (chips)']),
        ({**DATA, 'topology': 'h100:8'}, ['2 dimensions (hosts x GPUs per host)']),
        ({**DATA, 'topology': 'v5e:4x4', 'backend': 'cpu'}, ["'v5e:4x4'", 'backend']),
        ({**DATA, 'topology': 'v5e:4x4', 'devices': cpus(8, 1)}, ["'v5e:4x4'", 'devices']),
        ({**DATA, 'topology': 'v5e:4x4', 'num_slices': 0}, ['num_slices=0', '>= 1']),
        ({**DATA, 'num_slices': 2}, ['num_slices=2', 'topology']),
        ({**DATA, 'devices': cpus(8, 1), 'backend': 'cpu'}, ["backend='cpu'", 'devices']),
        ({**DATA, 'devices': []}, ['devices is empty']),
        ({**DATA, 'order': 'fast'}, ["order='fast'", "'t5x'"]),
        ({'axes': {'model': 2, 'data': -1}, 'order': 't5x'}, ["'data'", 'last axis']),
        ({**DATA, 'model_parallel_submesh': (1, 1, 1, 2)}, ['(1, 1, 1, 2)', "order='t5x'"]),
        (
            {**DATA, 'order': 't5x', 'model_parallel_submesh': (2, 1, 1, 2)},
            ['(2, 1, 1, 2)', 'size 4', "'model': 2"],
        ),
        ({**DATA, 'order': 't5x', 'model_parallel_submesh': (1, 2)}, ['4-tuple', '(1, 2)']),
        ({'axes': {'x': 8}, 'num_expert_partitions': 2}, ["'data'", "('x',)"]),
        ({'axes': {'data': 4, 'expert': 2}, 'num_expert_partitions': 2}, ["'expert'"]),
    ],
)
def test_contradictions(no_devices, settings, parts):
    with pytest.raises(ValueError) as error:
        MeshConfig(**settings)
    for part in parts:
        assert part in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'settings, parts',
    [
        ({}, ['num_partitions', 'ici_mesh_shape']),
        ({'num_partitions': 0}, ['num_partitions=0', '>= 1']),
        ({'num_partitions': 2, 'model_parallel_submesh': (1, 1, 1, 2)}, ['num_partitions=2']),
        ({'num_partitions': 2, 'mesh_axis_names': ('a',)}, ["('a',)", '1 names']),
        ({'num_partitions': 2, 'num_slices': 2}, ['num_slices=2']),
        ({'num_partitions': 2, 'topology': 'v5e:4x4', 'devices': cpus(4, 1)}, ["'v5e:4x4'"]),
    ],
)
def test_contradictions_of_t5x_settings(no_devices, settings, parts):
    with pytest.raises(ValueError) as error:
        MeshConfig.from_t5x(**settings)
    for part in parts:
        assert part in str(error.value)


# Sizes that do not fit the machine.


TWO_SLICES = tpu_slices(2, (2, 2, 2), 'TPU v4')


@pytest.mark.parametrize(
    'settings, parts',
    [
        (
            {'axes': {'data': 2, 'model': 3}},
            ["{'data': 2, 'model': 3}", '6', '8', "fits: {'data': 2, 'model': 4}"],
        ),
        ({'axes': {'data': -1, 'model': 3}}, ['multiple of 3', '8', "'model': 4"]),
        (
            {'axes': {'data': 2, 'model': 4}, 'dcn': {'data': 4}, 'devices': TWO_SLICES},
            ["dcn {'data': 4, 'model': 1}", "axes {'data': 2, 'model': 4}", 'slices is 2'],
        ),
        (
            {'axes': {'data': 4, 'model': 4}, 'dcn': {'data': 2}, 'devices': TWO_SLICES},
            ["axes {'data': 4, 'model': 4}", "dcn {'data': 2, 'model': 1}", '16', '2 slices is 8'],
        ),
        (
            {'axes': {'data': 3, 'model': 2}, 'slice_axis': 'pod', 'devices': TWO_SLICES},
            ["{'pod': 1, 'data': 3, 'model': 2}", '2 slices is 8'],
        ),
        (
            {
                'axes': {'data': -1, 'model': 3},
                'order': 't5x',
                'devices': tpus((2, 2, 2), 'TPU v4'),
            },
            ["'model'=3", '8 devices', 'one of 1, 2, 4, 8'],
        ),
        ({**DATA, 'order': 't5x', 'devices': TWO_SLICES}, ['2 slices', "slice_axis='replica'"]),
    ],
)
def test_sizes_that_do_not_fit(settings, parts):
    config = MeshConfig(**settings)
    with pytest.raises(ValueError) as error:
        config.build()
    for part in parts:
        assert part in str(error.value)
