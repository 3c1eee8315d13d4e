"""T5X's settings of a mesh: names, shapes within and over slices, and contradictions."""

import numpy as np
import pytest
from mock_devices import gpus, ids, sorted_ids, tpu_slices, tpus

from partitioning import PjitPartitioner
from partitioning.mesh.aliases import default_mesh

pytestmark = pytest.mark.core

# Shapes within slices and over them.


@pytest.mark.parametrize(
    'names, ici, dcn, shape',
    [
        (('data', 'model'), (2, 4), (2, 1), (4, 4)),
        (('replica', 'data', 'fsdp', 'model'), (1, 1, 4, 2), (2, 1, 1, 1), (2, 1, 4, 2)),
        (('stage', 'data', 'fsdp', 'sequence', 'model'), (1, 2, 2, 1, 2), (2, 1, 1, 1, 1), None),
    ],
)
def test_shapes_of_any_number_of_axes(names, ici, dcn, shape):
    devices = tpu_slices(2, (2, 2, 2), 'TPU v5')
    mesh = default_mesh(
        None, ici_mesh_shape=ici, dcn_mesh_shape=dcn, mesh_axis_names=names, devices=devices
    )
    assert mesh.axis_names == names
    assert mesh.devices.shape == (shape or (2, 2, 2, 1, 2))
    assert sorted_ids(mesh) == list(range(16))


@pytest.mark.parametrize(
    'names, ici, dcn, numbers',
    [
        (None, (2, 4), (1, 1), ["'replica'", '(2, 4)', 'mesh_axis_names']),
        (None, (1, 2, 2, 2), (1, 1, 1, 1), ['(1, 2, 2, 2)', 'mesh_axis_names']),
        (('data', 'model'), (1, 4, 2), (1, 1, 1), ['3 sizes', "2 axis names ('data', 'model')"]),
        (('data', 'model'), (4, 2), (1,), ['(4, 2) has 2 axes', '(1,) has 1']),
        (('data', 'data'), (4, 2), (1, 1), ["'data' appears twice"]),
    ],
)
def test_names_and_shapes_of_different_number(names, ici, dcn, numbers):
    with pytest.raises(ValueError) as error:
        default_mesh(None, ici_mesh_shape=ici, dcn_mesh_shape=dcn, mesh_axis_names=names)
    for number in numbers:
        assert number in str(error.value)


# Axis names with num_partitions.


@pytest.mark.parametrize('devices', [None, gpus(4, 2), tpus((2, 2, 2), 'TPU v4')])
def test_the_first_of_three_names_is_the_slice_axis(devices):
    """A program for several slices runs on one slice, too."""
    mesh = default_mesh(2, mesh_axis_names=('replica', 'data', 'model'), devices=devices)
    assert dict(mesh.shape) == {'replica': 1, 'data': 4, 'model': 2}
    assert ids(mesh)[0] == ids(default_mesh(2, devices=devices))


@pytest.mark.parametrize(
    'names, slices, message',
    [
        ((), 1, 'has 0 names.* 2 axes, or 3'),
        (('a', 'b', 'c', 'd'), 1, r'has 4 names.*mesh=MeshConfig\('),
        (
            ('data', 'model'),
            2,
            r"\('data', 'model'\).* 2 slices.* 3 axes.*\('replica', 'data', 'model'\)",
        ),
        (('a', 'b', 'c', 'd'), 2, 'has 4 names.*ici_mesh_shape'),
        (('data', 'data'), 1, "'data' appears twice"),
        (('data', 1), 1, "axis names .*'data', 1.* strings"),
    ],
)
def test_other_names(names, slices, message):
    devices = tpu_slices(slices, (2, 2, 2), 'TPU v4')
    with pytest.raises(ValueError, match=message):
        default_mesh(2, mesh_axis_names=names, devices=devices)


# Settings that contradict each other or do not decide the mesh.


def test_num_partitions_that_agrees_with_the_shapes():
    """T5X's configurations set num_partitions in addition to the shapes."""
    partitioner = PjitPartitioner(
        num_partitions=2, ici_mesh_shape=(1, 4, 2), dcn_mesh_shape=(1, 1, 1)
    )
    assert partitioner.mesh.shape['model'] == 2


@pytest.mark.parametrize('platform, devices', [('cpu', None), ('gpu', gpus(8, 2))])
def test_submesh_off_the_torus(platform, devices):
    with pytest.raises(ValueError, match=rf'\(2, 1, 1, 2\).*on {platform} set num_partitions=4'):
        default_mesh(None, (2, 1, 1, 2), devices=devices)


# Types of numbers and names.


def test_num_partitions_cannot_agree_with_whatever_remains():
    with pytest.raises(ValueError, match='each decide the model axis'):
        default_mesh(2, ici_mesh_shape=(1, 4, -1), dcn_mesh_shape=(1, 1, 1))


def test_an_empty_tuple_of_names_does_not_mean_the_default_names():
    with pytest.raises(ValueError, match=r'3 sizes for 0 axis names \(\)'):
        default_mesh(None, ici_mesh_shape=(1, 4, 2), dcn_mesh_shape=(1, 1, 1), mesh_axis_names=())


def test_the_message_names_the_setting_that_was_given():
    with pytest.raises(ValueError, match=r'^ici_mesh_shape \(1, 8, 2\) with dcn.* is 8; .*fits'):
        default_mesh(None, ici_mesh_shape=(1, 8, 2), dcn_mesh_shape=(1, 1, 1))


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'num_partitions': 2, 'backend': 'cpu', 'devices': gpus(8, 1)}, 'each decide the devices'),
        ({'model_parallel_submesh': 4}, '4-tuple'),
        ({'ici_mesh_shape': 8, 'dcn_mesh_shape': 1}, 'ici_mesh_shape=8 must be a sequence'),
        ({'num_partitions': 2, 'mesh_axis_names': 5}, 'mesh_axis_names=5 must be a sequence'),
        ({'num_partitions': 2, 'devices': 'cpu'}, "must be JAX devices.*not 'c'"),
    ],
)
def test_settings_of_other_types(settings, message):
    with pytest.raises(ValueError, match=message):
        default_mesh(**({'num_partitions': None} | settings))


def test_shapes_as_numpy_arrays():
    ici, dcn = np.array([1, 4, 2]), np.array([1, 1, 1])
    assert default_mesh(None, ici_mesh_shape=ici, dcn_mesh_shape=dcn).devices.shape == (1, 4, 2)


def test_a_granule_larger_than_the_domains_that_gpus_know():
    with pytest.raises(ValueError, match=r'granule_size=32 .* NVLink domains of \[16\] GPUs'):
        default_mesh(2, devices=gpus(4, 4, domains=2), granule_size=32)
