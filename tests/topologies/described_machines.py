"""The machines that these tests describe, and the facts that each description must contain."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence

import numpy as np
import pytest
from jax.sharding import Mesh

from partitioning import Topology, describe_topology


def _has_cuda_plugin() -> bool:
    """Whether jax can load the plugin. Its version must equal the version of jaxlib."""
    for package in ('jax-cuda13-plugin', 'jax-cuda12-plugin'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package) == importlib.metadata.version('jaxlib')
    return False


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason='describing TPUs needs libtpu, which is not installed',
)
needs_cuda_plugin = pytest.mark.skipif(
    not _has_cuda_plugin(),
    reason="describing GPUs needs jax's CUDA plugin in the version of jaxlib",
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A TPU machine, and the facts that its description must contain."""

    name: str
    slices: int
    devices: int
    processes: int
    kind: str
    bounds: tuple[int, int, int]
    cores: int
    wrap: tuple[bool, bool, bool]

    def __str__(self) -> str:
        return self.name if self.slices == 1 else f'{self.slices} of {self.name}'

    def describe(self) -> Topology:
        return described(self.name, self.slices)


NO_RINGS = (False, False, False)
PLANE = (True, True, False)
CUBE = (True, True, True)
MACHINES = [
    Machine('v2:4x4', 1, 32, 4, 'TPU v2', (4, 4, 1), 2, NO_RINGS),
    Machine('v3:4x4', 1, 32, 4, 'TPU v3', (4, 4, 1), 2, NO_RINGS),
    Machine('v4:2x2x4', 1, 16, 4, 'TPU v4', (2, 2, 4), 1, NO_RINGS),
    Machine('v4:4x4x4', 1, 64, 16, 'TPU v4', (4, 4, 4), 1, CUBE),
    Machine('v5e:4x4', 1, 16, 4, 'TPU v5 lite', (4, 4, 1), 1, NO_RINGS),
    Machine('v5e:16x16', 1, 256, 64, 'TPU v5 lite', (16, 16, 1), 1, PLANE),
    Machine('v5p:4x4x4', 1, 64, 16, 'TPU v5', (4, 4, 4), 1, CUBE),
    Machine('v5p:8x8x8', 1, 512, 128, 'TPU v5', (8, 8, 8), 1, CUBE),
    Machine('v6e:16x16', 1, 256, 64, 'TPU v6 lite', (16, 16, 1), 1, PLANE),
    Machine('tpu7x:4x4x4', 1, 128, 16, 'TPU7x', (4, 4, 4), 2, CUBE),
    Machine('v5e:4x4', 2, 32, 8, 'TPU v5 lite', (4, 4, 1), 1, NO_RINGS),
    Machine('v5p:4x4x4', 2, 128, 32, 'TPU v5', (4, 4, 4), 1, CUBE),
    Machine('v6e:16x16', 2, 512, 128, 'TPU v6 lite', (16, 16, 1), 1, PLANE),
]
PARTITIONS = (1, 2, 4, 8, 16, 32)


@functools.cache
def described(name: str, slices: int = 1) -> Topology:
    """Describes a machine once; all tests share the description."""
    return describe_topology(name, num_slices=slices)


def ids(mesh: Mesh) -> list:
    """Returns the device ids of a mesh as nested lists. Each described slice starts at 0."""
    return np.vectorize(lambda d: d.id % 100_000, otypes=[int])(mesh.devices).tolist()


def assert_each_device_once(mesh: Mesh, devices: Sequence) -> None:
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in devices)
