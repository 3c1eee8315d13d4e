"""T5X's partitioning, by the tables of its own code on its own test machines."""

import dataclasses
import importlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.partitioning import AxisMetadata
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mock_devices import MockDevice, cpus, gpus, ids, mesh_of_processes, tpu_slices, tpus, v3_4x4

from partitioning import (
    AxisNames,
    LocalChunker,
    MoePjitPartitioner,
    PjitPartitioner,
    TrainState,
    bounds_from_last_device,
    default_mesh,
    get_coords,
    get_cpu_mesh,
    get_gpu_mesh,
    get_mesh,
    global_mesh_defined,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
    with_sharding_constraint,
)

pytestmark = pytest.mark.core


def in_rows(order, width):
    return np.reshape(order, (-1, width)).tolist()


def partitioner(**settings):
    return PjitPartitioner(devices=v3_4x4(), **settings)


# Devices.


def test_E1_bounds_and_coordinates():
    chip = MockDevice(id=0, process_index=0, coords=(3, 3, 3), core_on_chip=1)
    assert bounds_from_last_device(chip) == (4, 4, 4, 2)
    assert get_coords(dataclasses.replace(chip, coords=(1, 0, 1))) == (1, 0, 1, 1)


def test_E1_bounds_and_coordinates_without_a_torus(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 1)
    monkeypatch.setattr(jax, 'local_device_count', lambda: 4)
    device = MockDevice(id=9, process_index=1, device_kind='cpu', platform='cpu')
    assert bounds_from_last_device(device) == (1, 4)
    monkeypatch.setattr(jax, 'local_device_count', lambda: 8)
    assert get_coords(device) == (1, 1)


# Meshes of TPU v2, v3 and v4.

V3_1 = [
    *(0, 1, 8, 9, 2, 3, 10, 11),
    *(16, 17, 24, 25, 18, 19, 26, 27),
    *(4, 5, 12, 13, 6, 7, 14, 15),
    *(20, 21, 28, 29, 22, 23, 30, 31),
]
V3_4 = [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24, 25, 26, 27]]
V3_4 += [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23], [28, 29, 30, 31]]


def test_E2_each_process_of_v3_has_a_block_of_the_mesh():
    mesh = default_mesh(4, devices=v3_4x4())
    assert mesh.axis_names == ('data', 'model')
    assert (mesh.devices.shape, mesh.size) == ((8, 4), 32)
    for process in range(4):
        mine = [row for row in mesh.devices if row[0].process_index == process]
        assert np.shape(mine) == (2, 4)
        assert {d.process_index for row in mine for d in row} == {process}
    assert [[d.id for d in row] for row in mesh.devices if row[0].process_index == 0] == [
        [0, 1, 2, 3],
        [8, 9, 10, 11],
    ]


@pytest.mark.parametrize(
    'num_partitions, expected', [(1, in_rows(V3_1, 1)), (2, in_rows(V3_1, 2)), (4, V3_4)]
)
def test_E3_default_orders_of_v3(num_partitions, expected):
    assert ids(default_mesh(num_partitions, devices=v3_4x4())) == expected


@pytest.mark.parametrize(
    'submesh, expected',
    [
        ((1, 1, 1, 2), in_rows(V3_1, 2)),
        ((4, 1, 1, 2), in_rows(range(32), 8)),
        (
            (1, 4, 1, 2),
            [
                [0, 1, 8, 9, 16, 17, 24, 25],
                [2, 3, 10, 11, 18, 19, 26, 27],
                [4, 5, 12, 13, 20, 21, 28, 29],
                [6, 7, 14, 15, 22, 23, 30, 31],
            ],
        ),
    ],
)
def test_E3_submeshes_of_v3(submesh, expected):
    assert ids(get_mesh(submesh, v3_4x4())) == expected


def test_E3_what_does_not_fit_v3():
    message = 'num_partitions=3 does not divide the 32 devices .* use one of 1, 2, 4, 8, 16, 32'
    with pytest.raises(ValueError, match=message):
        default_mesh(3, devices=v3_4x4())
    message = r'submesh \(3, 1, 1, 1\) .* machine \(4, 4, 1, 2\): each .* must divide'
    with pytest.raises(ValueError, match=message):
        get_mesh((3, 1, 1, 1), v3_4x4())
    message = r'\(4, 1, 1, 1\) .* \(4, 4, 1, 2\), .* all 2 cores of each chip: use \(4, 1, 1, 2\)'
    with pytest.raises(ValueError, match=message):
        get_mesh((4, 1, 1, 1), v3_4x4())


def test_E3_the_whole_of_v3():
    """T5X's table ends before the whole machine; here it is one model replica."""
    mesh = default_mesh(32, devices=v3_4x4())
    assert dict(mesh.shape) == {'data': 1, 'model': 32}
    assert sorted(ids(mesh)[0]) == list(range(32))


@pytest.mark.parametrize(
    'bounds, num_partitions, expected',
    [
        ((2, 2, 2), 1, [[0], [2], [1], [3], [4], [6], [5], [7]]),
        ((2, 2, 2), 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ((2, 2, 2), 4, [[0, 2, 1, 3], [4, 6, 5, 7]]),
        ((2, 2, 1), 2, [[0, 2], [1, 3]]),
        ((2, 2, 1), 4, [[0, 2, 1, 3]]),
    ],
)
def test_E5_orders_of_v4(bounds, num_partitions, expected):
    assert ids(default_mesh(num_partitions, devices=tpus(bounds, 'TPU v4'))) == expected


# (kind, chips, cores of each that are devices, num_partitions, tile)
TILES = [
    *(
        (kind, (4, 4, 1), 2, num_partitions, tile)
        for kind in ('TPU v2', 'TPU v3')
        for num_partitions, tile in (
            *((1, (1, 1, 1, 1)), (2, (1, 1, 1, 2)), (4, (2, 1, 1, 2))),
            *((8, (2, 2, 1, 2)), (16, (4, 2, 1, 2))),
        )
    ),
    ('TPU v4', (4, 4, 4), 1, 1, (1, 1, 1, 1)),
    ('TPU v4', (4, 4, 4), 1, 2, (1, 2, 1, 1)),
    ('TPU v4', (4, 4, 4), 1, 4, (4, 1, 1, 1)),
    ('TPU v4', (2, 2, 4), 1, 4, (2, 2, 1, 1)),
    ('TPU v4', (4, 4, 4), 1, 8, (4, 2, 1, 1)),
    ('TPU v4', (2, 2, 8), 1, 8, (1, 1, 8, 1)),
    ('TPU v4', (4, 4, 8), 1, 8, (1, 1, 8, 1)),
    ('TPU v4', (2, 2, 16), 1, 16, (1, 1, 16, 1)),
    ('TPU v4', (8, 4, 16), 1, 16, (1, 1, 16, 1)),
    ('TPU v4', (8, 4, 4), 1, 16, (8, 2, 1, 1)),
    ('TPU v4', (4, 4, 4), 1, 16, (4, 4, 1, 1)),
    ('TPU v4', (2, 2, 4), 1, 16, (2, 2, 4, 1)),
]


@pytest.mark.parametrize('kind, bounds, cores, num_partitions, tile', TILES)
def test_E5_a_model_replica_is_one_tile_of_the_table(kind, bounds, cores, num_partitions, tile):
    mesh = default_mesh(num_partitions, devices=tpus(bounds, kind, cores))
    for row in mesh.devices:
        places = np.array([(*d.coords, d.core_on_chip) for d in row])
        low, high = places.min(axis=0), places.max(axis=0)
        assert tuple((high - low + 1).tolist()) == tile
        assert len(np.unique(places, axis=0)) == num_partitions
    assert sorted(np.ravel(ids(mesh)).tolist()) == list(range(mesh.size))


def order_of_jax(devices, shape):
    """Ids by `create_device_mesh`; None where it has no order."""
    try:
        grid = mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:
        return None
    return [[d.id for d in row] for row in grid]


@pytest.mark.parametrize(
    'kind, bounds, num_partitions, known',
    [
        *(('TPU v5 lite', (4, 4, 1), n, n in (1, 4, 16)) for n in (1, 2, 4, 8, 16)),
        *(('TPU v6 lite', (4, 4, 1), n, n in (1, 4, 16)) for n in (1, 2, 4, 8, 16)),
        *(('TPU v5', (2, 2, 4), n, True) for n in (1, 2, 4, 8, 16)),
        *((kind, (2, 4, 1), 4, True) for kind in ('TPU v5 lite', 'TPU v6 lite')),
    ],
)
def test_E5_newer_kinds_have_the_order_of_jax(kind, bounds, num_partitions, known):
    """T5X: 'No default mesh for this configuration'. Where jax has no order, there is one too."""
    devices = tpus(bounds, kind)
    shape = (len(devices) // num_partitions, num_partitions)
    mesh, theirs = default_mesh(num_partitions, devices=devices[::-1]), order_of_jax(devices, shape)
    assert dict(mesh.shape) == {'data': shape[0], 'model': shape[1]}
    assert sorted(np.ravel(ids(mesh)).tolist()) == list(range(len(devices)))
    assert (theirs is not None) == known
    assert theirs in (None, ids(mesh))


def hops(order, bounds):
    """Of each axis of a mesh: how far its neighbours are apart along the links, in all."""
    places = np.stack(np.unravel_index(order, bounds[::-1]), axis=-1)
    return [int(abs(places - np.roll(places, 1, axis)).sum()) for axis in (0, 1)]


@pytest.mark.parametrize('kind', ['TPU v5 lite', 'TPU v6 lite'])
@pytest.mark.parametrize(
    'bounds, num_partitions', [((2, 4, 1), 1), ((2, 4, 1), 2), ((2, 4, 1), 8), ((2, 2, 1), 2)]
)
def test_E5_one_tray_of_a_newer_kind_has_shorter_rings(kind, bounds, num_partitions):
    """jax has rings for 2 x 4 numbered as 4 x 2 are, and for 2 x 2 those of one axis."""
    devices = tpus(bounds, kind)
    ours = ids(default_mesh(num_partitions, devices=devices))
    theirs = order_of_jax(devices, np.shape(ours))
    assert np.shape(ours) == (len(devices) // num_partitions, num_partitions)
    assert sorted(np.ravel(ours).tolist()) == list(range(len(devices)))
    saved = np.subtract(hops(theirs, bounds), hops(ours, bounds))
    assert (saved >= 0).all() and saved.any()


@pytest.mark.parametrize(
    'num_partitions, expected',
    [
        (1, [[0], [1], [3], [2], [6], [7], [5], [4]]),
        (2, [[0, 1], [3, 2], [6, 7], [5, 4]]),
        (4, [[0, 1, 3, 2], [6, 7, 5, 4]]),
        (8, [[0, 1, 3, 2, 6, 7, 5, 4]]),
    ],
)
def test_E5_a_cube_of_v5p(num_partitions, expected):
    """As jax orders it since 0.11, on every jax."""
    assert ids(default_mesh(num_partitions, devices=tpus((2, 2, 2), 'TPU v5'))) == expected


def test_E5_eight_partitions_of_a_small_v4():
    """T5X's table says (4, 2, 1, 1), which a machine of 2 x 2 x 2 has not: AssertionError there."""
    mesh = default_mesh(8, devices=tpus((2, 2, 2), 'TPU v4'))
    assert ids(mesh) == [[0, 4, 2, 6, 1, 5, 3, 7]], 'the order of jax'


# CPU and GPU.


@pytest.mark.parametrize('num_partitions, shape', [(None, (1, 8)), (1, (8, 1)), (2, (4, 2))])
def test_E6_cpus_honour_num_partitions(num_partitions, shape):
    mesh = get_cpu_mesh() if num_partitions is None else get_cpu_mesh(num_partitions)
    assert mesh.axis_names == ('data', 'model')
    assert mesh.devices.shape == shape
    assert ids(mesh) == in_rows(range(8), shape[1])
    if num_partitions is not None:
        assert ids(default_mesh(num_partitions)) == ids(mesh)


def test_E6_the_model_axis_of_cpus_stays_in_a_process():
    mesh = default_mesh(4, devices=cpus(4, 2))
    assert [{d.process_index for d in row} for row in mesh.devices] == [{0}, {1}]
    assert ids(mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids(default_mesh(2, devices=cpus(4, 2)[::-1])) == in_rows(range(8), 2)


GPUS = [
    *[(8, 1, n, shape) for n, shape in ((1, (8, 1)), (2, (4, 2)), (8, (1, 8)))],
    *[(8, 2, n, shape) for n, shape in ((1, (16, 1)), (4, (4, 4)), (8, (2, 8)), (16, (1, 16)))],
    (4, 4, 8, (2, 8)),
]


@pytest.mark.parametrize('local, processes, num_partitions, shape', GPUS)
def test_E7_meshes_of_gpus(monkeypatch, local, processes, num_partitions, shape):
    devices = gpus(local, processes)
    monkeypatch.setattr(jax, 'devices', lambda *_: devices)
    mesh = get_gpu_mesh(num_partitions)
    assert mesh.axis_names == ('data', 'model')
    assert ids(mesh) == in_rows(range(len(devices)), shape[1])
    assert mesh.devices.shape == shape


@pytest.mark.parametrize(
    'num_partitions, problem', [(3, ''), (12, ''), (32, ': it is larger than the machine')]
)
def test_E7_gpus_that_do_not_divide(num_partitions, problem):
    message = f'num_partitions={num_partitions} does not divide the 16 devices of the machine'
    with pytest.raises(ValueError, match=f'^{message}{problem}; use one of 1, 2, 4, 8, 16$'):
        default_mesh(num_partitions, devices=gpus(8, 2))


# The partitioner's settings.


@pytest.mark.parametrize(
    'settings, said',
    [
        ({}, 'num_partitions'),
        ({'num_partitions': 4, 'model_parallel_submesh': (2, 1, 1, 2)}, 'model_parallel_submesh'),
        ({'model_parallel_submesh': (2, 1, 1)}, r'\(2, 1, 1\)'),
        ({'ici_mesh_shape': (1, 4, 2)}, 'dcn_mesh_shape'),
        ({'dcn_mesh_shape': (1, 4, 2)}, 'ici_mesh_shape'),
    ],
)
def test_E8_settings_that_do_not_decide_the_mesh(settings, said):
    with pytest.raises(ValueError, match=said):
        _ = partitioner(**settings).mesh


def test_E8_meshes_of_slices_shard_the_batch_over_replicas_too():
    devices = tpu_slices(2, (2, 2, 1), 'TPU v4')
    rules = [('batch', 'data'), ('mlp', 'model')]
    hybrid = PjitPartitioner(
        ici_mesh_shape=(1, 2, 2),
        dcn_mesh_shape=(2, 1, 1),
        devices=devices,
        logical_axis_rules=rules,
    )
    assert hybrid.mesh.axis_names == ('replica', 'data', 'model')
    assert hybrid.data_partition_spec == P(('replica', 'data'))
    assert tuple(hybrid.logical_axis_rules) == (('batch', ('replica', 'data')), rules[1])
    one = partitioner(num_partitions=4, logical_axis_rules=rules)
    assert one.data_partition_spec == P('data')
    assert tuple(one.logical_axis_rules) == tuple(rules)


# Who holds what.


def test_E9_chunks_of_v3():
    mesh = default_mesh(4, devices=v3_4x4())
    for process, chunk in {0: 0, 1: 2, 2: 1, 3: 3}.items():
        chunker = LocalChunker(mesh, process)
        assert chunker.num_chunks == {'data': 4, 'model': 1}
        assert chunker.chunk_ids == {'data': chunk, 'model': 0}
        info = chunker.get_local_chunk_info((128, 16), ['data', 'model'])
        assert info.slice == (slice(32 * chunk, 32 * (chunk + 1)), slice(0, 16))
        assert info.replica_id == 0
        # T5X has numpy's integers here.
        assert {type(s.start) for s in info.slice} == {int}
        info = chunker.get_local_chunk_info((128, 16), [None, 'model'])
        assert info.slice == (slice(None), slice(0, 16))
        assert info.replica_id == chunk


def test_E9_chunks_over_several_axes():
    """NotImplementedError in T5X."""
    chunker = LocalChunker(default_mesh(4, devices=v3_4x4()), 1)
    assert chunker.get_local_chunk_info((128,), [('data', 'model')]).slice == (slice(64, 96),)


def test_E10_shards_are_numbered_in_the_order_of_the_axes():
    mesh = mesh_of_processes([[[0], [1]], [[2], [3]]], ('replica', 'data', 'model'))
    forth = [LocalChunker(mesh, p).get_shard_id(('replica', 'data')) for p in range(4)]
    back = [LocalChunker(mesh, p).get_shard_id(('data', 'replica')) for p in range(4)]
    assert (forth, back) == ([0, 1, 2, 3], [0, 2, 1, 3])


def test_E11_layouts_of_the_batch_on_v3():
    one = partitioner(num_partitions=1)
    layouts = [one.get_data_layout(32, host_index=p) for p in range(4)]
    assert [x.num_shards for x in layouts] == [4] * 4
    assert [x.shard_id for x in layouts] == [0, 2, 1, 3]
    assert all(x.is_first_host_in_replica_set for x in layouts)

    sixteen = partitioner(num_partitions=16)
    assert sixteen.data_mesh_size == 2
    layouts = [sixteen.get_data_layout(32, host_index=p) for p in range(4)]
    assert [x.num_shards for x in layouts] == [2] * 4
    assert [x.is_first_host_in_replica_set for x in layouts] == [True, False, True, False]


@pytest.mark.parametrize('num_partitions, size', [(1, 32), (2, 16), (4, 8), (8, 4), (16, 2)])
def test_E11_without_a_size_a_batch_has_one_row_a_device(num_partitions, size):
    one = partitioner(num_partitions=num_partitions)
    assert one.data_mesh_size == size
    layout = one.get_data_layout()
    assert (layout.batch_size, layout.num_shards) == (size, min(size, 4))


def test_E11_batches_that_do_not_divide():
    message = r'[Bb]atch size \(3\) must be divisible by .*\(8\)'
    with pytest.raises(ValueError, match=message):
        partitioner(num_partitions=4).get_data_layout(3)


@pytest.mark.parametrize('rules', [[('mlp', 'model')], [('batch', None), ('mlp', 'model')]])
def test_E11_rules_that_do_not_shard_the_batch(rules):
    one = partitioner(num_partitions=4, logical_axis_rules=rules)
    assert one.data_partition_spec == P(None)
    assert one.data_mesh_size == 1
    for process in range(4):
        layout = one.get_data_layout(5, host_index=process)
        assert (layout.batch_size, layout.shard_id, layout.num_shards) == (5, 0, 1)
        assert layout.is_first_host_in_replica_set is (process == 0)


def test_E12_sizes_of_the_data_axes():
    rules = standard_logical_axis_rules(mesh_axes=('replica', 'data', 'model'))
    # A process holds (1, 4, 2) of (replica, data, model).
    halves = np.arange(4).reshape(2, 2, 1, 1) * np.ones((1, 1, 4, 2), int)
    mesh = mesh_of_processes(halves.reshape(2, 8, 2), ('replica', 'data', 'model'))
    shards = {(a, LocalChunker(mesh, p).get_shard_id(a)) for p in range(4) for a in mesh.axis_names}
    assert LocalChunker(mesh, 0).get_num_shards(('replica', 'data')) == 4
    assert len(shards) == 2 + 2 + 1
    mesh = mesh_of_processes(np.zeros((2, 4, 2), int), ('replica', 'data', 'model'))
    assert PjitPartitioner(mesh=mesh, logical_axis_rules=rules).data_mesh_size == 8


@pytest.mark.parametrize(
    'devices, settings',
    [
        (tpus((4, 4, 1), 'TPU v5 lite'), {'num_partitions': 4}),
        (
            tpu_slices(2, (4, 4, 1), 'TPU v5 lite'),
            {'ici_mesh_shape': (1, 16, 1), 'dcn_mesh_shape': (2, 1, 1)},
        ),
    ],
)
def test_E13_orders_that_give_a_host_no_sub_cube(devices, settings):
    """T5X raises, or gives two hosts the wrong rows: on v5e, rows 0-16 in the place of 8-24."""
    one = PjitPartitioner(devices=devices, **settings)
    sharding = NamedSharding(one.mesh, one.data_partition_spec)
    size = one.data_mesh_size
    expected = {d.process_index: set() for d in devices}
    for device, (rows,) in sharding.devices_indices_map((size,)).items():
        expected[device.process_index] |= set(range(*rows.indices(size)))
    for process, rows in expected.items():
        assert one.get_data_layout(size, host_index=process).row_indices == tuple(sorted(rows))


# Rules, and the states they lay out.

SHARDED = [('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model')]
SHARDED += [('joined_kv', 'model')]
WHOLE = ['kv', 'relpos_buckets', 'abspos_buckets', 'length', 'layers', 'stack', 'mlp_activations']


@pytest.mark.parametrize(
    'dims, embed',
    [((1, 1), []), ((2, 1), ['model']), ((1, 2), ['data']), ((2, 2), ['model', 'data'])],
)
def test_E14_standard_rules(dims, embed):
    """In this order: 'embed' last of those that are sharded, so all others have an axis first."""
    rules = standard_logical_axis_rules(*dims, additional_rules=[('mine', 'data')])
    assert rules[-1] == ('mine', 'data')
    sharded = [rule for rule in rules[:-1] if rule[1] is not None]
    assert sharded == [*SHARDED, *(('embed', axis) for axis in embed)]
    whole = [name for name, axes in rules if axes is None]
    assert sorted(whole) == sorted([*WHOLE, *([] if embed else ['embed'])])


EMBEDDED = ('batch', 'length', 'embed')


@pytest.mark.parametrize(
    'dims, names, spec',
    [
        ((1, 1), ('vocab', 'embed'), P('model', None)),
        ((1, 1), ('embed', 'mlp'), P(None, 'model')),
        ((1, 1), EMBEDDED, P('data', None, None)),
        ((2, 1), ('vocab', 'embed'), P('model', None)),
        ((2, 1), ('embed', 'mlp'), P(None, 'model')),
        ((2, 1), ('embed', 'heads', 'kv'), P(None, 'model', None)),
        ((2, 1), ('embed', 'joined_kv'), P(None, 'model')),
        ((2, 1), EMBEDDED, P('data', None, 'model')),
        ((1, 2), ('vocab', 'embed'), P('model', 'data')),
        ((1, 2), ('embed', 'mlp'), P('data', 'model')),
        ((1, 2), ('embed', 'heads', 'kv'), P('data', 'model', None)),
        ((1, 2), EMBEDDED, P('data', None, None)),
        ((2, 2), ('vocab', 'embed'), P('model', 'data')),
        ((2, 2), ('embed', 'mlp'), P('data', 'model')),
        ((2, 2), EMBEDDED, P('data', None, 'model')),
        ((2, 2), ('embed',), P('model')),
    ],
)
def test_E14_specs_by_the_standard_rules(dims, names, spec):
    assert logical_to_mesh_axes(names, standard_logical_axis_rules(*dims)) == spec


def test_E14_dims_that_there_are_no_rules_for():
    with pytest.raises(ValueError, match=r'=3.*is not supported'):
        standard_logical_axis_rules(3, 1)


E15_RULES = [('batch', 'data'), ('embed', None), ('vocab', 'model'), ('mlp', 'model')]
SIZES = {'vocab': 512, 'embed': 256, 'mlp': 1024}
NAMES = {('logits_dense',): ('vocab', 'embed'), ('mlp', 'wo', 'kernel'): ('embed', 'mlp')}


def e15_params():
    def boxed(*names):
        return nn.LogicallyPartitioned(jnp.zeros([SIZES[n] for n in names]), names)

    return {
        'logits_dense': boxed('vocab', 'embed'),
        'mlp': {'wo': {'kernel': boxed('embed', 'mlp')}},
    }


def e15_specs(tx):
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    state = jax.eval_shape(lambda: TrainState.create(e15_params(), tx))
    return state, one.get_mesh_axes(state)


def test_E15_specs_of_a_train_state():
    _, specs = e15_specs(optax.sgd(0.1))
    assert specs.step in (None, P())
    assert specs.params['logits_dense'] == P('model', None)
    assert specs.params['mlp']['wo']['kernel'] == P(None, 'model')


@pytest.mark.parametrize(
    'settings, like_params',
    [
        ({}, set()),
        ({'momentum': 0.9}, {'ema'}),
        ({'factored': False}, {'v'}),
    ],
    ids=['factored', 'factored with momentum', 'not factored'],
)
def test_E15_specs_of_adafactor(settings, like_params):
    """What has a parameter's shape has its spec; factored rows and columns have what is left.

    T5X replicates the latter always.
    """
    state, specs = e15_specs(optax.adafactor(0.1, **settings))
    shapes = dict(jax.tree_util.tree_leaves_with_path(state.opt_state))
    found = dict(jax.tree_util.tree_leaves_with_path(specs.opt_state, is_leaf=_is_spec))
    assert shapes.keys() == found.keys()
    seen = set()
    for path, leaf in shapes.items():
        fields = [key.name for key in path if hasattr(key, 'name')]
        keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        if not keys:
            continue
        sizes, spec = [SIZES[name] for name in NAMES[keys]], found[path]
        sharded = [i for i, name in enumerate(NAMES[keys]) if name in ('vocab', 'mlp')]
        if leaf.shape == tuple(sizes):
            seen.add(fields[-1])
            assert spec == P(*('model' if i in sharded else None for i in range(2)))
        elif leaf.shape == (1,):
            assert all(axes is None for axes in spec)
        else:
            [kept] = [i for i in range(2) if leaf.shape == (sizes[i],)]
            assert spec == P('model' if kept in sharded else None)
    assert seen == like_params


def _is_spec(x):
    return isinstance(x, P)


def test_E15_optimizer_states_are_born_in_their_shards():
    """jit(tx.init) inherits no sharding: specs are derived, and the state is made by them."""
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    state = one.init(lambda _: TrainState.create(e15_params(), optax.adam(0.1)), 0)
    specs = {x.shape: x.sharding.spec for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert specs == {(512, 256): P('model', None), (256, 1024): P(None, 'model')}


def test_E15_names_that_no_rule_maps():
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=[('batch', 'data')])
    with pytest.raises(ValueError, match=r'^Failed to map logical axes for \S*logits_dense.*vocab'):
        one.get_mesh_axes(jax.eval_shape(lambda: TrainState.create(e15_params(), optax.sgd(0.1))))


# The order of T5X on 2 x 2 chips of two cores, chip by chip: down a column, then the next.
V3_2X2 = [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize(
    'experts, num_partitions, submesh, shape, order',
    [
        (16, 1, None, (1, 8, 1), V3_2X2),
        (8, 1, None, (1, 8, 1), V3_2X2),
        (4, 1, None, (2, 4, 1), V3_2X2),
        (8, 4, None, (1, 2, 4), list(range(8))),
        (8, None, (1, 1, 1, 2), (1, 4, 2), V3_2X2),
    ],
)
def test_E16_meshes_of_experts(experts, num_partitions, submesh, shape, order):
    """The 'expert' axis is cut out of the 'data' axis, and no device has another place."""
    devices = tpus((2, 2, 1), 'TPU v3', cores=2)
    mesh = MoePjitPartitioner(experts, num_partitions, submesh, devices=devices).mesh
    assert mesh.axis_names == ('data', 'expert', 'model')
    assert ids(mesh) == np.reshape(order, shape).tolist()
    without = default_mesh(num_partitions, submesh, devices=devices)
    assert np.ravel(ids(without)).tolist() == order


def test_E17_axis_names_are_one_leaf():
    names = AxisNames('a', 'b')
    assert jax.tree.leaves({'x': names}) == [names]
    assert repr(names) == "AxisNames('a', 'b')"


def test_E18_parameters_without_names():
    variables = {
        'params': {'named': jnp.zeros(4), 'nameless': jnp.zeros((8, 4))},
        'params_axes': {'named_axes': AxisMetadata(('mlp',))},
    }
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    message = r'Missing axis names for parameters: params/nameless of shape \(8, 4\) has none'
    with pytest.raises(ValueError, match=message):
        one.get_mesh_axes(TrainState.create(variables, optax.sgd(0.1)))


def test_E18_any_optimizer_has_logical_axes():
    """T5X refuses those without a method that derives them."""
    moved = optax.trace(0.9)
    custom = optax.GradientTransformation(lambda params: {'mine': moved.init(params)}, moved.update)
    state, specs = e15_specs(custom)
    found = jax.tree.leaves(specs.opt_state, is_leaf=_is_spec)
    assert len(found) == len(jax.tree.leaves(state.opt_state)) == 2
    assert set(found) == {P('model', None), P(None, 'model')}


# On today's jax.


@pytest.mark.filterwarnings('error::DeprecationWarning')
def test_E19_partitioned_functions_work_on_todays_jax():
    """No pjit, no `with mesh:`, no jax.tree_map: nothing that is gone or warns."""
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    assert not global_mesh_defined()
    seen = []

    def step(x):
        seen.append(global_mesh_defined())
        return with_sharding_constraint(2 * x, P('data', 'model'))

    x = jnp.arange(64.0).reshape(8, 8)
    # x is committed nowhere: a sharding that differs is laid out, and kwargs are taken.
    y = one.partition(step, (P('data'),), P('data', 'model'))(x=x)
    np.testing.assert_array_equal(y, 2 * np.arange(64.0).reshape(8, 8))
    assert seen == [True]


def test_E19_constraints_hold_on_cpu():
    """A silent no-op in T5X."""
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    constrained = one.partition(
        lambda x: with_sharding_constraint(x + 1, P('data', 'model')), (P(),), None
    )
    text = constrained.lower(jnp.zeros((8, 8))).as_text()
    assert 'sdy.sharding_constraint' in text or '@Sharding' in text
    with jax.set_mesh(one.mesh):
        x = jax.jit(lambda x: with_sharding_constraint(x + 1, P('data', 'model')))(
            jnp.zeros((8, 8))
        )
    assert x.sharding.spec == P('data', 'model')


def test_E19_an_argument_of_another_sharding_is_refused():
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=E15_RULES)
    doubled = one.partition(lambda x: 2 * x, (P('data'),), P('data'))
    x = jax.device_put(jnp.zeros((8, 8)), NamedSharding(one.mesh, P(None, 'model')))
    with pytest.raises(ValueError, match='Sharding passed to jit does not match') as error:
        doubled(x)
    assert "'data'" in str(error.value) and "'model'" in str(error.value)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_E19_what_todays_jax_has_no_more():
    """Why T5X's own partitioning does not run on it: what it asks for a mesh is gone."""
    with pytest.raises(ModuleNotFoundError, match=r'jax\.experimental\.maps'):
        importlib.import_module('jax.experimental.maps')
    with pytest.raises(AttributeError, match='tree_map'):
        _ = jax.tree_map
    mesh, x = default_mesh(2), jnp.zeros((8, 8))
    with mesh:
        assert not global_mesh_defined()
        with pytest.raises(RuntimeError, match='jit requires a non-empty mesh in context'):
            jax.jit(lambda x: x, in_shardings=P('data'))(x)
