"""Which device is where in a mesh: axis sizes and devices in, an array of devices out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh

from partitioning.hardware import HardwareMesh, JaxDevice, has_coords, num_slices
from partitioning.mesh.granules import best_grid, check_same_size, granules_of, join_blocks
from partitioning.mesh.order import order_devices
from partitioning.mesh.t5x_tiles import t5x_grid
from partitioning.mesh.validation import AxisTypes, check_axis_types, divisors, fill

AxisPairs = tuple[tuple[str, int], ...]
NamedGrid = tuple[tuple[str, ...], np.ndarray]  # the axis names, and the devices in their places


def grid_over_granules(
    devices: Sequence[JaxDevice],
    axes: AxisPairs,
    dcn: AxisPairs,
    process_is_granule: bool | None,
    granule_size: int | None,
    setting_names: tuple[str, str],
) -> NamedGrid:
    """Places devices so that each axis is the product of its sizes within and over granules.

    Args:
      devices: the devices, in any order.
      axes: the names and sizes of the axes within a granule.
      dcn: the names and sizes of the axes over the granules; the other axes have size 1.
      process_is_granule, granule_size: as in `granules_of`.
      setting_names: what the caller calls `axes` and `dcn`.

    Raises:
      ValueError: if the sizes do not fit the granules.
    """
    names = tuple(name for name, _ in axes)
    ici, over = tuple(size for _, size in axes), dict(dcn)
    dcn_sizes = tuple(over.get(name, 1) for name in names)
    ici_name, dcn_name = setting_names
    with_dcn = f' with {dcn_name} {over if dcn_name == "dcn" else dcn_sizes}'
    with_ici = f' with {ici_name} {dict(axes) if ici_name == "axes" else ici}'
    several = num_slices(devices) > 1
    if not (process_is_granule or granule_size or several) and all(n == 1 for n in dcn_sizes):
        ici = fill(ici, len(devices), ici_name, 'devices', with_dcn, names)
        return names, best_grid(devices, ici)
    granules = granules_of(devices, process_is_granule, granule_size)
    check_same_size(granules)
    by_slice = not process_is_granule and (has_coords(devices[0]) or several)
    counted = 'granules' if granule_size else 'slices' if by_slice else 'processes'
    dcn_sizes = fill(dcn_sizes, len(granules), dcn_name, counted, with_ici, names)
    each = f'devices in each of the {len(granules)} {counted}'
    ici = fill(ici, len(granules[0]), ici_name, each, with_dcn, names)
    return names, join_blocks([order_devices(granule, ici) for granule in granules], dcn_sizes)


def grid_over_slices(
    devices: Sequence[JaxDevice],
    axes: AxisPairs,
    slice_axis: str | None,
    granule_size: int | None,
    setting: str,
    *,
    t5x_order: bool = False,
    model_parallel_submesh: HardwareMesh | None = None,
) -> NamedGrid:
    """Places devices so that `slice_axis` spans the TPU slices.

    Args:
      devices: the devices, in any order.
      axes: the names and sizes of the axes within a slice.
      slice_axis: the axis of the slices; if it is not in `axes`, it becomes the first axis where
        there are several slices.
      granule_size: as in `granules_of`, for devices without slices.
      setting: what the caller calls `axes`.
      t5x_order: whether the last axis is laid out in T5X's order.
      model_parallel_submesh: the tile of the last axis in T5X's order.

    Raises:
      ValueError: if the sizes do not fit the slices, or several slices have no axis.
    """
    slices: list[Sequence[JaxDevice]] = [devices]
    if has_coords(devices[0]):
        slices = [*granules_of(devices, granule_size=granule_size)]
        check_same_size(slices)
    names = tuple(name for name, _ in axes)
    sizes = tuple(size for _, size in axes)
    if slice_axis not in names and len(slices) > 1:
        if slice_axis is None:
            raise ValueError(
                f'the axes {names} have no axis for the {len(slices)} slices: name 3 axes, for '
                "example ('replica', 'data', 'model'), or set slice_axis='replica'"
            )
        names, sizes = (slice_axis, *names), (1, *sizes)
    if t5x_order:
        if model_parallel_submesh is None:
            _check_last_axis(slices, names[-1], sizes[-1], setting)
        blocks = [t5x_grid(s, sizes[-1], model_parallel_submesh, granule_size) for s in slices]
    each = 'devices' if len(slices) == 1 else f'devices in each of the {len(slices)} slices'
    sizes = fill(sizes, len(slices[0]), setting, each, names=names)
    if t5x_order:
        blocks = [block.reshape(sizes) for block in blocks]
    else:
        blocks = [best_grid(s, sizes, granule_size) for s in slices]
    return names, join_blocks(blocks, [len(slices) if n == slice_axis else 1 for n in names])


def split_experts(names: tuple[str, ...], grid: np.ndarray, num_experts: int) -> NamedGrid:
    """Splits an 'expert' axis off the 'data' axis: all of it, if there are more experts.

    Raises:
      ValueError: if `num_experts` is neither a factor nor a multiple of the size of 'data'.
    """
    place = names.index('data')
    data = grid.shape[place]
    if data % num_experts and num_experts % data:
        raise ValueError(
            f'num_expert_partitions={num_experts!r} is neither a factor nor a multiple of the '
            f'{data} devices of the data axis; use one of {_listed(divisors(data))}'
        )
    experts = min(num_experts, data)
    shape = (*grid.shape[:place], data // experts, experts, *grid.shape[place + 1 :])
    return (*names[: place + 1], 'expert', *names[place + 1 :]), grid.reshape(shape)


def make_mesh(
    grid: np.ndarray, axis_names: Sequence[str], axis_types: AxisTypes = AxisType.Auto
) -> Mesh:
    """Returns the mesh of an array of devices, and logs it.

    Raises:
      ValueError: if there is neither one axis type for all axes nor one per axis.
    """
    types = check_axis_types(axis_types)
    if len(types) not in (1, grid.ndim):
        raise wrong_number_of_types(types, axis_names)
    if len(types) == 1:
        types *= grid.ndim
    mesh = Mesh(grid, tuple(axis_names), axis_types=types)
    logging.info('mesh %s of %d devices', dict(mesh.shape), mesh.size)
    return mesh


def wrong_number_of_types(types: Sequence[AxisType], names: Sequence[str]) -> ValueError:
    return ValueError(
        f'axis_types={tuple(types)} must be one type, or one for each of the axes {tuple(names)}'
    )


def _check_last_axis(
    slices: Sequence[Sequence[JaxDevice]], name: str, size: int, setting: str
) -> None:
    """Checks that the last axis divides the devices of the machine, or of each slice."""
    total, several = len(slices[0]), len(slices) > 1
    if total % size == 0:
        return
    where = f'each of the {len(slices)} slices' if several else 'the machine'
    problem, hint = '', f'use one of {_listed(divisors(total))}'
    if size > total:
        problem = f': it is larger than {"a slice" if several else "the machine"}'
        if several and size <= total * len(slices):
            hint += f', or spread {name!r} over slices with ici_mesh_shape and dcn_mesh_shape'
    shown = setting if setting == 'num_partitions' else f'axis {name!r}'
    raise ValueError(
        f'{shown}={size} does not divide the {total} devices of {where}{problem}; {hint}'
    )


def _listed(numbers: Sequence[int]) -> str:
    return ', '.join(map(str, numbers))
