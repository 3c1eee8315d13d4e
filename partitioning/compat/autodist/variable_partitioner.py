"""Train states and gradients laid out by AutoDist's configurations, strategies or planners."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.autodist.compression import is_compression_state
from partitioning.compat.autodist.planners import AutoDistPlanner
from partitioning.compat.autodist.splits import PartitionerConfig, split_axis
from partitioning.compat.autodist.strategy import Strategy
from partitioning.compat.pytorch.entries import placed
from partitioning.compat.pytorch.modules import ShardingPlan, ShardingPlanner
from partitioning.compat.pytorch.trees import is_variables
from partitioning.constraints import lay_out
from partitioning.plan import Plan, PlanRow, impose_plan, suffixes
from partitioning.rules import (
    OnIndivisible,
    OnUnmatched,
    PaddedSpec,
    as_tuple,
    describe_axes,
    from_tuple,
    nearest,
)
from partitioning.state import key_names, shape_of, unbox
from partitioning.state.boxes import is_carrier


@dataclasses.dataclass(frozen=True)
class VariablePartitioner:
    """Lays out a train state: the parameters, and the optimizer state like its parameters.

    Usage:
      state, plan = VariablePartitioner(mesh).apply(state, {'emb': '4,1', 'w1': '1,4'})
      state, plan = VariablePartitioner(mesh).apply(state, PartitionedPS())

      @functools.partial(jax.jit, out_shardings=(plan.shardings, None), donate_argnums=0)
      def step(state, batch):
          loss, grads = jax.value_and_grad(objective)(state.params, batch)
          return state.apply_gradients(shard_gradients(grads, plan), tx), loss

      state, loss = step(state, batch)

    Attributes:
      mesh: the mesh.
      mesh_axis: the mesh axis over which a `Strategy` splits variables, and along which workers
        with rounding errors are; see `split_axis`. Planners have their own `mesh_axis`.
      on_unmatched, on_indivisible: the policies of `ShardingPlan.resolve`. 'pad' splits rows that
        an axis does not divide, inside functions that `PjitPartitioner` partitions.
    """

    mesh: Mesh
    mesh_axis: str | None = dataclasses.field(default=None, kw_only=True)
    on_unmatched: OnUnmatched | None = dataclasses.field(default=None, kw_only=True)
    on_indivisible: OnIndivisible | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(
                f'mesh={self.mesh!r} must be a jax.sharding.Mesh, such as '
                "create_mesh((4, 2), ('data', 'model'))"
            )

    def apply(
        self,
        state: Any,
        config: Mapping[str, Any] | Strategy | ShardingPlanner | ShardingPlan | Plan,
    ) -> tuple[Any, Plan]:
        """Lays out a train state.

        Args:
          state: a train state with its parameters in the attribute or key `params` and the state of
            any optax chain; parameters alone; or an nnx state. ShapeDtypeStructs get shardings, in
            which `jax.jit(init, out_shardings=plan.shardings)` makes the arrays.
          config: a mapping from the path of a parameter to a PartitionerConfig, its text '1,4,1'
            ('' for a whole variable), or anything else that a ShardingPlan takes. Alternatively a
            strategy, planner or plan, which decides about all parameters.

        Raises:
          TypeError: if `config` is none of these.
          ValueError: if a path does not exist, if the mesh or an array cannot have a layout, if a
            Strategy is for other parameters, or if a setting would have no effect.
        """
        params = state['params'] if is_variables(state) else getattr(state, 'params', state)
        params, held = unbox(params), unbox(state)
        errors = _rounding_errors(held)
        self._check_settings(config, bool(errors))
        plan = impose_plan(self._resolve(params, config), held, self.mesh)
        plan = self._split_errors(plan, errors)

        def place(sharding: NamedSharding, below: Any) -> Any:  # an array, or an nnx variable
            return jax.tree.map(lambda x: placed(x, sharding), below)

        return jax.tree.map(place, plan.shardings, held), plan

    def _resolve(self, params: Any, config: Any) -> Plan:
        """The plan of the parameters, or the given one."""
        if isinstance(config, Plan):
            return config
        if isinstance(config, Strategy):
            config.check_parameters(params)
            config = config.to_plan(self.mesh, self.mesh_axis)
        elif isinstance(config, ShardingPlanner):
            config = config.build_plan(params, self.mesh)
        elif isinstance(config, Mapping):
            config = ShardingPlan({name: _entry(name, x) for name, x in config.items()})
        if not isinstance(config, ShardingPlan):
            raise TypeError(f'{config!r} must be partitioners by path, a Strategy, planner or plan')
        return config.resolve(params, self.mesh, **self._policies)

    def _check_settings(self, config: Any, has_errors: bool) -> None:
        """Raises ValueError for a setting that would be ignored."""
        kind = type(config).__name__
        if self.mesh_axis is not None and not isinstance(config, Strategy) and not has_errors:
            own = isinstance(config, AutoDistPlanner)
            raise ValueError(
                f'mesh_axis={self.mesh_axis!r} is only for a Strategy or for rounding errors: '
                f'{f"write {kind}(mesh_axis=...)" if own else f"a {kind} names its own axes"}'
            )
        for name, policy in self._policies.items():
            if policy is not None and isinstance(config, Plan):
                raise ValueError(
                    f'{name}={policy!r} has no effect on a Plan: write ShardingPlan.resolve(..., '
                    f'{name}={policy!r})'
                )

    @property
    def _policies(self) -> dict[str, Any]:
        return {'on_unmatched': self.on_unmatched, 'on_indivisible': self.on_indivisible}

    def _split_errors(self, plan: Plan, errors: Mapping[str, Any]) -> Plan:
        """The plan with the first dimension of all rounding errors over the axis of the workers."""
        workers = {error.shape[0] for error in errors.values()} - {1}
        if not workers:
            return plan
        axis = split_axis(self.mesh, self.mesh_axis)
        if workers != {self.mesh.shape[axis]}:
            raise ValueError(
                f'the state has rounding errors of {", ".join(map(str, sorted(workers)))} workers, '
                f'but the workers are along {axis!r} of the mesh {describe_axes(self.mesh)}: pass '
                'mesh= of this mesh to compress_gradients, or set mesh_axis='
            )
        specs = {path: _of_worker(plan[path].spec, axis) for path in errors}
        return plan.replace_specs(specs, 'the rounding errors of each worker')


def shard_gradients(grads: Any, plan: Plan) -> Any:
    """Lays out gradients like their parameters, inside a step: each device keeps its part.

    The gradients, of all parameters or of some, are in a tree like the parameters; the plan is of
    the state or of its parameters. A gradient is a ValueError if it belongs to no parameter of the
    plan, could belong to several, or has another shape.
    """
    rows = collections.defaultdict(list)  # by every suffix of the path, the shortest path first
    for row in sorted(plan.rows, key=lambda row: row.path.count('/')):
        if row.role == 'parameters':
            for end in suffixes(tuple(row.path.split('/'))):
                rows[end].append(row)
    mesh: Any = plan.mesh

    def shard(name: str, gradient: Any) -> Any:
        row, shape = _row_of(name.removeprefix('params/'), rows), shape_of(gradient)
        if row.shape != shape:
            raise ValueError(f'{name}: the gradient is {shape}, but its parameter {row.shape}')
        return lay_out(gradient, row.spec, mesh)

    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.tree.map(lambda g: shard('/'.join(key_names(path)), g), x),
        grads,
        is_leaf=is_carrier,
    )


def _row_of(name: str, rows: Mapping[str, list[PlanRow]]) -> PlanRow:
    """The row of the parameter whose path is this path or ends with it."""
    found = rows.get(name, [])
    if not found:
        raise ValueError(f'{name} does not belong to a parameter in the plan.{nearest(name, rows)}')
    # If both `0/kernel` and `0/sub/kernel` exist, the gradient `kernel` belongs to the first: the
    # second's gradient would be `sub/kernel`.
    roots = [row.path.removesuffix(name) for row in found]
    if not all(root.startswith(roots[0]) for root in roots):
        listed = ', '.join(row.path for row in found[:6])
        raise ValueError(
            f'{name} could be the gradient of any of {listed}: pass gradients in a tree like the '
            'parameters'
        )
    return found[0]


def _of_worker(spec: Any, axis: str) -> Any:
    """The spec of a rounding error that follows its parameter, with the workers along `axis`."""
    if isinstance(spec, PaddedSpec):
        outside, inside = _of_worker(spec.outside, axis), _of_worker(spec.inside, axis)
        return outside if outside == inside else PaddedSpec(outside, inside)
    # The parameter may use the axis of the workers, which the error cannot use twice.
    rest = (as_tuple(axes) for axes in tuple(spec)[1:])
    free = (from_tuple([a for a in axes if a != axis]) for axes in rest)
    return PartitionSpec(axis, *free)


def _rounding_errors(state: Any) -> dict[str, Any]:
    """The rounding errors of `compress_gradients` in a state, by path."""
    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_compression_state)
    return {
        '/'.join(key_names((*path, *below))): error
        for path, held in flat
        if is_compression_state(held)
        for below, error in jax.tree_util.tree_leaves_with_path(held)
    }


def _entry(name: str, entry: Any) -> Any:
    """An entry of a ShardingPlan for AutoDist's notation."""
    if not isinstance(entry, str):
        return entry
    try:
        return PartitionerConfig(partition_str=entry) if entry else PartitionSpec()
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from error
