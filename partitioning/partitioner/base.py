"""What every partitioner does: the data layout of a mesh, and plans of states and functions."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

from jax.sharding import Mesh, PartitionSpec

from partitioning.layout import (
    DataLayout,
    LocalChunker,
    data_layout,
    global_to_local,
    local_to_global,
)
from partitioning.partitioner.batches import check_batch, check_data_spec
from partitioning.partitioner.initializing import (
    check_only_arrays,
    is_init_function,
    place_state,
    trace_init,
)
from partitioning.partitioner.keyword_hints import explain_keywords
from partitioning.partitioner.objects import PartitionerObject
from partitioning.partitioner.settings import MeshSetting, read_mesh
from partitioning.partitioner.steps import Step, TrainingSetup, check_step_is_second
from partitioning.partitioner.t5x_settings import (
    MISSING,
    MeshSettings,
    Positions,
    check_settings,
    decide_shape,
    settings_of,
)
from partitioning.plan import Plan
from partitioning.programs.partitioned_function import PartitionedCallable
from partitioning.programs.trace_log import check_init
from partitioning.rules import (
    LogicalAxisRules,
    MeshAxes,
    PaddedSpec,
    as_tuple,
    check_axes,
    is_count,
    spec_str,
)
from partitioning.state import unbox
from partitioning.tracebacks import hide_own_frames
from partitioning.values import kind_str


class BasePartitioner(PartitionerObject):
    """Lays out data and train states over a mesh, and partitions functions.

    Subclasses say what the mesh is, how a state maps to it, and how a function is partitioned.
    It takes and raises what PjitPartitioner does, without a layout. With an AbstractMesh,
    everything works that needs no devices.
    """

    def __init__(self, mesh: MeshSetting | None = None, **t5x: Unpack[MeshSettings]):
        check_settings(t5x, MeshSettings, type(self).__name__)
        self._params_on_devices = t5x.get('params_on_devices', True)
        self._mesh_source = read_mesh(mesh, t5x)
        by_t5x = decide_shape(t5x)
        self._t5x_settings = dict(t5x) if by_t5x else settings_of(self._mesh_source)

    def _description(self) -> list[tuple[str, str]]:
        rows = super()._description()
        if not self._params_on_devices:
            rows.append(('parameters', 'in host memory until move_params_to_devices'))
        return rows

    @property
    def logical_axis_rules(self) -> LogicalAxisRules:
        """The rules under which functions are traced."""
        return ()

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
        return 'data' if self._slice_axis is None else (self._slice_axis, 'data')

    @property
    def _slice_axis(self) -> str | None:
        """The mesh axis over slices: the one that the description names, or else 'replica'."""
        chosen = getattr(self._mesh_source, 'slice_axis', None)
        axis = 'replica' if chosen is None else chosen
        return axis if axis in self.mesh.shape else None

    @property
    def data_partition_spec(self) -> PartitionSpec:
        """The spec of an array whose first dimension is the batch."""
        return PartitionSpec(self._data_axis)

    @property
    def _checked_data_spec(self) -> PartitionSpec:
        """The spec of a batch whose layout nobody else has given, which a rule must decide."""
        return self.data_partition_spec

    @property
    def padded_data_partition_spec(self) -> PaddedSpec:
        """The spec of a batch of any number of rows, which XLA pads inside a function."""
        return PaddedSpec(PartitionSpec(), self.data_partition_spec)

    @property
    def _data_axes(self) -> tuple[str, ...]:
        axes = as_tuple(self._data_axis)
        check_axes(axes, self.mesh, 'the batch')
        return axes

    def get_data_layout(
        self, batch_size: int | None = None, host_index: int | None = None
    ) -> DataLayout:
        """The rows of the global batch that a process reads, by default this process."""
        size = self.data_mesh_size if batch_size is None else batch_size
        return data_layout(self.mesh, self._data_axes, size, host_index)

    @hide_own_frames
    def to_global(self, local_batch: Any, batch_size: int | None = None, spec: Any = None) -> Any:
        """A batch as global arrays, of scalars and of the rows that each process has read.

        The rows are those of `get_data_layout(batch_size)`, which several processes have to give.
        `spec` may be a tree. On CPU, do not write to the numpy arrays again: memory is shared.
        """
        if isinstance(local_batch, int) and batch_size is not None and not is_count(batch_size):
            raise ValueError(
                f'to_global got {local_batch} as the batch and {kind_str(batch_size)} as the batch '
                f'size: write to_global(batch, {local_batch})'
            )
        chosen = self._checked_data_spec if spec is None else spec
        try:
            return local_to_global(local_batch, self.mesh, chosen, batch_size, own_sizes=True)
        except Exception:
            if isinstance(batch_size, PartitionSpec):
                raise ValueError(
                    f'to_global got the spec {spec_str(batch_size)} as the batch size: write '
                    f'to_global(batch, spec={spec_str(batch_size)})'
                ) from None
            if spec is not None:
                check_data_spec(spec, self.mesh, self.logical_axis_rules, 'spec')
            check_batch(local_batch, chosen)
            raise

    def to_local(self, global_batch: Any) -> Any:
        """The rows of global arrays that this process holds, as numpy arrays."""
        return global_to_local(global_batch)

    # The train state.

    @hide_own_frames
    def plan(self, init_or_state: Any, /, *args: Any) -> Plan:
        """The plan of a state, or of what an init function makes of `args`; both may be abstract.

        Parameters carry names, unless the layout needs none or the state was planned here before.
        """
        if not is_init_function(init_or_state, args):
            check_only_arrays(unbox(init_or_state), 'the state', 'holds', abstract=True)
            return self._plan_state(init_or_state)
        check_init(init_or_state, args)
        named, program = trace_init(init_or_state, self.mesh, self.logical_axis_rules, args)
        return dataclasses.replace(self._plan_state(named), program=program)

    def _plan_state(self, train_state: Any) -> Plan:
        """The plan of a state that exists, or of an abstract one, made in one walk over it."""
        raise NotImplementedError

    @hide_own_frames
    @explain_keywords(
        'the functions and the arguments of the init function are passed by position, as in '
        'setup(init, train_step, key)',
        static_argnames='write static_argnums, the positions of the arguments, such as 2',
        donate_argnums='write donate=True or False, for the state',
        donate_argnames='write donate=True or False, for the state',
        in_shardings='write data_spec, the layout of the batch; the plan lays out the state',
    )
    def setup(
        self,
        init_or_state: Any,
        train_step: Callable[..., Any],
        /,
        *args: Any,
        data_spec: Any = None,
        static_argnums: Positions = (),
        donate: bool = True,
    ) -> TrainingSetup:
        """`plan`, `init` and `partition` in one call, for a state and a step.

        Args:
          init_or_state, *args: as for `plan`. A state is moved: do not use it afterwards.
          train_step: maps (state, batch, ...) to the new state, or to a tuple that begins with it.
            Random keys and scalars may stand before the batch.
          data_spec: the spec of the batch, such as P(None, 'data') for [steps, rows], or a tree.
          static_argnums, donate: as in `jax.jit`; donate=False keeps the old state.
        """
        step_name = getattr(train_step, '__name__', 'train_step')
        if is_init_function(init_or_state, args):
            check_step_is_second(init_or_state, train_step, args)
            check_init(init_or_state, args, f'setup({{}}, {step_name}, {{}})')
        if data_spec is not None:
            check_data_spec(data_spec, self.mesh, self.logical_axis_rules)
        plan = self.plan(init_or_state, *args)
        state = plan.init(*args) if plan.program else place_state(init_or_state, plan)
        spec = self._checked_data_spec if data_spec is None else data_spec
        step: Any = Step(
            self.partition,
            train_step,
            plan.specs,
            spec,
            self.mesh,
            is_default=data_spec is None,
            static_argnums=static_argnums,
            donate=donate,
        )
        return TrainingSetup(state, step, spec)

    @hide_own_frames
    def eval_shape(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`jax.eval_shape` inside the mesh and the rules; the result keeps its boxes and names."""
        return trace_init(fn, self.mesh, self.logical_axis_rules, args)[0]

    # Functions.

    @abc.abstractmethod
    def partition(
        self,
        fn: Callable[..., Any],
        in_shardings: Any = MISSING,
        out_shardings: Any = MISSING,
        *args: Any,
        **settings: Any,
    ) -> PartitionedCallable:
        """Partitions a function over the mesh; see `PjitPartitioner.partition`."""
