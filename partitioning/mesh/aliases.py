"""Meshes by the names and arguments of T5X and of `jax.make_mesh`: short ways to MeshConfig."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from partitioning.hardware import HardwareMesh, JaxDevice
from partitioning.mesh.config import MeshConfig
from partitioning.mesh.placement import make_mesh
from partitioning.mesh.t5x_settings import MESH_AXES, hybrid_axes
from partitioning.mesh.t5x_tiles import tiled_grid
from partitioning.mesh.validation import AxisTypes, check_count, check_names


def create_mesh(
    axis_sizes: Sequence[int],
    axis_names: Sequence[str],
    *,
    devices: Sequence[JaxDevice] | None = None,
    axis_types: AxisTypes = AxisType.Auto,
    granule_size: int | None = None,
) -> Mesh:
    """Makes a mesh of these sizes and names, whose later axes get the faster links.

    Usage:
      mesh = create_mesh((2, -1, 4), ('data', 'fsdp', 'model'))

    Args:
      axis_sizes: the size of each axis, in ascending order of traffic. One size may be -1, for
        whatever remains.
      axis_names: the name of each axis.
      devices, axis_types, granule_size: as in `MeshConfig`.

    Raises:
      ValueError: if the sizes do not fit the devices, or an argument is malformed.
    """
    names = check_names(axis_names, axis_sizes, 'axis_sizes')
    return MeshConfig(
        axes=tuple(zip(names, axis_sizes, strict=True)),
        devices=devices,
        axis_types=axis_types,
        granule_size=granule_size,
        _setting_names=('axis_sizes', 'dcn'),
    ).build()


def create_hybrid_mesh(
    ici_mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    devices: Sequence[JaxDevice] | None = None,
    process_is_granule: bool | None = None,
    granule_size: int | None = None,
    axis_types: AxisTypes = AxisType.Auto,
) -> Mesh:
    """Makes a mesh over several slices or hosts; the size of each axis is the product of two sizes.

    Usage:
      mesh = create_hybrid_mesh((1, 64, 4), (2, 1, 1), ('replica', 'data', 'model'))

    Args:
      ici_mesh_shape: the size of each axis within a slice. One size may be -1.
      dcn_mesh_shape: the size of each axis over the slices. One size may be -1.
      axis_names: the name of each axis.
      devices, process_is_granule, granule_size, axis_types: as in `MeshConfig`.

    Raises:
      ValueError: if the shapes do not fit each other or the devices.
    """
    return MeshConfig(
        **hybrid_axes(ici_mesh_shape, dcn_mesh_shape, axis_names),
        devices=devices,
        process_is_granule=process_is_granule,
        granule_size=granule_size,
        axis_types=axis_types,
    ).build()


def default_mesh(
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None = None,
    backend: str | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    **options: Any,
) -> Mesh:
    """Makes the mesh of T5X's settings: `MeshConfig.from_t5x(...).build()`."""
    return MeshConfig.from_t5x(
        num_partitions, model_parallel_submesh, backend, ici_mesh_shape, dcn_mesh_shape, **options
    ).build()


def default_moe_mesh(
    num_expert_partitions: int,
    num_partitions: int | None = None,
    model_parallel_submesh: HardwareMesh | None = None,
    backend: str | None = None,
    **options: Any,
) -> Mesh:
    """Makes T5X's mesh for mixtures of experts, with an 'expert' axis split off 'data'.

    Args as in `MeshConfig.from_t5x`.
    """
    check_count(num_expert_partitions, 'num_expert_partitions')
    return default_mesh(
        num_partitions,
        model_parallel_submesh,
        backend,
        num_expert_partitions=num_expert_partitions,
        **options,
    )


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
      input_devices: all devices, by default those of `backend`.
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
    return make_mesh(grid, MESH_AXES)
