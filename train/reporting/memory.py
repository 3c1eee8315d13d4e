"""Whether a run fits in the memory of its devices, and on which mesh it would fit."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, AxisType

from partitioning import BasePartitioner, PjitPartitioner, Plan
from partitioning.amounts import bytes_str
from partitioning.hardware import chip_of
from partitioning.hardware.compilers import OutOfMemoryError, needed_memory
from partitioning.rules import axis_sizes, describe_axes
from train.errors import ConfigError

_MOST_MESHES = 24  # the meshes of one number of devices that are tried, the most similar first
_MOST_DOUBLINGS = 10


def check_fits(
    plan: Plan, partitioner: BasePartitioner, compiled: Any = None, limit: int | None = None
) -> None:
    """Checks that every device has the memory for the state, and for the step if it is compiled.

    Raises a ConfigError if the memory does not suffice, with the nearest mesh where it does.
    `limit` is the memory of a device in bytes, by default the memory of the devices of the mesh.
    """
    mesh, state = partitioner.mesh, plan.bytes_per_device
    if limit is None and not isinstance(mesh, AbstractMesh):
        limit = min(filter(None, map(device_memory, mesh.local_devices)), default=None)
    needed = max(state, 0 if compiled is None else needed_memory(compiled, mesh))
    if limit is not None and needed > limit:
        _refuse(plan, partitioner, needed, limit)


def _refuse(plan: Plan, partitioner: BasePartitioner, needed: int, limit: int) -> NoReturn:
    """Raises the ConfigError for a run that needs more memory than a device has."""
    state = plan.bytes_per_device
    what = f'the state needs {bytes_str(needed)} per device'
    if needed > state:
        what = (
            f'the train step needs {bytes_str(needed)} per device, {bytes_str(state)} of '
            'them for the state,'
        )
    way_out = _way_out(plan, partitioner, limit - (needed - state))
    also = 'raise num_microbatches, or ' if needed > state else ''
    raise ConfigError(
        f'{what} on the mesh {describe_axes(partitioner.mesh)}, but a device has '
        f'{bytes_str(limit)}: {also}{way_out}'
    )


@contextlib.contextmanager
def memory_advice(plan: Plan, partitioner: BasePartitioner) -> Iterator[None]:
    """Says on which mesh a state fits if the compiler finds that the train step does not.

    Raises a ConfigError as `check_fits`, in place of an OutOfMemoryError.
    """
    try:
        yield
    except OutOfMemoryError as error:
        _refuse(plan, partitioner, error.needed, error.available)


def device_memory(device: jax.Device) -> int | None:
    """Returns the memory that programs can use on a device in bytes, or None if it is unknown.

    Virtual CPU devices share the memory that is available on the host. A described device has the
    memory of its chip.
    """
    if device.platform == 'cpu':
        available = _host_memory()
        return available and available // len(jax.local_devices(backend='cpu'))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # described devices have no statistics
        if limit := (device.memory_stats() or {}).get('bytes_limit'):
            return limit
    chip = chip_of(device.device_kind)
    return None if chip is None else chip.hbm_bytes_per_device


def _host_memory() -> int | None:
    """Returns the memory of this host that is available, in bytes, or None if it is unknown."""
    amounts = []
    with contextlib.suppress(OSError):
        found = re.findall(r'^MemAvailable:\s+(\d+)', Path('/proc/meminfo').read_text(), re.M)
        amounts += [1024 * int(kilobytes) for kilobytes in found]
    for limit in ('memory.max', 'memory/memory.limit_in_bytes'):  # of a container
        with contextlib.suppress(OSError, ValueError):  # 'max' means that there is no limit
            amounts.append(int((Path('/sys/fs/cgroup') / limit).read_text()))
    return min(amounts, default=None)


def _way_out(plan: Plan, partitioner: BasePartitioner, limit: int) -> str:
    """Says what to write so that a device holds at most `limit` bytes of the state."""
    if plan.program is None or not isinstance(partitioner, PjitPartitioner):
        return 'use more devices, or a smaller model'
    sizes = dict(axis_sizes(partitioner.mesh))
    devices = math.prod(sizes.values())
    by_size = PjitPartitioner(mesh=partitioner.mesh, layout='fsdp')
    layouts = (partitioner, ''), (by_size, " and layout='fsdp'")
    for count in (devices << doublings for doublings in range(_MOST_DOUBLINGS)):
        meshes = _meshes(sizes, count) if plan.bytes_total <= limit * count else []
        for (layout, words), mesh in itertools.product(layouts, meshes):
            with contextlib.suppress(ValueError):  # its axes do not divide some array
                held = layout.with_mesh(mesh).plan(plan.program.abstract_state).bytes_per_device
                if held <= limit:
                    use = 'use the mesh' if count == devices else f'use {count:,} devices as'
                    axes, size = describe_axes(mesh) + words, bytes_str(held)
                    return f'{use} {axes}, where a device holds {size} of the state'
    return 'use a smaller model'


def _meshes(sizes: dict[str, int], count: int) -> list[AbstractMesh]:
    """Returns meshes of `count` devices with the same axes, the most similar first.

    The axis over slices keeps its size.
    """
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    axes = [[size] if name == 'replica' else divisors for name, size in sizes.items()]
    found = [shape for shape in itertools.product(*axes) if math.prod(shape) == count]

    def distance(shape: Sequence[int]) -> float:
        return sum(abs(math.log2(n / m)) for n, m in zip(shape, sizes.values(), strict=True))

    auto = (AxisType.Auto,) * len(sizes)
    nearest = sorted(found, key=distance)[:_MOST_MESHES]
    return [AbstractMesh(shape, tuple(sizes), axis_types=auto) for shape in nearest]
