"""What every partitioner does: the data layout of a mesh, and the way to state and functions."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from partitioning.hardware import HardwareMesh, JaxDevice
from partitioning.layout import (
    DataLayout,
    Indivisible,
    LocalChunker,
    LocalChunkInfo,
    data_layout,
    global_to_local,
    host_local_array_to_global_array,
    local_to_global,
)
from partitioning.mesh import AxisTypes, check_axis_types, check_mesh_settings
from partitioning.partitioner.partitioned import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    to_shardings,
)
from partitioning.plan.rule_set import ResolvedState
from partitioning.rules import (
    MeshAxes,
    as_tuple,
    boundary_spec,
    describe_axes,
    is_count,
    nearest,
)
from partitioning.state import get_logical_axes


class BasePartitioner(abc.ABC):
    """Lays out data and train states over a mesh and partitions functions.

    Subclasses say what the mesh is, how a state maps to it, and how a function is partitioned.
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        ici_mesh_shape: Sequence[int] | None = None,
        dcn_mesh_shape: Sequence[int] | None = None,
        *,
        devices: Sequence[JaxDevice] | None = None,
        mesh_axis_names: Sequence[str] | None = None,
        axis_types: AxisTypes = AxisType.Auto,
        granule_size: int | None = None,
        mesh: Mesh | None = None,
    ):
        """Args:
        num_partitions: size of the 'model' axis; the remaining devices make the 'data' axis, or on
          several TPU slices 'replica' (over the data centre network) and 'data'.
        model_parallel_submesh: (x, y, z, cores) tile of one model replica on a TPU torus.
        params_on_devices: False where the caller keeps parameters in host memory and moves them
          with `move_params_to_devices`.
        backend: take the devices of this backend instead of the default one.
        ici_mesh_shape: (replica, data, model) within a slice; with `dcn_mesh_shape`.
        dcn_mesh_shape: (replica, data, model) over slices.
        devices: the devices to use, instead of all of `backend`.
        mesh_axis_names: names of the axes, with the two shapes as many as these have sizes.
        axis_types: Auto, Explicit or Manual, for all axes or one for each.
        granule_size: GPUs that share NVLink, where they are more than those of a host.
        mesh: a mesh of your own, instead of every setting above but `params_on_devices`.

        Raises:
          ValueError: no setting that decides the mesh, or several that contradict each other.
        """
        if mesh is None:
            check_mesh_settings(
                num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape
            )
        if num_partitions is not None and not is_count(num_partitions):
            raise ValueError(f'num_partitions={num_partitions!r} must be a whole number, 1 or more')
        check_axis_types(axis_types)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ValueError(f'mesh={mesh!r} must be a jax.sharding.Mesh, as create_mesh makes it')
        settings = {
            'num_partitions': num_partitions,
            'model_parallel_submesh': model_parallel_submesh,
            'backend': backend,
            'ici_mesh_shape': ici_mesh_shape,
            'dcn_mesh_shape': dcn_mesh_shape,
            'devices': devices,
            'mesh_axis_names': mesh_axis_names,
            'granule_size': granule_size,
        }
        beside = [name for name, value in settings.items() if value is not None]
        if axis_types not in (AxisType.Auto, 'auto'):
            beside.append('axis_types')
        if mesh is not None and beside:
            raise ValueError(f'mesh= decides everything that {", ".join(beside)} would: leave out')
        self._params_on_devices = params_on_devices
        self._given_mesh = mesh
        self._mesh_settings: dict[str, Any] = {**settings, 'axis_types': axis_types}

    # The mesh and the data.

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def _local_chunker(self) -> LocalChunker:
        """The chunker of `mesh`."""

    @functools.cached_property
    def _data_axis(self) -> MeshAxes:
        """The mesh axes of the batch."""
        return 'data' if self._axis_of_slices is None else (self._axis_of_slices, 'data')

    @property
    def _axis_of_slices(self) -> str | None:
        """The axis of the slices, whose name is 'replica' or was chosen for this partitioner."""
        names = self._mesh_settings['mesh_axis_names']
        if names is not None and self._mesh_settings['ici_mesh_shape'] is None:
            return names[0] if len(names) == 3 else None
        return 'replica' if 'replica' in self.mesh.shape else None

    @property
    def data_partition_spec(self) -> PartitionSpec:
        """The spec of an array whose first dimension is the batch."""
        return PartitionSpec(self._data_axis)

    @property
    def _data_axes(self) -> tuple[str, ...]:
        axes = as_tuple(self._data_axis)
        for axis in axes:
            if axis not in self.mesh.shape:
                raise ValueError(
                    f'the batch is sharded over {axis!r}, but the mesh is '
                    f'{describe_axes(self.mesh.shape)}.{nearest(axis, self.mesh.shape)}'
                )
        return axes

    @property
    def data_mesh_size(self) -> int:
        """Over how many devices the batch is sharded: 8 for replica 2 x data 4 x model 2."""
        return math.prod(self.mesh.shape[axis] for axis in self._data_axes)

    @property
    def data_shards(self) -> int:
        """Into how many shards the processes divide the batch."""
        return self._local_chunker.get_num_shards(self._data_axes)

    @property
    def data_shard_id(self) -> int:
        """Which of those shards this process reads."""
        return self._local_chunker.get_shard_id(self._data_axes)

    def get_data_layout(
        self, batch_size: int | None = None, host_index: int | None = None
    ) -> DataLayout:
        """What part of the batch a process reads.

        Args:
          batch_size: rows of the global batch; by default one a device of the data axes.
          host_index: the process to answer for; by default this one.

        Raises:
          ValueError: the batch is no positive whole number, or the data axes do not divide it.
        """
        size = self.data_mesh_size if batch_size is None else batch_size
        return data_layout(self.mesh, self._data_axes, size, host_index)

    def to_global(
        self, local_batch: Any, batch_size: int | None = None, spec: PartitionSpec | None = None
    ) -> Any:
        """The rows that each process has read, as sharded global arrays.

        Args:
          local_batch: pytree of arrays [local rows, ...], the rows of this process's
            `get_data_layout(batch_size).row_indices` in their order.
          batch_size: rows of the global batch; by default what this process's rows make. Give it
            where there are several processes: none can see what the others have read.
          spec: mesh axes of the batch's dimensions; by default `data_partition_spec`. Dimensions
            but the first are whole in `local_batch`, sharded or not.

        Returns:
          A pytree of jax.Arrays [batch_size, ...]. On CPU they may share the memory of numpy
          arrays, so do not write to those again.

        Raises:
          ValueError: another number of rows than this process holds, or than other leaves have.
        """
        spec = self.data_partition_spec if spec is None else spec
        return local_to_global(local_batch, self.mesh, spec, batch_size)

    def to_local(self, global_batch: Any) -> Any:
        """The rows of global arrays that this process holds, as numpy arrays: `to_global` undone.

        Raises:
          ValueError: of some row this process holds only a part.
        """
        return global_to_local(global_batch)

    def get_local_chunk_info(
        self,
        global_shape: Sequence[int],
        mesh_axes: Sequence[MeshAxes],
        on_indivisible: Indivisible = 'error',
    ) -> LocalChunkInfo:
        """The one chunk of an array that this process holds; see `LocalChunker`."""
        spec = boundary_spec(mesh_axes)
        return self._local_chunker.get_local_chunk_info(global_shape, spec, on_indivisible)

    def get_local_chunks(
        self,
        global_shape: Sequence[int],
        mesh_axes: Sequence[MeshAxes],
        on_indivisible: Indivisible = 'error',
    ) -> tuple[LocalChunkInfo, ...]:
        """Every block of an array that this process holds; see `LocalChunker`."""
        spec = boundary_spec(mesh_axes)
        return self._local_chunker.get_local_chunks(global_shape, spec, on_indivisible)

    # The train state.

    @property
    def params_on_devices(self) -> bool:
        """Whether parameters live on the devices from the start."""
        return self._params_on_devices

    @params_on_devices.setter
    def params_on_devices(self, value: bool) -> None:
        self._params_on_devices = value

    def move_params_to_devices(self, train_state: Any, train_state_axes: Any) -> Any:
        """Moves a state in host memory onto the mesh.

        Args:
          train_state: a pytree of host arrays, in each process its part of every array.
          train_state_axes: its PartitionSpecs.
        """
        if jax.process_count() > 1:
            return host_local_array_to_global_array(train_state, self.mesh, train_state_axes)
        return jax.device_put(train_state, to_shardings(train_state_axes, self.mesh))

    def resolve(self, train_state: Any) -> ResolvedState:
        """The layout of every array of a state, with the reasons, in one walk of it.

        Args:
          train_state: a pytree, abstract or not, whose parameters carry names: linen boxes, T5X's
            `params_axes`, nnx variables; or with T5X's `as_logical_axes()`.

        Raises:
          ValueError: with the path of the first array whose layout the rules do not decide, or
            that its mesh axes do not divide.
        """
        raise NotImplementedError

    def get_logical_axes(self, train_state: Any) -> Any:
        """The state with AxisNames for leaves; see `partitioning.state.get_logical_axes`."""
        return get_logical_axes(train_state)

    def get_mesh_axes(self, train_state: Any) -> Any:
        """The state with a PartitionSpec for every array; see `resolve`."""
        return self.resolve(train_state).mesh_axes

    def get_shardings(self, train_state: Any) -> Any:
        """The state with a NamedSharding for every array; see `resolve`."""
        return self.resolve(train_state).shardings

    # Functions.

    @abc.abstractmethod
    def partition(
        self,
        fn: Callable[..., Any],
        in_axis_resources: Any,
        out_axis_resources: Any,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> PartitionedCallable:
        """Partitions a function over the mesh.

        Args:
          fn: the function.
          in_axis_resources: for each positional argument a pytree (or a prefix of one) of
            PartitionSpecs, Shardings or None, which replicates. Static arguments have no entry.
          out_axis_resources: the same for the result.
          static_argnums: positions of compile-time constants.
          donate_argnums: positions of arguments whose buffers the result may reuse.
        """

    @abc.abstractmethod
    def compile(
        self, partitioned_fn: PartitionedCallable, *args: Any
    ) -> CompiledPartitionedCallable:
        """Compiles a partitioned function for arguments of these shapes, ahead of time."""
