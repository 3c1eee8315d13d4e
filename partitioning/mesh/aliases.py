"""Meshes by the names and arguments of T5X and of `jax.make_mesh`: short ways to MeshConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from partitioning.hardware import HardwareMesh, JaxDevice
from partitioning.mesh.config import MeshConfig
from partitioning.mesh.t5x import MESH_AXES, hybrid_axes, tiled_grid
from partitioning.mesh.validation import check_count, check_names


def create_mesh(axis_sizes: Sequence[int], axis_names: Sequence[str] = (), **settings: Any) -> Mesh:
    """Makes the mesh of `MeshConfig(axes=..., **settings)`: its sizes and names as two sequences.

    Usage:
      mesh = create_mesh((2, -1, 4), ('data', 'fsdp', 'model'))
    """
    if isinstance(axis_sizes, Mapping):
        sizes, axes = tuple(axis_sizes.values()), tuple(axis_sizes)
        raise ValueError(
            f'axis_sizes={axis_sizes!r} must be only the sizes: write create_mesh({sizes!r}, '
            f'{axes!r}) or MeshConfig(axes={axis_sizes!r}).build()'
        )
    names = check_names(axis_names, axis_sizes, 'axis_sizes')
    pairs = tuple(zip(names, axis_sizes, strict=True))
    return MeshConfig(axes=pairs, **settings, _setting_names=('axis_sizes', 'dcn')).build()


def create_hybrid_mesh(
    ici_mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    **settings: Any,
) -> Mesh:
    """Makes the mesh of `MeshConfig(axes=..., dcn=..., **settings)`, as three sequences.

    Usage:
      mesh = create_hybrid_mesh((1, 64, 4), (2, 1, 1), ('replica', 'data', 'model'))
    """
    return MeshConfig(**hybrid_axes(ici_mesh_shape, dcn_mesh_shape, axis_names), **settings).build()


def default_mesh(num_partitions: int | None, *args: Any, **settings: Any) -> Mesh:
    """Makes the mesh of T5X's settings: `MeshConfig.from_t5x(num_partitions, ...).build()`."""
    return MeshConfig.from_t5x(num_partitions, *args, **settings).build()


def default_moe_mesh(
    num_expert_partitions: int, num_partitions: int | None = None, *args: Any, **settings: Any
) -> Mesh:
    """Makes T5X's mesh for mixtures of experts; see `MeshConfig.from_t5x` for the arguments."""
    check_count(num_expert_partitions, 'num_expert_partitions')
    settings['num_expert_partitions'] = num_expert_partitions
    return default_mesh(num_partitions, *args, **settings)


def get_cpu_mesh(num_partitions: int | None = None) -> Mesh:
    """Makes a ('data', 'model') mesh in which 'model' by default spans one process, as in T5X."""
    return default_mesh(jax.local_device_count() if num_partitions is None else num_partitions)


def get_gpu_mesh(num_partitions: int) -> Mesh:
    """Makes a ('data', 'model') mesh of GPUs in which 'model' stays on NVLink as far as it can."""
    return default_mesh(num_partitions)


def get_mesh(
    model_parallel_submesh: HardwareMesh,
    input_devices: Sequence[JaxDevice] = (),
    input_local_devices: Sequence[JaxDevice] = (),
    tile_by_host_if_needed: bool = True,
    backend: str | None = None,
) -> Mesh:
    """Makes a ('data', 'model') mesh whose model axis is one tile of the machine, in T5X's order.

    Args:
      model_parallel_submesh: the tile: (x, y, z, cores) on TPU, (processes, devices) elsewhere.
        Each entry divides that dimension of the machine.
      input_devices: all devices, by default all devices of `backend`.
      input_local_devices: the devices of one process, by default of the first process among
        `input_devices`; their extent is the tile of one host.
      tile_by_host_if_needed: whether each process holds one contiguous block of the mesh, as T5X's
        data layout requires. False keeps the plain torus order.
      backend: the backend of the devices if none are given.

    Raises:
      ValueError: if the tile does not divide the machine, or hosts cut through tiles.
    """
    devices = list(input_devices or jax.devices(backend))
    grid = tiled_grid(model_parallel_submesh, devices, input_local_devices, tile_by_host_if_needed)
    return Mesh(grid, MESH_AXES)
