"""MeshConfig: the one description of a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, Self, cast, get_args

import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh

from partitioning.hardware import (
    HardwareMesh,
    JaxDevice,
    describe_topology,
    has_coords,
    num_slices,
    parse_topology,
)
from partitioning.mesh.checks import (
    AxisSizes,
    AxisTypes,
    check_axes,
    check_axis_types,
    check_count,
    check_devices,
    divisors,
    fill,
)
from partitioning.mesh.granules import best_grid, check_same_size, granules_of, join_blocks
from partitioning.mesh.order import order_devices
from partitioning.mesh.t5x_settings import check_mesh_settings, check_submesh, t5x_axes
from partitioning.mesh.t5x_tiles import t5x_grid
from partitioning.rules import nearest

Order = Literal['best', 't5x']
AxisPairs = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MeshConfig:
    """A mesh, described by its axes and the machine that it is for.

    Settings that contradict each other are found here, before any device is looked for; sizes that
    do not fit the machine are found by `build`.

    Usage:
      MeshConfig(axes={'data': -1, 'fsdp': 4, 'model': 2}).build()
      MeshConfig(axes={'data': -1, 'model': 8}, topology='v5p:8x8x8').build()  # no TPU needed
      MeshConfig(axes={'data': 16, 'model': 4}, dcn={'data': 2})  # 2 slices: data is 2 * 16

    Attributes:
      axes: the size of each axis, as a mapping or as (name, size) pairs, in ascending order of
        traffic: the last axis gets the fastest links. One size may be -1, for whatever remains.
        Kept as a tuple of pairs.
      dcn: the size of axes over slices or other granules, which the slower network connects; an
        axis that is not in it has size 1. One size may be -1. With `dcn`, the sizes in `axes` count
        devices within one slice, and the size of a mesh axis is the product of the two. By default,
        `axes` has the whole sizes, and the last axes stay within slices as far as they reach.
      slice_axis: the axis that spans the TPU slices, over which a batch is sharded, too. Without
        `dcn`, its size over slices is their number. If it is not in `axes`, it is the first axis of
        the mesh on several slices, and absent on one.
      axis_types: 'auto', 'explicit' or 'manual', or `jax.sharding.AxisType`; one for all axes or
        one per axis. Kept as a tuple.
      granule_size: the number of GPUs that share one NVLink network, if that is not the number of
        GPUs of a host: 72 for racks of 72 GPUs.
      process_is_granule: whether `dcn` counts processes (True) or slices (False). By default it
        counts TPU slices or NVLink domains, or processes if the devices know of neither.
      topology: a machine that is not here, such as 'v5p:4x4x4'; see `describe_topology`.
      num_slices: the number of slices of `topology`, by default 1.
      devices: the devices to use, in any order, from Python only. By default, all of `backend`.
      backend: the JAX backend whose devices to use, by default JAX's default one.
      order: 'best' puts devices in the order with the shortest rings. 't5x' uses T5X's order of
        TPU v2, v3 and v4 where T5X has one for the size of the last axis, and 'best' elsewhere.
      model_parallel_submesh: for order='t5x', the (x, y, z, cores) tile of the TPU torus that the
        last axis takes in each slice.
      num_expert_partitions: the size of an 'expert' axis that is split off the 'data' axis, after
        which it comes, as in T5X's MoE. If 'data' is smaller, 'expert' takes all of it.

    Raises:
      ValueError: if a setting is malformed, or two settings contradict each other.
    """

    axes: AxisSizes
    dcn: AxisSizes | None = None
    slice_axis: str | None = None
    axis_types: AxisTypes = AxisType.Auto
    granule_size: int | None = None
    process_is_granule: bool | None = None
    topology: str | None = None
    num_slices: int | None = None
    devices: Sequence[JaxDevice] | None = None
    backend: str | None = None
    order: Order = 'best'
    model_parallel_submesh: HardwareMesh | None = None
    num_expert_partitions: int | None = None
    # What the caller calls `axes` and `dcn`, for messages about their sizes.
    _setting_names: tuple[str, str] = dataclasses.field(default=('axes', 'dcn'), compare=False)

    def __post_init__(self) -> None:
        self._keep(axes=check_axes(self.axes, self._setting_names[0]))
        if self.dcn is not None:
            self._keep(dcn=check_axes(self.dcn, self._setting_names[1]) if self.dcn else ())
        self._keep(axis_types=check_axis_types(self.axis_types))
        self._check_axes()
        self._check_granules()
        self._check_machine()
        self._check_order()
        self._check_experts()

    @classmethod
    def from_t5x(
        cls,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        backend: str | None = None,
        ici_mesh_shape: Sequence[int] | None = None,
        dcn_mesh_shape: Sequence[int] | None = None,
        *,
        mesh_axis_names: Sequence[str] | None = None,
        devices: Sequence[JaxDevice] | None = None,
        axis_types: AxisTypes = AxisType.Auto,
        granule_size: int | None = None,
        topology: str | None = None,
        num_slices: int | None = None,
        num_expert_partitions: int | None = None,
    ) -> Self:
        """Returns the mesh that T5X's settings describe.

        It is ('data', 'model'), with 'replica' before it on several TPU slices, and has T5X's order
        of devices where T5X has one.

        Args:
          num_partitions: the size of the 'model' axis; the remaining devices make 'data'.
          model_parallel_submesh: the tile of the 'model' axis, instead of `num_partitions`.
          backend: as in the class.
          ici_mesh_shape: the size of each axis within a slice, together with `dcn_mesh_shape` and
            instead of `num_partitions`.
          dcn_mesh_shape: the size of each axis over slices.
          mesh_axis_names: other names than ('data', 'model') or ('replica', 'data', 'model'). With
            the two shapes there may be any number of axes. With `num_partitions`, the first of
            three names is the axis of the slices, also on one slice.
          devices, axis_types, granule_size, topology, num_slices, num_expert_partitions: as in the
            class.

        Raises:
          ValueError: if no setting decides the mesh, or settings contradict each other.
        """
        check_mesh_settings(num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape)
        common: dict[str, Any] = {
            'backend': backend,
            'devices': devices,
            'axis_types': axis_types,
            'granule_size': granule_size,
            'topology': topology,
            'num_slices': num_slices,
            'num_expert_partitions': num_expert_partitions,
        }
        return cls(
            **t5x_axes(
                num_partitions,
                model_parallel_submesh,
                ici_mesh_shape,
                dcn_mesh_shape,
                mesh_axis_names,
            ),
            **common,
        )

    @staticmethod
    def parse_axes(text: str) -> dict[str, int]:
        """Returns the axes that a command line names, as 'data=-1,fsdp=4'.

        Raises:
          ValueError: if `text` is not of this form, or names an axis twice.
        """
        pairs = [part.partition('=') for part in text.split(',')]
        try:
            axes = [(name.strip(), int(size)) for name, _, size in pairs]
        except ValueError:
            raise ValueError(f'{text!r} must be like data=-1,model=8') from None
        return dict(check_axes(axes, 'axes'))

    def build(self) -> Mesh:
        """Makes the mesh.

        Raises:
          ValueError: if the sizes do not fit the devices; the message has sizes that do.
          RuntimeError: if `topology` needs a compiler that is not installed.
        """
        devices = self._find_devices()
        names = self._names
        if self.dcn is not None:
            grid = self._grid_over_granules(devices)
        elif self.slice_axis is not None or self.order == 't5x':
            names, grid = self._grid_over_slices(devices)
        else:
            setting = self._setting_names[0]
            sizes = fill(self._sizes, len(devices), setting, 'devices', names=names)
            grid = best_grid(devices, sizes, self.granule_size)
        if self.num_expert_partitions is not None:
            names, grid = _split_experts(names, grid, self.num_expert_partitions)
        return make_mesh(grid, names, self.axis_types)

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value in (field.default, (AxisType.Auto,)) or field.name.startswith('_'):
                continue
            if field.name in ('axes', 'dcn'):
                value = dict(value)
            if field.name == 'devices':
                value = f'<{len(value)} devices>'
            shown.append(f'{field.name}={value if field.name == "devices" else repr(value)}')
        return f'MeshConfig({", ".join(shown)})'

    # Checks without devices.

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_axes(self) -> None:
        names = self._names
        for name, _ in cast(AxisPairs, self.dcn or ()):
            if name not in names:
                raise ValueError(
                    f'dcn names axis {name!r}, but the axes are {names}.{nearest(name, names)} '
                    'Add it to axes, with size 1 if it spans slices only'
                )
        slices = self.slice_axis
        if slices is not None and (not isinstance(slices, str) or not slices):
            raise ValueError(f'slice_axis={slices!r} must be the name of an axis')
        if self.dcn is not None and slices is not None and slices not in names:
            raise ValueError(f'slice_axis={slices!r} must be one of the axes {names} if dcn is set')
        maximum = len(names) + (slices is not None and slices not in names)
        maximum += self.num_expert_partitions is not None
        types = cast(tuple, self.axis_types)
        if len(types) > max(maximum, 1):
            raise _wrong_number_of_types(types, names)

    def _check_granules(self) -> None:
        size, by_process = self.granule_size, self.process_is_granule
        if size is not None:
            check_count(size, 'granule_size')
        if by_process not in (None, True, False):
            raise ValueError(f'process_is_granule={by_process!r} must be True, False or None')
        if by_process is not None and size is not None:
            raise ValueError(
                f'granule_size={size} and process_is_granule={by_process} each decide the '
                'granules: keep one'
            )
        if by_process is not None and self.dcn is None:
            raise ValueError(
                f'process_is_granule={by_process} says what dcn counts: set dcn, or remove it'
            )

    def _check_machine(self) -> None:
        if self.topology is not None:
            given = {'devices': self.devices, 'backend': self.backend}
            for name in [name for name, value in given.items() if value is not None]:
                raise ValueError(
                    f'topology={self.topology!r} and {name} each decide the devices: keep one'
                )
            parse_topology(self.topology)
        if self.num_slices is not None:
            check_count(self.num_slices, 'num_slices')
            if self.topology is None:
                raise ValueError(
                    f'num_slices={self.num_slices} needs topology=: devices that are here know '
                    'their slices'
                )
        if self.devices is not None:
            self._keep(devices=tuple(check_devices(self.devices, self.backend)))

    def _check_order(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(f"order={self.order!r} must be 'best' or 't5x'")
        if self.order == 't5x' and self.dcn is not None:
            raise ValueError("order='t5x' has no dcn: T5X orders slice by slice. Set slice_axis")
        if self.order == 't5x' and self._sizes[-1] == -1:
            raise ValueError(f"order='t5x' needs the size of the last axis {self._names[-1]!r}")
        tile = self.model_parallel_submesh
        if tile is None:
            return
        self._keep(model_parallel_submesh=check_submesh(tile))
        if self.order != 't5x' or math.prod(tile) != self._sizes[-1]:
            raise ValueError(
                f"model_parallel_submesh={tuple(tile)} needs order='t5x' and a last axis of size "
                f'{math.prod(tile)}, not order={self.order!r} and {dict(self._pairs)}'
            )

    def _check_experts(self) -> None:
        experts = self.num_expert_partitions
        if experts is None:
            return
        check_count(experts, 'num_expert_partitions')
        if 'data' not in self._names or 'expert' in self._names:
            raise ValueError(
                f"num_expert_partitions={experts} splits 'expert' off the axis 'data', but the "
                f'axes are {self._names}'
            )

    # Devices in their places.

    @property
    def _pairs(self) -> AxisPairs:
        return cast(AxisPairs, self.axes)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._pairs)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self._pairs)

    def _find_devices(self) -> list[JaxDevice]:
        if self.topology is not None:
            return list(describe_topology(self.topology, num_slices=self.num_slices or 1).devices)
        if self.devices is not None:
            return list(self.devices)
        return check_devices(None, self.backend)

    def _grid_over_granules(self, devices: list[JaxDevice]) -> np.ndarray:
        """The grid of `axes` within granules times `dcn` over them."""
        over = dict(cast(AxisPairs, self.dcn))
        names, ici = self._names, self._sizes
        dcn = tuple(over.get(name, 1) for name in names)
        ici_name, dcn_name = self._setting_names
        with_dcn = f' with {dcn_name} {over if dcn_name == "dcn" else dcn}'
        with_ici = f' with {ici_name} {dict(self._pairs) if ici_name == "axes" else ici}'
        by_process, several = self.process_is_granule, num_slices(devices) > 1
        if not (by_process or self.granule_size or several) and all(n == 1 for n in dcn):
            ici = fill(ici, len(devices), ici_name, 'devices', with_dcn, names)
            return best_grid(devices, ici)
        granules = granules_of(devices, by_process, self.granule_size)
        check_same_size(granules)
        by_slice = not by_process and (has_coords(devices[0]) or several)
        counted = 'granules' if self.granule_size else 'slices' if by_slice else 'processes'
        dcn = fill(dcn, len(granules), dcn_name, counted, with_ici, names)
        each = f'devices in each of the {len(granules)} {counted}'
        ici = fill(ici, len(granules[0]), ici_name, each, with_dcn, names)
        return join_blocks([order_devices(granule, ici) for granule in granules], dcn)

    def _grid_over_slices(self, devices: list[JaxDevice]) -> tuple[tuple[str, ...], np.ndarray]:
        """The axis names and the grid, in which `slice_axis` spans the TPU slices."""
        slices = [devices]
        if has_coords(devices[0]):
            slices = granules_of(devices, granule_size=self.granule_size)
            check_same_size(slices)
        names, sizes, axis = self._names, self._sizes, self.slice_axis
        if axis not in names and len(slices) > 1:
            if axis is None:
                raise ValueError(
                    f'the axes {names} have no axis for the {len(slices)} slices: name 3 axes, for '
                    f"example ('replica', 'data', 'model'), or set slice_axis='replica'"
                )
            names, sizes = (axis, *names), (1, *sizes)
        if self.order == 't5x':
            self._check_last_axis(slices)
            blocks = [
                t5x_grid(s, sizes[-1], self.model_parallel_submesh, self.granule_size)
                for s in slices
            ]
        where = 'devices' if len(slices) == 1 else f'devices of each of the {len(slices)} slices'
        sizes = fill(sizes, len(slices[0]), self._setting_names[0], where, names=names)
        if self.order == 't5x':
            blocks = [block.reshape(sizes) for block in blocks]
        else:
            blocks = [best_grid(s, sizes, self.granule_size) for s in slices]
        return names, join_blocks(blocks, [len(slices) if n == axis else 1 for n in names])

    def _check_last_axis(self, slices: Sequence[Sequence[JaxDevice]]) -> None:
        """Checks that the last axis divides the devices of the machine, or of each slice."""
        size, total = self._sizes[-1], len(slices[0])
        if self.model_parallel_submesh is not None or total % size == 0:
            return
        where = f'each of the {len(slices)} slices' if len(slices) > 1 else 'the machine'
        problem, hint = '', f'use one of {", ".join(map(str, divisors(total)))}'
        if size > total:
            problem = f': it is larger than {"a slice" if len(slices) > 1 else "the machine"}'
            if len(slices) > 1 and size <= total * len(slices):
                axis = self._names[-1]
                hint += f', or spread {axis!r} over slices with ici_mesh_shape and dcn_mesh_shape'
        setting = self._setting_names[0]
        name = setting if setting == 'num_partitions' else f'axis {self._names[-1]!r}'
        raise ValueError(
            f'{name}={size} does not divide the {total} devices of {where}{problem}; {hint}'
        )


def make_mesh(
    grid: np.ndarray, axis_names: Sequence[str], axis_types: AxisTypes = AxisType.Auto
) -> Mesh:
    """Returns the mesh of an array of devices, and logs it.

    Raises:
      ValueError: if there is neither one axis type for all axes nor one per axis.
    """
    types = check_axis_types(axis_types)
    if len(types) not in (1, grid.ndim):
        raise _wrong_number_of_types(types, axis_names)
    if len(types) == 1:
        types *= grid.ndim
    mesh = Mesh(grid, tuple(axis_names), axis_types=types)
    logging.info('mesh %s of %d devices', dict(mesh.shape), mesh.size)
    return mesh


def _wrong_number_of_types(types: Sequence[AxisType], names: Sequence[str]) -> ValueError:
    return ValueError(
        f'axis_types={tuple(types)} must be one type, or one for each of the axes {tuple(names)}'
    )


def _split_experts(
    names: tuple[str, ...], grid: np.ndarray, num_experts: int
) -> tuple[tuple[str, ...], np.ndarray]:
    place = names.index('data')
    data = grid.shape[place]
    if data % num_experts and num_experts % data:
        raise ValueError(
            f'num_expert_partitions={num_experts!r} is neither a factor nor a multiple of the '
            f'{data} devices of the data axis; use one of {", ".join(map(str, divisors(data)))}'
        )
    experts = min(num_experts, data)
    shape = (*grid.shape[:place], data // experts, experts, *grid.shape[place + 1 :])
    return (*names[: place + 1], 'expert', *names[place + 1 :]), grid.reshape(shape)
