"""Mock devices of described machines, numbered like T5X's test devices."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class MockDevice:
    id: int
    process_index: int
    coords: tuple[int, int, int] | None = None
    core_on_chip: int = 0
    device_kind: str = 'TPU v4'
    platform: str = 'tpu'


@dataclasses.dataclass(frozen=True)
class SliceDevice(MockDevice):
    slice_index: int = 0


def tpus(
    bounds: Sequence[int], kind: str, cores: int = 1, host: Sequence[int] = (2, 2, 1)
) -> list[MockDevice]:
    """One slice with id = c + nc * (x + nx * (y + ny * z)) and a host per tile of `host` chips."""
    nx, ny, nz = bounds
    hosts_x, hosts_y = math.ceil(nx / host[0]), math.ceil(ny / host[1])
    return [
        MockDevice(
            id=c + cores * (x + nx * (y + ny * z)),
            process_index=x // host[0] + hosts_x * (y // host[1] + hosts_y * (z // host[2])),
            coords=(x, y, z),
            core_on_chip=c,
            device_kind=kind,
        )
        for z in range(nz)
        for y in range(ny)
        for x in range(nx)
        for c in range(cores)
    ]


def tpu_slices(num_slices: int, bounds: Sequence[int], kind: str, cores: int = 1) -> list:
    """Several equal slices, whose devices and processes are numbered slice after slice."""
    one = tpus(bounds, kind, cores)
    processes = len({d.process_index for d in one})
    return [
        SliceDevice(
            **{
                **dataclasses.asdict(d),
                'id': d.id + s * len(one),
                'process_index': d.process_index + s * processes,
            },
            slice_index=s,
        )
        for s in range(num_slices)
        for d in one
    ]


def two_slices_of_v4() -> list[SliceDevice]:
    """torch_xla's test machine: two slices of 2 x 2, whose ids do not follow the coordinates."""
    places = [
        *((0, 1, 0), (1, 0, 0), (0, 0, 0), (1, 1, 0)),
        *((0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 0)),
    ]
    return [SliceDevice(i, i // 4, place, slice_index=i // 4) for i, place in enumerate(places)]


def v3_4x4() -> list[MockDevice]:
    """T5X's test machine: 16 chips of two cores, four hosts."""
    return tpus((4, 4, 1), 'TPU v3', cores=2)


def gpus(local: int, processes: int, domains: int = 1) -> list:
    """Processes of `local` GPUs each; with several NVLink domains, each GPU reports its domain."""
    total = local * processes
    made = [
        MockDevice(id=i, process_index=i // local, device_kind='NVIDIA H100', platform='gpu')
        for i in range(total * domains)
    ]
    if domains == 1:
        return made
    return [SliceDevice(**dataclasses.asdict(d), slice_index=d.id // total) for d in made]


def cpus(local: int, processes: int) -> list[MockDevice]:
    """Processes of `local` CPU devices each."""
    return [
        MockDevice(id=i, process_index=i // local, device_kind='cpu', platform='cpu')
        for i in range(local * processes)
    ]


def mesh_of_processes(processes: Sequence, axes: Sequence[str]) -> Mesh:
    """A mesh with a device of the given process at each place."""
    grid = np.asarray(processes)
    devices = np.empty(grid.size, object)
    for i, process in enumerate(grid.ravel().tolist()):
        devices[i] = MockDevice(id=i, process_index=process, platform='cpu', device_kind='cpu')
    return Mesh(devices.reshape(grid.shape), axes)


def sorted_ids(mesh: Mesh) -> list[int]:
    """The device ids of a mesh in ascending order."""
    return sorted(np.ravel(ids(mesh)).tolist())


def ids(mesh: Mesh) -> list:
    """The device ids of a mesh, as nested lists."""
    return np.vectorize(lambda d: d.id, otypes=[int])(mesh.devices).tolist()
