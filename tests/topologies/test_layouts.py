"""Who reads and writes what on real TPUs: every process of many meshes, device by device."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from described_machines import MACHINES, Machine, described, needs_libtpu
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import LocalChunker, create_mesh, default_mesh, get_mesh
from partitioning.layout import data_layout, verify, verify_chunks

pytestmark = needs_libtpu

ROWS_OF_A_PART = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh of a described machine."""

    machine: Machine
    what: str
    make: Callable[[list], Mesh]

    def __str__(self) -> str:
        return f'{self.machine}, {self.what}'

    def mesh(self) -> Mesh:
        return self.make(list(self.machine.describe().devices))


def order_of_jax(slices: int, model: int) -> Callable[[list], Mesh]:
    """jax's own order for the torus, which knows nothing of processes."""

    def make(devices):
        shape = (len(devices) // slices // model, model)
        if slices == 1:
            grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
            return Mesh(grid, ('data', 'model'))
        grid = mesh_utils.create_hybrid_device_mesh(
            (1, *shape), (slices, 1, 1), devices, allow_split_physical_axes=True
        )
        return Mesh(grid, ('replica', 'data', 'model'))

    return make


def rolled_ring(devices: list) -> Mesh:
    """A ring through the torus that starts inside a host: processes share some of their rows."""
    ring = mesh_utils.create_device_mesh((len(devices),), devices, allow_split_physical_axes=True)
    return Mesh(np.roll(ring, 1).reshape(-1, 2), ('data', 'model'))


def cases_of(machine: Machine) -> list[Case]:
    slices, each = machine.slices, machine.devices // machine.slices
    made = [
        *((f'default {n}', lambda d, n=n: default_mesh(n, devices=d)) for n in (1, 4, 16)),
        *((f'order of jax {n}', order_of_jax(slices, n)) for n in {4, each // 2}),
        (
            'three axes',
            lambda d: create_mesh((2 * slices, -1, 4), ('data', 'fsdp', 'model'), devices=d),
        ),
        (
            'four axes',
            lambda d: create_mesh((slices, 2, -1, 2), ('stage', 'data', 'expert', 'x'), devices=d),
        ),
    ]
    if slices > 1:
        hybrids = {
            'replicas over slices': ((1, each // 2, 2), (slices, 1, 1)),
            'data over slices': ((2, each // 4, 2), (1, slices, 1)),
            'model over slices': ((1, each // 2, 2), (1, 1, slices)),
            'data only': ((1, each, 1), (slices, 1, 1)),
        }
        made += [
            (
                f'hybrid: {what}',
                lambda d, ici=ici, dcn=dcn: default_mesh(
                    None, ici_mesh_shape=ici, dcn_mesh_shape=dcn, devices=d
                ),
            )
            for what, (ici, dcn) in hybrids.items()
        ]
    else:
        made.append(('rolled ring', rolled_ring))
    if slices == 1 and machine.name.startswith(('v2', 'v3', 'v4')):
        # T5X's two orders of one tile: that of the torus, and that in which hosts are blocks.
        made += [
            (
                f'T5X tile {tile}{", hosts as blocks" if by_host else ""}',
                lambda d, tile=tile, by_host=by_host: get_mesh(
                    tile, d, tile_by_host_if_needed=by_host
                ),
            )
            for tile in [(1, 1, 1, 1), (2, 2, 1, machine.cores), (1, 2, 1, machine.cores)]
            for by_host in (True, False)
        ]
    return [Case(machine, what, make) for what, make in made]


MORE_MACHINES = [
    dataclasses.replace(machine, name=name, slices=slices, devices=devices)
    for machine, name, slices, devices in [
        (MACHINES[3], 'v4:2x2x2', 1, 8),
        (MACHINES[3], 'v4:4x4x8', 1, 128),
        (MACHINES[4], 'v5e:8x8', 1, 64),
        (MACHINES[4], 'v5e:4x4', 4, 64),
        (MACHINES[0], 'v3:4x4', 2, 64),
    ]
]
TOO_SMALL = {'v4:2x2x2, default 16'}
CASES = [
    case
    for machine in (*MACHINES, *MORE_MACHINES)
    for case in cases_of(machine)
    if str(case) not in TOO_SMALL
]


def test_what_these_meshes_are():
    """Rows that follow each other are the easy case: many of these meshes are not that."""
    assert len({str(case) for case in CASES}) == len(CASES) == 193
    assert len({str(case.machine) for case in CASES}) == 18
    strided = overlapping = 0
    for case in CASES:
        mesh = case.mesh()
        axes = mesh.axis_names[:-1]
        batch = math.prod(mesh.shape[a] for a in axes)
        held = rows_by_index_map(mesh, axes, batch).values()
        strided += any(rows[-1] - rows[0] >= len(rows) for rows in held)
        overlapping += sum(map(len, set(held))) > batch
    # The orders of jax may change from version to version: 68 and 11 by the one of today.
    assert strided > 40
    assert overlapping > 5


def axes_of_rows(mesh: Mesh) -> list[tuple[str, ...]]:
    """Axes that a batch may be sharded over: none, all but the last, backwards, the last, all."""
    *most, last = mesh.axis_names
    tuples = [(), tuple(most), tuple(reversed(most)), (most[-1],), (last,), (last, *most)]
    return list(dict.fromkeys(tuples))


def rows_by_index_map(mesh: Mesh, axes: tuple[str, ...], batch: int) -> dict[int, tuple[int, ...]]:
    """For each process the rows that its devices hold, by jax's index map of the batch itself."""
    held: dict[int, set[int]] = {}
    sharding = NamedSharding(mesh, P(axes))
    for device, (rows,) in sharding.devices_indices_map((batch,)).items():
        held.setdefault(device.process_index, set()).update(range(batch)[rows])
    return {process: tuple(sorted(rows)) for process, rows in held.items()}


@pytest.mark.parametrize('case', CASES, ids=str)
def test_every_row_is_read_by_the_processes_that_hold_it(case):
    mesh = case.mesh()
    for axes in axes_of_rows(mesh):
        ways = math.prod(mesh.shape[a] for a in axes)
        batch = ROWS_OF_A_PART * ways
        held = rows_by_index_map(mesh, axes, batch)
        assert sorted(held) == sorted({d.process_index for d in mesh.devices.flat})
        sets = sorted(set(held.values()))
        layouts = {process: data_layout(mesh, axes, batch, process) for process in held}
        assert {p: layout.row_indices for p, layout in layouts.items()} == held
        for number, rows in enumerate(sets):
            same = [layouts[p] for p in held if held[p] == rows]
            assert {layout.shard_id for layout in same} == {number}
            assert sum(layout.is_first_host_in_replica_set for layout in same) == 1
        assert {layout.num_shards for layout in layouts.values()} == {len(sets)}
        disjoint = sum(map(len, sets)) == batch == len(set().union(*sets))
        even = disjoint and len(set(map(len, sets))) == 1
        assert {layout.is_even for layout in layouts.values()} == {even}
        readers = np.bincount(np.concatenate(list(held.values())), minlength=batch)
        proof = verify(mesh, P(axes), batch)
        assert proof.num_processes == len(held)
        assert proof.num_shards == len(sets)
        assert proof.readers_per_row == (readers.min(), readers.max())
        assert proof.num_strided == sum(r[-1] - r[0] + 1 != len(r) for r in held.values())
        assert proof.is_even == even


def arrays_of(mesh: Mesh) -> list[tuple]:
    """Specs of matrices over one axis, two, all in any order, and none."""
    *most, last = mesh.axis_names
    return [
        (tuple(most), last),
        (last, tuple(reversed(most))),
        ((last, *most), None),
        (None, most[-1]),
        (None, None),
    ]


@pytest.mark.parametrize('case', CASES, ids=str)
def test_every_element_is_written_once_by_a_process_that_holds_it(case):
    mesh = case.mesh()
    processes = sorted({d.process_index for d in mesh.devices.flat})
    chunkers = [LocalChunker(mesh, process) for process in processes]
    for spec in arrays_of(mesh):
        shape = tuple(
            2 * math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))
            for axes in spec
        )
        index_map = NamedSharding(mesh, P(*spec)).devices_indices_map(shape)
        written = np.zeros(shape, int)
        of_process = {process: set() for process in processes}
        for device, index in index_map.items():
            of_process[device.process_index].add(corners(index, shape))
        for process, chunker in zip(processes, chunkers, strict=True):
            blocks = chunker.get_local_chunks(shape, spec)
            assert {corners(b.slice, shape) for b in blocks} == of_process[process]
            assert len(blocks) == len(of_process[process])
            for block in blocks:
                written[block.slice] += block.replica_id == 0
        assert (written == 1).all()
        assert sum(verify_chunks(mesh, P(*spec), shape).values()) == written.size


def corners(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


@pytest.mark.parametrize(
    'name, ici, rows, num_shards',
    [
        ('v5e:4x4', (1, 16, 1), 2, 8),  # T5X: two processes read the rows of others, four raise
        ('v5p:4x4x4', (1, 16, 4), 2, 16),  # T5X: every process raises
    ],
)
def test_two_slices_that_t5x_gets_wrong(name, ici, rows, num_shards):
    devices = described(name, 2).devices
    mesh = default_mesh(None, ici_mesh_shape=ici, dcn_mesh_shape=(2, 1, 1), devices=devices)
    assert [d.slice_index for d in mesh.devices[:, 0, 0]] == [0, 1]
    batch = rows * 2 * ici[1]
    read = {}
    for process, expected in rows_by_index_map(mesh, ('replica', 'data'), batch).items():
        layout = data_layout(mesh, ('replica', 'data'), batch, process)
        assert layout.row_indices == expected
        read.setdefault(layout.shard_id, set()).update(layout.row_indices)
        [slice_index] = {d.slice_index for d in devices if d.process_index == process}
        half = slice(0, batch // 2) if slice_index == 0 else slice(batch // 2, batch)
        assert set(expected) <= set(range(batch)[half]), 'a slice holds one half of the batch'
    assert set().union(*read.values()) == set(range(batch))
    assert len(read) == num_shards
