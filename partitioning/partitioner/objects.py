"""A partitioner as a Python object: its attributes, repr, copies and pickles, and T5X's names."""

from __future__ import annotations

import abc
import functools
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self, Unpack

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from partitioning.layout import (
    Indivisible,
    LocalChunkInfo,
    host_local_array_to_global_array,
)
from partitioning.mesh import MeshConfig, describe_devices
from partitioning.partitioner.initializing import check_is_state
from partitioning.partitioner.settings import AnyMesh, MeshSetting, by_partition_rules
from partitioning.partitioner.t5x_settings import T5xSetting, T5xSettings
from partitioning.plan import PartitionRules
from partitioning.programs.boundary import to_shardings
from partitioning.programs.partitioned_function import (
    CompiledPartitionedCallable,
    PartitionedCallable,
)
from partitioning.rules import (
    MeshAxes,
    boundary_spec,
    check_has_devices,
    describe_axes,
    num_shards,
)
from partitioning.short_help import ShortHelp
from partitioning.state import get_logical_axes
from partitioning.tracebacks import hide_own_frames


class PartitionerHelp(ShortHelp):
    """Leaves the names of other systems out, too: `NamesOfOthers` has them."""

    def __dir__(cls) -> list[str]:
        hidden = {} if cls is NamesOfOthers else vars(NamesOfOthers)
        return [name for name in super().__dir__() if name not in hidden]


class NamesOfOthers(metaclass=PartitionerHelp):
    """What T5X and EasyLM call by other names, and what other objects can do without them.

    Attributes:
      data_mesh_size: the number of devices that the batch is sharded over, 4 for data 4 x model 2.
      data_shards: the number of chunks into which the processes divide the batch.
      data_shard_id: the number of the chunk that this process reads.
      params_on_devices: whether parameters live on the devices from the start.
      use_shardy_partitioner: whether JAX partitions programs with Shardy.
    """

    _num_partitions = T5xSetting()
    _model_parallel_submesh = T5xSetting()
    _backend = T5xSetting()
    _ici_mesh_shape = T5xSetting()
    _dcn_mesh_shape = T5xSetting()
    _params_on_devices: bool

    @classmethod
    def from_partition_rules(
        cls: Any, rules: PartitionRules, mesh: MeshSetting | None = None, **t5x: Unpack[T5xSettings]
    ) -> Any:
        """As in EasyLM: `cls(mesh, layout=rules)`, also with tuples in place of PartitionSpecs."""
        return cls(mesh, by_partition_rules(rules), **t5x)

    @hide_own_frames
    def init(self: Any, init_fn: Callable[..., Any], *args: Any) -> Any:
        """The state of an init function, in its shards: `plan(init_fn, *args).init(*args)`."""
        return self.plan(init_fn, *args).init(*args)

    @abc.abstractmethod
    def compile(
        self, partitioned_fn: PartitionedCallable, *args: Any, **settings: Any
    ) -> CompiledPartitionedCallable:
        """`partitioned_fn.lower(*args).compile(...)`, which checks the memory of the devices."""

    def get_mesh_axes(self: Any, train_state: Any) -> Any:
        """The state with a PartitionSpec for every array: `plan(state).specs`."""
        check_is_state(train_state, 'get_mesh_axes', 'plan(init, key).specs')
        return self._plan_state(train_state).specs

    def get_logical_axes(self, train_state: Any) -> Any:
        """The state with AxisNames for leaves: `plan(state).logical_axes`."""
        return get_logical_axes(train_state)

    @property
    def data_mesh_size(self: Any) -> int:
        """The number of devices that the batch is sharded over, 4 for data 4 x model 2."""
        return num_shards(self._data_axes, self.mesh)

    @property
    def data_shards(self: Any) -> int:
        """The number of chunks into which the processes divide the batch."""
        return self._local_chunker.get_num_shards(self._data_axes)

    @property
    def data_shard_id(self: Any) -> int:
        """The number of the chunk that this process reads."""
        return self._local_chunker.get_shard_id(self._data_axes)

    def get_local_chunk_info(
        self: Any,
        global_shape: Sequence[int],
        mesh_axes: Sequence[MeshAxes],
        on_indivisible: Indivisible = 'error',
    ) -> LocalChunkInfo:
        """The one chunk of an array that this process holds; see `LocalChunker`."""
        spec = boundary_spec(mesh_axes)
        return self._local_chunker.get_local_chunk_info(global_shape, spec, on_indivisible)

    def get_local_chunks(
        self: Any,
        global_shape: Sequence[int],
        mesh_axes: Sequence[MeshAxes],
        on_indivisible: Indivisible = 'error',
    ) -> tuple[LocalChunkInfo, ...]:
        """Every chunk of an array that this process holds; see `LocalChunker`."""
        spec = boundary_spec(mesh_axes)
        return self._local_chunker.get_local_chunks(global_shape, spec, on_indivisible)

    @property
    def use_shardy_partitioner(self) -> bool:
        """Whether JAX partitions programs with Shardy."""
        return bool(getattr(jax.config, 'jax_use_shardy_partitioner', True))

    @property
    def params_on_devices(self) -> bool:
        """Whether parameters live on the devices from the start."""
        return self._params_on_devices

    @params_on_devices.setter
    def params_on_devices(self, value: bool) -> None:
        self._params_on_devices = value

    def move_params_to_devices(self: Any, train_state: Any, train_state_axes: Any) -> Any:
        """Moves a state in host memory onto the mesh, by its specs; each process gives its part."""
        check_has_devices(self.mesh, 'move_params_to_devices')
        if jax.process_count() > 1:
            return host_local_array_to_global_array(train_state, self.mesh, train_state_axes)
        return jax.device_put(train_state, to_shardings(train_state_axes, self.mesh))


class PartitionerObject(NamesOfOthers):
    """The behaviour of a partitioner as a Python object: its attributes, repr, and copies."""

    _mesh_source: AnyMesh
    _t5x_settings: dict[str, Any]
    # The names of the class's cached properties, and of the ones that were assigned: subclasses of
    # T5X's partitioners assign some.
    _cached_properties: frozenset[str] = frozenset()
    _assigned: frozenset[str] = frozenset()

    @property
    def mesh_source(self) -> AnyMesh:
        """What the mesh is made from: a MeshConfig, also of another machine, or the mesh itself."""
        if 'mesh' in self._assigned or self._maker_of_mesh is not None:
            return self.mesh  # type: ignore[attr-defined]
        return self._mesh_source

    @property
    def _maker_of_mesh(self) -> type | None:
        """The class that makes the mesh, or None if it is a class of this package."""
        [by, *_] = (cls for cls in type(self).__mro__ if 'mesh' in vars(cls))
        return None if by.__module__.startswith('partitioning.') else by

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._cached_properties = frozenset(
            name
            for name in {name for base in cls.__mro__ for name in vars(base)}
            if isinstance(getattr(cls, name, None), functools.cached_property)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        # A cached property stores its own value without this method.
        if name in self._cached_properties:
            object.__setattr__(self, '_assigned', self._assigned | {name})

    def _forget(self, kept: Collection[str] = ()) -> None:
        """Forgets every cached value except those in `kept`; assigned values stay."""
        for name in self._cached() - {*kept}:
            del vars(self)[name]

    def _cached(self) -> set[str]:
        return {*vars(self)} & self._cached_properties - self._assigned

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: Any) -> Self:
        return self.__copy__()  # everything that a partitioner holds is immutable

    def __getstate__(self) -> dict[str, Any]:
        computed = {*self._cached(), '_boxed_states'}  # boxes may hold a mesh
        held = {name: value for name, value in vars(self).items() if name not in computed}
        for mesh in held.values():
            if isinstance(mesh, Mesh):
                raise ValueError(
                    f'this {type(self).__name__} holds the devices of its mesh '
                    f'{describe_axes(mesh)}, which cannot be pickled: make it with '
                    f'mesh=MeshConfig(axes={dict(mesh.shape)}) in place of the Mesh'
                )
        return held

    def __repr__(self) -> str:
        rows = self._description()
        width = max(len(name) for name, _ in rows)
        indent = ' ' * (width + 4)
        lines = [type(self).__name__]
        for name, text in rows:
            first = f'  {name:<{width}}  '
            lines += textwrap.wrap(
                text,
                width=96,
                initial_indent=first,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return '\n'.join(lines)

    def _description(self) -> list[tuple[str, str]]:
        """The lines of the repr, each as a name and a text."""
        mesh = self._mesh_without_building()
        if mesh is None:
            by = self._maker_of_mesh
            made = repr(self._mesh_source) if by is None else f'made by {by.__name__}.mesh'
            return [('mesh', f'not built yet: {made}')]
        axes = ' x '.join(
            f'{name} {size}' + (f' ({kind.name})' if kind != AxisType.Auto else '')
            for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
        )
        if isinstance(mesh, AbstractMesh):
            return [('mesh', f'{axes}, an AbstractMesh without devices')]
        return [('mesh', f'{axes}, {describe_devices(mesh)}')]

    def _mesh_without_building(self) -> Mesh | AbstractMesh | None:
        """The mesh if it is built, or else None: building it may take long, or fail."""
        mesh = vars(self).get('mesh', vars(self).get('_mesh_source'))
        return None if isinstance(mesh, MeshConfig) else mesh
