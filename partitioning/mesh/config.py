"""MeshConfig: the one description of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, cast, get_args

import numpy as np
from jax.sharding import AxisType, Mesh

from partitioning.hardware import (
    HardwareMesh,
    JaxDevice,
    check_devices,
    describe_topology,
    granules_of,
    has_coords,
    num_slices,
    parse_topology,
)
from partitioning.mesh.order import best_grid, check_same_size, join_blocks, order_devices
from partitioning.mesh.t5x import (
    check_last_axis,
    check_submesh,
    model_axis_size,
    split_experts,
    t5x_axes,
    t5x_grid,
)
from partitioning.mesh.validation import (
    Axes,
    AxisSizes,
    AxisTypes,
    check_axes,
    check_axis_types,
    check_count,
    fill,
    show_sizes,
)
from partitioning.rules import nearest
from partitioning.short_help import ShortHelp

_LOGGER = logging.getLogger(__name__)
Order = Literal['best', 't5x']


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MeshConfig(metaclass=ShortHelp):
    """A mesh, described by its axes and the machine that it is for.

    The constructor raises errors for settings that contradict each other, without using devices.
    `build` raises errors for sizes that do not fit the machine.

    Usage:
      MeshConfig(axes={'data': -1, 'fsdp': 4, 'model': 2}).build()
      MeshConfig(axes={'data': -1, 'model': 8}, topology='v5p:8x8x8').build()  # no TPU needed
      MeshConfig(axes={'data': 16, 'model': 4}, dcn={'data': 2})  # 2 slices: data is 2 * 16

    Attributes:
      axes: the size of each axis, as a mapping or as (name, size) pairs, in ascending order of
        traffic: the last axis gets the fastest links. One size may be -1, for whatever remains.
        Kept as a mapping.
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
      topology: a described machine, such as 'v5p:4x4x4'; see `describe_topology`.
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
        kept: dict[str, Any] = {'axes': check_axes(self.axes, self._setting_names[0])}
        if self.dcn is not None:
            kept['dcn'] = check_axes(self.dcn, self._setting_names[1]) if self.dcn else Axes(())
        kept['axis_types'] = check_axis_types(self.axis_types)
        for name in ('granule_size', 'num_slices', 'num_expert_partitions'):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)
        if self.devices is not None and self.topology is None:
            kept['devices'] = tuple(check_devices(self.devices, self.backend))
        if self.model_parallel_submesh is not None:
            kept['model_parallel_submesh'] = check_submesh(self.model_parallel_submesh)
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        for problem in (*self._axis_problems(), *self._machine_problems(), *self._order_problems()):
            raise ValueError(problem)
        if self.topology is not None:
            parse_topology(self.topology)

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
        **settings: Any,
    ) -> Self:
        """Returns the mesh that T5X's settings describe.

        It is ('data', 'model'), with 'replica' before it on several TPU slices, and has T5X's order
        of devices where T5X has one.

        Args:
          num_partitions, model_parallel_submesh, backend, ici_mesh_shape, dcn_mesh_shape: T5X's
            settings of a mesh; see `MeshSettings`.
          mesh_axis_names: other names than ('data', 'model') or ('replica', 'data', 'model'). With
            the two shapes there may be any number of axes. With `num_partitions`, the first of
            three names is the axis of the slices, also on one slice.
          **settings: the machine and types, as in the class: `devices`, `axis_types`,
            `granule_size`, `topology`, `num_slices` and `num_expert_partitions`.

        Raises:
          ValueError: if no setting decides the mesh, or settings contradict each other.
        """
        axes = t5x_axes(
            num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape, mesh_axis_names
        )
        return cls(**axes, backend=backend, **settings)

    @staticmethod
    def parse_axes(text: str) -> dict[str, int]:
        """Returns the axes of a text such as 'data=-1,fsdp=4'; raises ValueError for others."""
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
        if self.topology is not None:
            devices = list(_described_devices(self.topology, self.num_slices or 1))
        else:
            devices = list(self.devices or check_devices(None, self.backend))
        names, grid = self._place(devices)
        if self.num_expert_partitions is not None:
            names, grid = split_experts(names, grid, self.num_expert_partitions)
        types = cast(tuple[AxisType, ...], self.axis_types)
        if len(types) not in (1, len(names)):
            raise ValueError(_wrong_number_of_types(types, names))
        mesh = Mesh(grid, names, axis_types=types * (len(names) if len(types) == 1 else 1))
        _LOGGER.info('mesh %s of %d devices', dict(mesh.shape), mesh.size)
        return mesh

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value in (field.default, (AxisType.Auto,)) or field.name.startswith('_'):
                continue
            text = repr(value)
            if field.name == 'devices':
                text = f'<{len(value)} devices>'
            shown.append(f'{field.name}={text}')
        return f'MeshConfig({", ".join(shown)})'

    # A configuration never changes, so a copy of one is itself.

    def __deepcopy__(self, memo: Any = None) -> Self:
        return self

    __copy__ = __deepcopy__

    def __getstate__(self) -> dict[str, Any]:
        if self.devices is not None:
            raise ValueError(
                f'{self!r} holds devices, which cannot be pickled: describe the mesh without '
                'devices=, or give a topology='
            )
        return vars(self)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(dict(self.axes))

    def _place(self, devices: list[JaxDevice]) -> tuple[tuple[str, ...], np.ndarray]:
        """Returns the names of the axes, and the devices in their places."""
        names, sizes = self._names, tuple(dict(self.axes).values())
        (setting, dcn_setting), t5x_order = self._setting_names, self.order == 't5x'
        granules, counted, with_dcn = [devices], 'slices', ''
        if self.dcn is not None:
            dcn = dict(self.dcn)
            over = tuple(dcn.get(name, 1) for name in names)
            granules, counted = self._granules_of_dcn(devices, over)
            check_same_size(granules)
            with_dcn = f' with {dcn_setting} {show_sizes(over, dcn_setting, names)}'
            with_sizes = f' with {setting} {show_sizes(sizes, setting, names)}'
            over = fill(over, len(granules), dcn_setting, counted, with_sizes, names)
        else:
            if has_coords(devices[0]) and (self.slice_axis is not None or t5x_order):
                granules = granules_of(devices, granule_size=self.granule_size)
                check_same_size(granules)
            if len(granules) > 1 and self.slice_axis not in names:
                if self.slice_axis is None:
                    raise ValueError(
                        f'the axes {names} have no axis for the {len(granules)} slices: name 3 '
                        "axes, for example ('replica', 'data', 'model'), or set "
                        "slice_axis='replica'"
                    )
                names, sizes = (self.slice_axis, *names), (1, *sizes)
            over = tuple(len(granules) if name == self.slice_axis else 1 for name in names)
        blocks: list[np.ndarray] = []
        if t5x_order:
            tile, model = self.model_parallel_submesh, sizes[-1]
            if tile is None:
                if setting == 'num_partitions':
                    model = model_axis_size(devices, model)
                    sizes = (*sizes[:-1], model)
                check_last_axis(model, len(granules[0]), len(granules), names[-1], setting)
            blocks = [t5x_grid(g, model, tile, self.granule_size) for g in granules]
        several = len(granules) > 1
        each = f'devices in each of the {len(granules)} {counted}' if several else 'devices'
        sizes = fill(sizes, len(granules[0]), setting, each, with_dcn, names)
        if not several and not t5x_order:
            return names, best_grid(devices, sizes, self.granule_size)
        blocks = blocks or [order_devices(granule, sizes) for granule in granules]
        return names, join_blocks([block.reshape(sizes) for block in blocks], over)

    def _granules_of_dcn(
        self, devices: list[JaxDevice], dcn_sizes: Sequence[int]
    ) -> tuple[list[list[JaxDevice]], str]:
        """Returns the granules that `dcn` counts, and what messages call them."""
        size, by_process = self.granule_size, self.process_is_granule
        several = num_slices(devices) > 1
        if not (by_process or size or several) and set(dcn_sizes) == {1}:
            return [devices], 'slices'  # axes can also spread over processes
        by_slice = not by_process and (has_coords(devices[0]) or several)
        counted = 'granules' if size else 'slices' if by_slice else 'processes'
        return granules_of(devices, by_process, size), counted

    # The messages for settings that contradict each other.

    def _axis_problems(self) -> Iterator[str]:
        names, slices, experts = self._names, self.slice_axis, self.num_expert_partitions
        for name in [name for name in dict(self.dcn or ()) if name not in names]:
            yield (
                f'dcn names axis {name!r}, but the axes are {names}.{nearest(name, names)} Add it '
                'to axes, with size 1 if it spans slices only'
            )
        if slices is not None and (not isinstance(slices, str) or not slices):
            yield f'slice_axis={slices!r} must be the name of an axis'
        in_front = slices is not None and slices not in names
        if self.dcn is not None and in_front:
            yield f'slice_axis={slices!r} must be one of the axes {names} if dcn is set'
        types = cast(tuple[AxisType, ...], self.axis_types)
        least = len(names) + (experts is not None)
        if len(types) not in (1, least, least + in_front):
            yield _wrong_number_of_types(types, names)
        if experts is not None and ('data' not in names or 'expert' in names):
            yield (
                f"num_expert_partitions={experts} splits 'expert' off the axis 'data', but the "
                f'axes are {names}'
            )

    def _machine_problems(self) -> Iterator[str]:
        size, by_process, topology = self.granule_size, self.process_is_granule, self.topology
        if by_process not in (None, True, False):
            yield f'process_is_granule={by_process!r} must be True, False or None'
        if by_process is not None and size is not None:
            yield (
                f'granule_size={size} and process_is_granule={by_process} each decide the '
                'granules: keep one'
            )
        if by_process is not None and self.dcn is None:
            yield f'process_is_granule={by_process} says what dcn counts: set dcn, or remove it'
        if topology is not None and (self.devices is not None or self.backend is not None):
            other = 'backend' if self.devices is None else 'devices'
            yield f'topology={topology!r} and {other} each decide the devices: keep one'
        if self.num_slices is not None and topology is None:
            yield (
                f'num_slices={self.num_slices} needs topology=: devices that are here know their '
                'slices'
            )

    def _order_problems(self) -> Iterator[str]:
        sizes, tile = cast(Axes, self.axes), self.model_parallel_submesh
        last = tuple(sizes)[-1]
        size = sizes[last]
        if self.order not in get_args(Order):
            yield f"order={self.order!r} must be 'best' or 't5x'"
        if self.order == 't5x' and self.dcn is not None:
            yield "order='t5x' has no dcn: T5X orders slice by slice. Set slice_axis"
        if self.order == 't5x' and size == -1:
            yield f"order='t5x' needs the size of the last axis {last!r}"
        if tile is not None and (self.order != 't5x' or math.prod(tile) != size):
            yield (
                f"model_parallel_submesh={tile} needs order='t5x' and a last axis of size "
                f'{math.prod(tile)}, not order={self.order!r} and {dict(self.axes)}'
            )


def _wrong_number_of_types(types: Sequence[AxisType], names: Sequence[str]) -> str:
    return f'axis_types={types} must be one type, or one for each of the axes {names}'


# Each description makes new devices, but the meshes of one config must be equal.
@functools.lru_cache(maxsize=8)
def _described_devices(topology: str, num_slices: int) -> tuple[JaxDevice, ...]:
    return describe_topology(topology, num_slices=num_slices).devices
