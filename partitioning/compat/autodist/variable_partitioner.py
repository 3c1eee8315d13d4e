"""A train state laid out by AutoDist's configurations, strategies or planners."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.compat.autodist.compression import (
    CompressionState,
    compression_specs,
    is_compression_state,
)
from partitioning.compat.autodist.partitioner_config import PartitionerConfig
from partitioning.compat.autodist.placement import split_axis
from partitioning.compat.autodist.planner import AutoDistPlanner
from partitioning.compat.autodist.strategy import Strategy
from partitioning.compat.pytorch.sharder import placed
from partitioning.compat.pytorch.sharding_plan import ShardingPlan, ShardingPlanner
from partitioning.compat.pytorch.trees import is_variables
from partitioning.plan.matching import ends
from partitioning.plan.resolved import ResolvedPlan
from partitioning.plan.rows import PlannedArray
from partitioning.rules import (
    OnIndivisible,
    OnUnmatched,
    PaddedSpec,
    boundary_spec,
    describe_axes,
    nearest,
)
from partitioning.state import key_names, shape_of, unbox
from partitioning.state.boxes import is_carrier


@dataclasses.dataclass(frozen=True)
class PartitionedVariables:
    """A train state on a mesh.

    Attributes:
      state: its arrays in their shards, without linen boxes; where they were ShapeDtypeStructs,
        such with shardings.
      mesh_axes: the same tree with the specs of the arrays, for `PjitPartitioner.partition`.
      shardings: the same tree with NamedShardings, for `jax.jit`.
      plan: the layout of each parameter, with the reason.
      mesh: the mesh.
    """

    state: Any
    mesh_axes: Any
    shardings: Any
    plan: ResolvedPlan
    mesh: Mesh

    def shard_gradients(self, grads: Any) -> Any:
        """Gradients laid out as their parameters, inside a step: each device keeps its part.

        Args:
          grads: of all the parameters or of some, a tree like them.

        Raises:
          ValueError: a gradient of no parameter, of one of several, or of another shape.
        """

        def shard(path: Any, x: Any) -> Any:
            name = '/'.join(key_names(path))
            return jax.tree.map(lambda gradient: self._shard(name, gradient), x)

        return jax.tree_util.tree_map_with_path(shard, grads, is_leaf=is_carrier)

    def _shard(self, name: str, gradient: Any) -> Any:
        row = self._row(name.removeprefix('params/'))
        if row.shape != shape_of(gradient):
            raise ValueError(
                f'{name}: a gradient of shape {shape_of(gradient)} of a parameter of {row.shape}'
            )
        spec = row.mesh_axes
        sharding = NamedSharding(self.mesh, spec.inside if isinstance(spec, PaddedSpec) else spec)
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.sharding.reshard(gradient, sharding)
        return jax.lax.with_sharding_constraint(gradient, sharding)

    def _row(self, name: str) -> PlannedArray:
        """The layout of the parameter of a gradient."""
        found = self._rows.get(name)
        if found is None:
            hint = nearest(name, [row.path for row in self.plan.arrays])
            raise ValueError(f'{name} is the gradient of no parameter of the plan.{hint}')
        # Of `0/kernel` and `0/sub/kernel` it is the first: the second would be `sub/kernel`.
        roots = [row.path.removesuffix(name) for row in found]
        if not all(root.startswith(roots[0]) for root in roots):
            listed = ', '.join(row.path for row in found[:6])
            raise ValueError(
                f'{name} may be the gradient of any of {listed}: give gradients in a tree like '
                'that of the parameters'
            )
        return found[0]

    @functools.cached_property
    def _rows(self) -> dict[str, list[PlannedArray]]:
        """The arrays by the ends of their paths, those with the least before them first.

        The parameters of a module may be below others in the state: `0/kernel` of (module, ...).
        """
        rows = collections.defaultdict(list)
        for row in sorted(self.plan.arrays, key=lambda row: row.path.count('/')):
            for end in ends(tuple(row.path.split('/'))):
                rows[end].append(row)
        return dict(rows)


@dataclasses.dataclass(frozen=True)
class VariablePartitioner:
    """Lays out parameters, gradients and what the optimizer keeps, together.

    Usage:
      laid_out = VariablePartitioner(mesh).apply(state, {'emb': '4,1', 'w1': '1,4'})
      laid_out = VariablePartitioner(mesh).apply(state, PartitionedPS())

      @functools.partial(jax.jit, out_shardings=(laid_out.shardings, None), donate_argnums=0)
      def step(state, batch):
          loss, grads = jax.value_and_grad(objective)(state.params, batch)
          return state.apply_gradients(laid_out.shard_gradients(grads), tx), loss

      state, loss = step(laid_out.state, batch)

    Attributes:
      mesh: the mesh.
      mesh_axis: the mesh axis of what a `Strategy` splits, and of workers with rounding errors of
        their own; see `split_axis`. Planners have a setting of their own.
      on_unmatched, on_indivisible: as of `ShardingPlan.resolve`. 'pad' splits rows that an axis
        does not divide, inside functions of `PjitPartitioner.partition`.

    Raises:
      TypeError: no mesh.
    """

    mesh: Mesh
    mesh_axis: str | None = dataclasses.field(default=None, kw_only=True)
    on_unmatched: OnUnmatched | None = dataclasses.field(default=None, kw_only=True)
    on_indivisible: OnIndivisible | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(
                f'VariablePartitioner takes the mesh to lay out over, not {self.mesh!r}: '
                "create_mesh((4, 2), ('data', 'model')) makes one"
            )

    def apply(
        self,
        state: Any,
        config: Mapping[str, Any] | Strategy | ShardingPlanner | ShardingPlan | ResolvedPlan,
    ) -> PartitionedVariables:
        """Lays out a train state.

        Args:
          state: with its parameters in `params`, as attribute or key, of any optax chain; or
            parameters alone; or an nnx state. Of ShapeDtypeStructs the result has the shardings to
            make the arrays in: `jax.jit(init, out_shardings=laid_out.shardings)`.
          config: for a parameter, by its path, a PartitionerConfig or its text '1,4,1' ('' for a
            whole one), or what a ShardingPlan takes; or who decides for all of them.

        Raises:
          TypeError: a config that is none of these.
          ValueError: a path that does not exist, with the nearest ones; a layout that the mesh or
            an array cannot have; a Strategy for other parameters; a setting that has no say here.
        """
        params = unbox(_parameters_of(state))
        held = unbox(state)
        self._check_settings(config, bool(_error_arrays(held)))
        plan = self._resolve(params, config)
        resolved = plan.resolve_state(held, self.mesh)
        mesh_axes = self._split_errors(held, resolved.mesh_axes)
        shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, boundary_spec(spec)), mesh_axes, is_leaf=_is_spec
        )
        laid_out = jax.tree.map(_place, shardings, held)
        return PartitionedVariables(laid_out, mesh_axes, shardings, plan, self.mesh)

    def _resolve(self, params: Any, config: Any) -> ResolvedPlan:
        if isinstance(config, ResolvedPlan):
            return config
        if isinstance(config, Strategy):
            config.check_parameters(params)
            config = config.to_plan(self.mesh, self.mesh_axis)
        elif isinstance(config, ShardingPlanner):
            config = config.build_plan(params, self.mesh)
        elif isinstance(config, Mapping):
            config = ShardingPlan({name: _entry(name, x) for name, x in config.items()})
        if not isinstance(config, ShardingPlan):
            raise TypeError(
                f'{config!r} is neither a partitioner by path nor a Strategy, planner or plan'
            )
        return config.resolve(
            params,
            self.mesh,
            on_unmatched=self.on_unmatched,
            on_indivisible=self.on_indivisible,
        )

    def _check_settings(self, config: Any, has_errors: bool) -> None:
        """Raises ValueError for a setting that would be ignored."""
        kind = type(config).__name__
        if self.mesh_axis is not None and not isinstance(config, Strategy) and not has_errors:
            own = isinstance(config, AutoDistPlanner)
            raise ValueError(
                f'mesh_axis={self.mesh_axis!r} is for a Strategy, and for the errors of '
                f'compress_gradients, of which the state has none; a {kind} '
                + (f'has its own: {kind}(mesh_axis=...)' if own else 'says itself what is split')
            )
        policies = {'on_unmatched': self.on_unmatched, 'on_indivisible': self.on_indivisible}
        for name, policy in policies.items():
            if policy is not None and isinstance(config, ResolvedPlan):
                raise ValueError(
                    f'{name}={policy!r} decides nothing of a ResolvedPlan, where all is decided: '
                    f'resolve(..., {name}={policy!r}) makes it so'
                )

    def _split_errors(self, state: Any, mesh_axes: Any) -> Any:
        """The specs of a state, each worker's rounding errors at the worker."""
        workers = {error.shape[0] for error in _error_arrays(state)} - {1}
        if not workers:
            return mesh_axes
        axis = split_axis(self.mesh.shape, self.mesh_axis)
        if workers != {self.mesh.shape[axis]}:
            raise ValueError(
                f'the state has the rounding errors of {", ".join(map(str, sorted(workers)))} '
                f'workers, which are along {axis!r} of the mesh {describe_axes(self.mesh.shape)}: '
                'make it with compress_gradients(mesh=) of this mesh, or choose mesh_axis='
            )
        return compression_specs(state, axis, mesh_axes)


def _parameters_of(state: Any) -> Any:
    """What a planner lays out of a state, whose other arrays follow."""
    nnx = sys.modules.get('flax.nnx')  # nothing is an nnx state before that is imported
    if nnx is not None and isinstance(state, nnx.State):
        return nnx.filter_state(state, nnx.Param)
    return state['params'] if is_variables(state) else getattr(state, 'params', state)


def _error_arrays(state: Any) -> list[Any]:
    """The rounding errors that a state keeps."""
    held = jax.tree.leaves(state, is_leaf=is_compression_state)
    return jax.tree.leaves([x.error for x in held if isinstance(x, CompressionState)])


def _entry(name: str, entry: Any) -> Any:
    """An entry of a plan, of AutoDist's notation."""
    if not isinstance(entry, str):
        return entry
    try:
        return PartitionerConfig(partition_str=entry) if entry else PartitionSpec()
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from error


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec | PaddedSpec)


def _place(sharding: NamedSharding, held: Any) -> Any:
    """An array, also one in an nnx variable, laid out; of a ShapeDtypeStruct, such a one."""
    return jax.tree.map(lambda x: placed(x, sharding), held)
