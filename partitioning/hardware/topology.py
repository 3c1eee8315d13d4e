"""Descriptions of machines without their hardware, from libtpu and the CUDA plugin.

Machines also have the names under which clouds rent them, such as 'v5p-128'. The names of TPUs
follow the tables of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v2 to tpu7x). It
counts the TensorCores of v2 to v5p and of 7x, two per chip, and the chips of v5e and v6e. The names
of GPUs follow the tables of Compute Engine's accelerator-optimized machines. Tools for clusters
also write 'v5p-4x4x4' and 'h100-80gb-8'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partitioning.hardware.chips import CHIPS, Chip, torus_wrap
from partitioning.hardware.devices import JaxDevice
from partitioning.hardware.drawn import draw_gpus, draw_tpus, may_draw
from partitioning.rules import is_count, nearest

# Without these variables, libtpu queries a metadata server, writes warnings to stderr, and refuses
# to be loaded by a second process.
_LIBTPU_ENVIRONMENT = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-16',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_LOG_DIR': 'disabled',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
# A description needs neither a GPU nor the CUDA libraries whose versions the plugin checks.
_CUDA_ENVIRONMENT = {'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1'}

# From NVIDIA's white papers: compute capability; streaming multiprocessors, and float32 units and
# bytes of shared memory of each; bytes of second-level cache; boost clock in GHz.
_ARCHITECTURES = {
    'a100': ((8, 0), 108, 64, 164 * 1024, 40 * 2**20, 1.41),
    'h100': ((9, 0), 132, 128, 228 * 1024, 50 * 2**20, 1.98),
    'h200': ((9, 0), 132, 128, 228 * 1024, 50 * 2**20, 1.98),
    'b200': ((10, 0), 148, 128, 228 * 1024, 126 * 2**20, 1.965),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A described machine and its devices, without the hardware.

    It can be used wherever devices are expected: `create_mesh(..., devices=topology)`.

    Attributes:
      name: the name, for example 'v5p:4x4x4' or 'h100:2x8'.
      devices: JAX devices that can make a mesh and be compiled for, but cannot hold arrays.
      chip: the chip of the devices.
      bounds: the extent of one slice: chips along (x, y, z) of a TPU, or (hosts, GPUs per host).
      num_slices: the number of TPU slices, or of NVLink domains of several GPU hosts.
      wrap: for each dimension of `bounds`, whether links close it to a ring. False for GPUs.
    """

    name: str
    devices: tuple[JaxDevice, ...]
    chip: Chip
    bounds: tuple[int, ...]
    num_slices: int
    wrap: tuple[bool, ...]

    @property
    def num_processes(self) -> int:
        """The number of processes (hosts) of the machine."""
        return len({d.process_index for d in self.devices})

    def __iter__(self) -> Iterator[JaxDevice]:
        return iter(self.devices)

    def __repr__(self) -> str:
        slices = f', num_slices={self.num_slices}' if self.num_slices > 1 else ''
        return (
            f'Topology({self.name!r}{slices}: {len(self.devices)} devices, '
            f'{self.num_processes} process{"es" if self.num_processes > 1 else ""})'
        )


def describe_topology(
    name: str,
    *,
    num_slices: int = 1,
    wrap: Sequence[bool] | None = None,
    chips_per_host_bounds: Sequence[int] | None = None,
) -> Topology:
    """Describes a machine by its name. No hardware is needed.

    Args:
      name: a chip and its arrangement: 'v5e:4x4' (x, y), 'v5p:4x4x8' (x, y, z), or 'h100:2x8'
        (hosts, GPUs per host). The names of clouds, such as 'v5p-128', are accepted too.
      num_slices: the number of TPU slices, or of NVLink domains of the hosts in `name`, which the
        data centre network joins. With 1, each GPU host is a separate domain.
      wrap: for each dimension of a TPU slice, whether its links close to a ring; by default as in
        pods of this chip (`torus_wrap`). Only the compiler uses it: the devices do not show it, so
        the orders of meshes follow `torus_wrap`.
      chips_per_host_bounds: the chips of a TPU host along x, y and z, by default 2 x 2 x 1.

    Returns:
      The description. v4 has one device per chip (megacore), as its hosts run it.

    Raises:
      ValueError: if the chip is unknown, or no machine of it has this shape or option.
      RuntimeError: if the compiler of the platform is not installed.
    """
    chip, shape = parse_topology(name)
    name = f'{chip.name}:{_by(shape)}'
    if not is_count(num_slices):
        raise ValueError(f'num_slices={num_slices!r} must be an integer >= 1')
    if chip.platform == 'gpu':
        if wrap is not None or chips_per_host_bounds is not None:
            raise ValueError(
                f'{name} is a GPU machine: wrap and chips_per_host_bounds are for TPUs'
            )
        try:
            devices = _cuda_devices(chip, shape, num_slices)
        except RuntimeError:
            if not may_draw():
                raise
            devices = draw_gpus(chip, shape, num_slices)
        return Topology(name, devices, chip, shape, num_slices, (False,) * len(shape))
    bounds = (*shape, 1) if len(shape) == 2 else shape
    host = (1, 1, 1) if math.prod(bounds) == 1 else (2, 2, 1)
    closed = torus_wrap(chip.device_kind, bounds)
    if chips_per_host_bounds is not None:
        host = _three(chips_per_host_bounds, int, 'chips_per_host_bounds', 'integers')
    if wrap is not None:
        closed = _three(wrap, bool, 'wrap', 'booleans')
    if any(h < 1 or b % h for b, h in zip(bounds, host, strict=True)):
        raise ValueError(
            f'{name} has {_by(bounds)} chips, which hosts of {_by(host)} chips do not tile: set '
            'chips_per_host_bounds'
        )
    try:
        devices = _tpu_devices(chip, shape, num_slices, closed, host)
    except RuntimeError:
        if not may_draw():
            raise
        devices = draw_tpus(chip, bounds, num_slices, host)
    return Topology(name, devices, chip, bounds, num_slices, closed)


def split_slices(name: str) -> tuple[str, int]:
    """Returns the name of one slice and the number of slices: '2xv5e:4x4' is 2 of 'v5e:4x4'."""
    found = re.fullmatch(r'(\d+)x(\D.*)', name)
    return (found[2], int(found[1])) if found else (name, 1)


def parse_topology(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Returns the chip and the arrangement of 'v5p:4x4x8' or 'v5p-256', or raises ValueError."""
    if isinstance(name, str):
        name = from_cloud_name(name) or name
    kind, _, arrangement = name.partition(':') if isinstance(name, str) else ('', '', '')
    if kind not in CHIPS:
        raise ValueError(
            f'unknown topology {name!r}: the known chips are {", ".join(CHIPS)}; write, for '
            f"example, 'v5e:4x4', 'v5p:4x4x4' or 'h100:2x8'.{nearest(kind.lower(), CHIPS)}"
        )
    chip = CHIPS[kind]
    dimensions = chip.dimensions or 2
    if not re.fullmatch(rf'[1-9]\d*(x[1-9]\d*){{{dimensions - 1}}}', arrangement):
        meaning = 'hosts x GPUs per host' if chip.platform == 'gpu' else 'chips'
        raise ValueError(
            f'topology {name!r}: {kind} machines have {dimensions} dimensions ({meaning}), for '
            f'example {kind}:{_by((4,) * dimensions)}'
        )
    return chip, tuple(int(n) for n in arrangement.split('x'))


def check_shape(name: str) -> None:
    """Checks by arithmetic that there are machines with a name, as far as hosts must tile them.

    Raises:
      ValueError: if the chip is unknown, or hosts of 2 x 2 chips do not tile its arrangement.
    """
    chip, shape = parse_topology(name)
    if chip.platform == 'gpu' or math.prod(shape) == 1 or not any(n % 2 for n in shape[:2]):
        return
    even = [n + n % 2 for n in shape[:2]] + list(shape[2:])
    raise ValueError(
        f'{chip.name}:{_by(shape)} has {" x ".join(map(str, shape))} chips, which hosts of 2 x 2 '
        f'chips do not tile: use even numbers along x and y, such as {chip.name}:{_by(even)}'
    )


def _three(values: Any, kind: type, option: str, what: str) -> tuple[Any, Any, Any]:
    three = tuple(values) if isinstance(values, Sequence) else ()
    if len(three) != 3 or not all(type(value) is kind for value in three):
        raise ValueError(f'{option}={values!r} needs 3 entries, {what} for x, y and z')
    return three


def _tpu_devices(
    chip: Chip, shape: Sequence[int], num_slices: int, wrap: Sequence[bool], host: Sequence[int]
) -> tuple[JaxDevice, ...]:
    options: dict[str, Any] = {'wrap': tuple(wrap), 'chips_per_host_bounds': tuple(host)}
    if num_slices > 1:
        options['num_slices'] = num_slices
    if chip.name == 'v4':
        options['chip_config_name'] = 'megacore'
    name = f'{chip.name}:{_by(shape)}'
    try:
        return _devices(_LIBTPU_ENVIRONMENT, name, 'tpu', options)
    except RuntimeError as error:
        if 'not installed' in str(error):
            raise RuntimeError(
                "describing TPUs needs libtpu: pip install 'meshwright[aot]'"
            ) from None
        raise ValueError(f'{name} with {options}: {error}') from error


def _cuda_devices(chip: Chip, shape: Sequence[int], num_slices: int) -> tuple[JaxDevice, ...]:
    options = {'target_config': _target_config(chip), 'topology': _by((num_slices, *shape))}
    try:
        return _devices(_CUDA_ENVIRONMENT, '', 'cuda', options)
    except NotImplementedError:
        pass
    try:
        # jax has left the plugin out, when it looked for devices without cuDNN.
        import jax_plugins

        with _environment(_CUDA_ENVIRONMENT):
            for found in pkgutil.iter_modules(jax_plugins.__path__):
                if found.name.startswith('xla_cuda'):
                    importlib.import_module(f'jax_plugins.{found.name}').initialize()
        return _devices(_CUDA_ENVIRONMENT, '', 'cuda', options)
    except (ImportError, NotImplementedError):
        raise RuntimeError(
            "describing GPUs needs jax's CUDA plugin, in the version of jax: "
            "pip install 'meshwright[aot-gpu]'"
        ) from None


def _target_config(chip: Chip) -> str:
    """The text of XLA's GpuTargetConfigProto, which describes a GPU for the compiler."""
    (major, minor), cores, units, shared_memory, l2_bytes, clock_ghz = _ARCHITECTURES[chip.name]
    device = {
        'threads_per_block_limit': 1024,
        'threads_per_warp': 32,
        'shared_memory_per_block': 48 * 1024,
        'shared_memory_per_core': shared_memory,
        'threads_per_core_limit': 2048,
        'core_count': cores,
        'fpus_per_core': units,
        'block_dim_limit_x': 2**31 - 1,
        'block_dim_limit_y': 2**16 - 1,
        'block_dim_limit_z': 2**16 - 1,
        'memory_bandwidth': int(chip.hbm_bandwidth),
        'l2_cache_size': l2_bytes,
        'clock_rate_ghz': clock_ghz,
        'device_memory_size': chip.hbm_bytes,
        # A block can use 1 KiB less than the whole.
        'shared_memory_per_block_optin': shared_memory - 1024,
        'registers_per_core_limit': 2**16,
        'registers_per_block_limit': 2**16,
    }
    fields = '\n'.join(f'  {name}: {value}' for name, value in device.items())
    return (
        f'gpu_device_info {{\n{fields}\n'
        f'  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n'
        'platform_name: "CUDA"\n'
        'dnn_version_info { major: 9 minor: 8 }\n'
        f'device_description_str: "{chip.device_kind}"\n'
    )


def _devices(
    environment: Mapping[str, str], name: str, platform: str, options: Mapping[str, Any]
) -> tuple[JaxDevice, ...]:
    from jax.experimental import topologies

    with _environment(environment):
        return tuple(topologies.get_topology_desc(name, platform, **options).devices)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables while a compiler is loaded, and removes them before jax finds devices."""
    added = {k: v for k, v in variables.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _by(sizes: Sequence[int]) -> str:
    return 'x'.join(map(str, sizes))


# The kind of a name, the chip in CHIPS, and how many of what the name counts a chip has.
_KINDS = {
    'v2': ('v2', 2),
    'v3': ('v3', 2),
    'v4': ('v4', 2),
    'v5litepod': ('v5e', 1),
    'v5lite': ('v5e', 1),
    'v5e': ('v5e', 1),
    'v5p': ('v5p', 2),
    'v6e': ('v6e', 1),
    'tpu7x': ('tpu7x', 2),
}
# Planes of these numbers of chips are offered, in these arrangements.
_PLANES = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16)}
_PLANES |= {256: (16, 16), 512: (16, 32), 1024: (32, 32)}
_LARGEST = {'v2': 256, 'v3': 1024, 'v5e': 256, 'v6e': 256}
# Parts of a cube of 4 x 4 x 4 chips.
_PARTS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
_CUBE = 4
_MOST_CUBES = {'v4': 64, 'v5p': 140, 'tpu7x': 144}
# Compute Engine: the chip, and the GPUs of a host.
_GPU_HOSTS = {f'a2-ultragpu-{n}g': ('a100', n) for n in (1, 2, 4, 8)}
_GPU_HOSTS |= {f'a3-highgpu-{n}g': ('h100', n) for n in (1, 2, 4, 8)}
_GPU_HOSTS |= {
    'a3-megagpu-8g': ('h100', 8),
    'a3-ultragpu-8g': ('h200', 8),
    'a4-highgpu-8g': ('b200', 8),
    'h100-80gb-8': ('h100', 8),
    'h100-mega-80gb-8': ('h100', 8),
    'h200-141gb-8': ('h200', 8),
    'b200-8': ('b200', 8),
}


def from_cloud_name(name: str) -> str | None:
    """Returns the topology of a cloud's name: 'v5p:4x4x4' for 'v5p-128', 'h100:1x8' for GPUs.

    Other names, such as the names of topologies, give None.

    Raises:
      ValueError: if the cloud has such machines, but not of this size.
    """
    if name in _GPU_HOSTS:
        chip, gpus = _GPU_HOSTS[name]
        return f'{chip}:1x{gpus}'
    kind, _, size = name.rpartition('-')
    if kind not in _KINDS or not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)*', size):
        return None
    chip, per_chip = _KINDS[kind]
    if 'x' in size:
        return f'{chip}:{size}'
    count, rest = divmod(int(size), per_chip)
    flat = CHIPS[chip].dimensions == 2
    if rest or count not in _sizes(chip):
        counted = f'{per_chip} TensorCores per chip' if per_chip > 1 else 'chips'
        sizes = [n * per_chip for n in _sizes(chip)]
        nearest_size = min(sizes, key=lambda n: abs(math.log(n / int(size))))
        raise ValueError(
            f'no machine {name!r} is offered, whose number counts {counted}: write, for example, '
            f"'{kind}-{nearest_size}', or its chips as in '{chip}:{'4x4' if flat else '4x4x4'}'"
        )
    return f'{chip}:{_by(_PLANES[count] if flat else _cuboid(count))}'


def _cuboid(count: int) -> tuple[int, ...]:
    """The arrangement of a part of a cube, or of whole cubes that is closest to a cube."""
    if count in _PARTS:
        return _PARTS[count]
    cubes = count // _CUBE**3
    shapes = [
        (x, y, cubes // (x * y))
        for x in range(1, cubes + 1)
        for y in range(x, cubes + 1)
        if cubes % (x * y) == 0 and cubes // (x * y) >= y
    ]
    best = min(shapes, key=sum)
    return tuple(_CUBE * n for n in best)


def _sizes(chip: str) -> list[int]:
    """The numbers of chips of the machines that are offered."""
    if CHIPS[chip].dimensions == 2:
        most = _LARGEST[chip]
        alone = chip in ('v5e', 'v6e')  # they are offered with one chip, the others with four
        return [n for n in _PLANES if n <= most and (n > 1 or alone)]
    return [*_PARTS, *(_CUBE**3 * n for n in range(1, _MOST_CUBES[chip] + 1))]
