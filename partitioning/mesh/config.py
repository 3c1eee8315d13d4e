"""MeshConfig: the one description of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, Self, cast, get_args

from jax.sharding import AxisType, Mesh

from partitioning.hardware import HardwareMesh, JaxDevice, describe_topology, parse_topology
from partitioning.mesh.granules import best_grid
from partitioning.mesh.placement import (
    AxisPairs,
    grid_over_granules,
    grid_over_slices,
    make_mesh,
    split_experts,
    wrong_number_of_types,
)
from partitioning.mesh.t5x_settings import check_mesh_settings, check_submesh, t5x_axes
from partitioning.mesh.validation import (
    AxisSizes,
    AxisTypes,
    check_axes,
    check_axis_types,
    check_count,
    check_devices,
    fill,
)
from partitioning.rules import nearest

Order = Literal['best', 't5x']


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MeshConfig:
    """A mesh, described by its axes and the machine that it is for.

    The constructor finds settings that contradict each other, before any device is looked for;
    `build` finds sizes that do not fit the machine.

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
      slice_axis: the axis that spans the TPU slices; partitioners shard the batch over it, too.
        Without `dcn`, its size over slices is their number. If it is not in `axes`, it is the first
        axis of the mesh on several slices, and absent on one.
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
      num_expert_partitions: the size of an 'expert' axis that is split off the 'data' axis and
        follows it, as in T5X's MoE. If 'data' is smaller, 'expert' takes all of it.

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
        deciding = (num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape)
        check_mesh_settings(*deciding)
        return cls(
            **t5x_axes(*deciding, mesh_axis_names),
            axis_types=axis_types,
            granule_size=granule_size,
            topology=topology,
            num_slices=num_slices,
            devices=devices,
            backend=backend,
            num_expert_partitions=num_expert_partitions,
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
        if self.dcn is not None:
            names, grid = grid_over_granules(
                devices,
                self._pairs,
                cast(AxisPairs, self.dcn),
                self.process_is_granule,
                self.granule_size,
                self._setting_names,
            )
        elif self.slice_axis is not None or self.order == 't5x':
            names, grid = grid_over_slices(
                devices,
                self._pairs,
                self.slice_axis,
                self.granule_size,
                self._setting_names[0],
                t5x_order=self.order == 't5x',
                model_parallel_submesh=self.model_parallel_submesh,
            )
        else:
            names = self._names
            setting = self._setting_names[0]
            sizes = fill(self._sizes, len(devices), setting, 'devices', names=names)
            grid = best_grid(devices, sizes, self.granule_size)
        if self.num_expert_partitions is not None:
            names, grid = split_experts(names, grid, self.num_expert_partitions)
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

    def _keep(self, **values: object) -> None:
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
        least = len(names) + (self.num_expert_partitions is not None)
        most = least + (slices is not None and slices not in names)
        types = cast(tuple, self.axis_types)
        if len(types) not in (1, least, most):
            raise wrong_number_of_types(types, names)

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
            if self.devices is not None or self.backend is not None:
                other = 'backend' if self.devices is None else 'devices'
                raise ValueError(
                    f'topology={self.topology!r} and {other} each decide the devices: keep one'
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
            return list(_described_devices(self.topology, self.num_slices or 1))
        if self.devices is not None:
            return list(self.devices)
        return check_devices(None, self.backend)


# Each description makes new devices, but the meshes of one config must be equal.
@functools.lru_cache(maxsize=8)
def _described_devices(topology: str, num_slices: int) -> tuple[JaxDevice, ...]:
    return describe_topology(topology, num_slices=num_slices).devices
