"""The one door most users need: a mesh, rules, and functions partitioned by them."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning import state as state_lib
from partitioning.hardware import HardwareMesh, JaxDevice
from partitioning.layout import (
    DataLayout,
    LocalChunker,
    LocalChunkInfo,
    host_local_array_to_global_array,
)
from partitioning.mesh import check_mesh_settings, default_mesh
from partitioning.partitioned import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    partition_function,
    to_shardings,
)
from partitioning.rules import (
    AxisNames,
    LogicalAxisRules,
    MeshAxes,
    as_tuple,
    check_rules,
    describe_axes,
    logical_to_mesh_axes,
    nearest,
    standard_logical_axis_rules,
)

TrainState = Any  # any pytree; T5X's class of that name among them


class BasePartitioner(abc.ABC):
    """Lays out data and train states over a mesh and partitions functions.

    Subclasses say what the mesh is, how a state maps to it, and how a function is partitioned.
    """

    _data_axis: MeshAxes = 'data'

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
        mesh: Mesh | None = None,
    ):
        """Args:
        num_partitions: size of the 'model' axis; the remaining devices make the 'data' axis.
        model_parallel_submesh: (x, y, z, cores) tile of one model replica on a TPU torus.
        params_on_devices: False where the caller keeps parameters in host memory and moves them
          with `move_params_to_devices`.
        backend: take the devices of this backend instead of the default one.
        ici_mesh_shape: (replica, data, model) within a slice; with `dcn_mesh_shape`.
        dcn_mesh_shape: (replica, data, model) over slices.
        devices: the devices to use, instead of all of `backend`.
        mesh: a mesh of your own, instead of every setting above but `params_on_devices`.

        Raises:
          ValueError: no setting that decides the mesh, or several that contradict each other.
        """
        if mesh is None:
            check_mesh_settings(
                num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape
            )
        given = {
            'num_partitions': num_partitions,
            'model_parallel_submesh': model_parallel_submesh,
            'backend': backend,
            'ici_mesh_shape': ici_mesh_shape,
            'dcn_mesh_shape': dcn_mesh_shape,
            'devices': devices,
        }
        beside = [name for name, value in given.items() if value is not None]
        if mesh is not None and beside:
            raise ValueError(f'mesh= decides everything that {", ".join(beside)} would: leave out')
        self._num_partitions = num_partitions
        self._model_parallel_submesh = model_parallel_submesh
        self._params_on_devices = params_on_devices
        self._backend = backend
        self._ici_mesh_shape = ici_mesh_shape
        self._dcn_mesh_shape = dcn_mesh_shape
        self._devices = devices
        self._given_mesh = mesh
        if ici_mesh_shape is not None:
            self._data_axis = ('replica', 'data')

    # The mesh and the data.

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def _local_chunker(self) -> LocalChunker:
        """The chunker of `mesh`."""

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
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f'batch size {batch_size!r} must be a positive whole number')
        if size % self.data_mesh_size:
            above = -(-size // self.data_mesh_size) * self.data_mesh_size
            below = above - self.data_mesh_size
            raise ValueError(
                f'Batch size ({size}) must be divisible by corresponding data mesh size '
                f'({self.data_mesh_size}): the mesh is {describe_axes(self.mesh.shape)}. Use '
                f'{f"{below} or {above}" if below else above}.'
            )
        chunker = self._local_chunker
        if host_index is not None:
            chunker = LocalChunker(self.mesh, host_index)
        axes = self._data_axes
        return DataLayout(
            batch_size=int(size),
            shard_id=chunker.get_shard_id(axes),
            num_shards=chunker.get_num_shards(axes),
            is_first_host_in_replica_set=chunker.get_replica_id(axes) == 0,
        )

    def get_local_chunk_info(
        self, global_shape: Sequence[int], mesh_axes: Sequence[MeshAxes]
    ) -> LocalChunkInfo:
        """The part of an array that this process holds; see `LocalChunker`."""
        return self._local_chunker.get_local_chunk_info(global_shape, mesh_axes)

    # The train state.

    @property
    def params_on_devices(self) -> bool:
        """Whether parameters live on the devices from the start."""
        return self._params_on_devices

    @params_on_devices.setter
    def params_on_devices(self, value: bool) -> None:
        self._params_on_devices = value

    def move_params_to_devices(self, train_state: TrainState, train_state_axes: Any) -> TrainState:
        """Moves a state in host memory onto the mesh.

        Args:
          train_state: a pytree of host arrays, in each process its part of every array.
          train_state_axes: its PartitionSpecs.
        """
        if jax.process_count() > 1:
            return host_local_array_to_global_array(train_state, self.mesh, train_state_axes)
        return jax.device_put(train_state, to_shardings(train_state_axes, self.mesh))

    def get_logical_axes(self, train_state: TrainState) -> Any:
        """The state with AxisNames for leaves; see `partitioning.state.get_logical_axes`."""
        return state_lib.get_logical_axes(train_state)

    def get_mesh_axes(self, train_state: TrainState) -> Any:
        """The state with PartitionSpecs for leaves."""
        raise NotImplementedError

    def get_shardings(self, train_state: TrainState) -> Any:
        """The state with NamedShardings for leaves."""
        return to_shardings(self.get_mesh_axes(train_state), self.mesh)

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


class BasePjitPartitioner(BasePartitioner):
    """A partitioner on `jax.jit`, without logical axis rules."""

    @functools.cached_property
    def _local_chunker(self) -> LocalChunker:
        return LocalChunker(self.mesh)

    @functools.cached_property
    def mesh(self) -> Mesh:
        if self._given_mesh is not None:
            return self._given_mesh
        return default_mesh(
            self._num_partitions,
            self._model_parallel_submesh,
            self._backend,
            self._ici_mesh_shape,
            self._dcn_mesh_shape,
            devices=self._devices,
        )

    @property
    def logical_axis_rules(self) -> LogicalAxisRules:
        """The rules that functions are traced under."""
        return ()

    def get_mesh_axes(self, train_state: TrainState) -> Any:
        raise ValueError(
            f'{type(self).__name__} has no logical axis rules to map a state by: use '
            'PjitPartitioner'
        )

    def partition(
        self,
        fn: Callable[..., Any],
        in_axis_resources: Any,
        out_axis_resources: Any,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
    ) -> PartitionedCallable:
        return partition_function(
            fn,
            self.mesh,
            self.logical_axis_rules,
            in_shardings=to_shardings(in_axis_resources, self.mesh),
            out_shardings=to_shardings(out_axis_resources, self.mesh),
            static_argnums=_as_indices(static_argnums),
            donate_argnums=_as_indices(donate_argnums),
        )

    def compile(
        self, partitioned_fn: PartitionedCallable, *args: Any
    ) -> CompiledPartitionedCallable:
        return partitioned_fn.lower(*args).compile()  # type: ignore[attr-defined]


class PjitPartitioner(BasePjitPartitioner):
    """A partitioner by logical axis rules, on `jax.jit`.

    Usage:
      partitioner = PjitPartitioner(num_partitions=2)
      axes = partitioner.get_mesh_axes(jax.eval_shape(init, key))
      state = partitioner.partition(init, None, axes)(key)
      step = partitioner.partition(
          step, (axes, partitioner.data_partition_spec), (axes, None), donate_argnums=0)
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: HardwareMesh | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        ici_mesh_shape: Sequence[int] | None = None,
        dcn_mesh_shape: Sequence[int] | None = None,
        logical_axis_rules: LogicalAxisRules | None = None,
        *,
        devices: Sequence[JaxDevice] | None = None,
        mesh: Mesh | None = None,
    ):
        """Args as those of BasePartitioner, and:
        logical_axis_rules: (logical axis, mesh axis or axes or None) pairs in order of priority;
          by default `standard_logical_axis_rules()`. With `ici_mesh_shape`, 'batch' is sharded
          over ('replica', 'data').
        """
        super().__init__(
            num_partitions=num_partitions,
            model_parallel_submesh=model_parallel_submesh,
            params_on_devices=params_on_devices,
            backend=backend,
            ici_mesh_shape=ici_mesh_shape,
            dcn_mesh_shape=dcn_mesh_shape,
            devices=devices,
            mesh=mesh,
        )
        if logical_axis_rules is None:
            logical_axis_rules = standard_logical_axis_rules()
        rules = check_rules(logical_axis_rules)
        if ici_mesh_shape is not None:
            rules = tuple((k, ('replica', 'data') if k == 'batch' else v) for k, v in rules)
        self._logical_axis_rules = rules
        batch = logical_to_mesh_axes(['batch'], self._logical_axis_rules, on_unmatched='replicate')
        self._data_axis = batch[0] if batch else None

    @property
    def logical_axis_rules(self) -> LogicalAxisRules:
        return self._logical_axis_rules

    def get_mesh_axes(self, train_state: TrainState) -> Any:
        """The state with a PartitionSpec for every array.

        Args:
          train_state: a pytree, abstract or not; see `get_logical_axes`.

        Raises:
          ValueError: with the path of the first array whose layout the rules do not decide, or
            that its mesh axes do not divide.
        """
        if hasattr(train_state, 'as_logical_axes'):
            return jax.tree_util.tree_map_with_path(
                lambda path, names: self._spec(state_lib.path_str(path), names, None),
                train_state.as_logical_axes(),
                is_leaf=lambda x: x is None or isinstance(x, AxisNames),
            )
        leaves, treedef = state_lib.leaf_axes(train_state)
        # A leaf takes its axes from its parameter's spec: names resolved apart from the others
        # could win mesh axes that the parameter has elsewhere.
        specs = [
            PartitionSpec(*leaf.pick(tuple(self._spec(leaf.path, leaf.names, leaf.shape) or ())))
            for leaf in leaves
        ]
        return jax.tree_util.tree_unflatten(treedef, specs)

    def _spec(
        self, name: str, names: Sequence[str | None] | None, shape: Sequence[int] | None
    ) -> PartitionSpec | None:
        try:
            return logical_to_mesh_axes(
                names, self._logical_axis_rules, axis_sizes=self.mesh.shape, shape=shape
            )
        except ValueError as error:
            raise ValueError(f'Failed to map logical axes for {name}: {error}') from error


def _as_indices(indices: int | Sequence[int]) -> tuple[int, ...]:
    return (indices,) if isinstance(indices, int) else tuple(indices)
