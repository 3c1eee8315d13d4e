"""PyTorch's words: what a plan says, who makes one, and what it comes to on a mesh."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.plans.resolved import ResolvedPlan
from partitioning.plans.rows import PlannedArray, planned_array, reason_of
from partitioning.plans.trees import (
    is_nnx_module,
    parameters,
    replace_subtree,
    split_path,
    subtree,
)
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    OnIndivisible,
    OnUnmatched,
    as_tuple,
    check_spec,
    describe_axes,
    to_spec,
    try_resolve,
)
from partitioning.state import Path, nbytes, shape_of
from partitioning.state.boxes import array_of, carried_names, is_carrier
from partitioning.state.resolved import SMALL


class Sharder(abc.ABC):
    """Lays out all of a module by a rule of its own.

    Usage:
      class FirstRowsThenColumns(Sharder):
          def shard(self, module, mesh):
              specs = {'bag_0': P('model'), 'bag_1': P(None, 'model')}
              return {name: place(bag, mesh, specs[name]) for name, bag in module.items()}
    """

    @abc.abstractmethod
    def shard(self, module: Any, mesh: Mesh) -> Any:
        """The module with its arrays laid out.

        Args:
          module: the subtree of parameters below the path, arrays or ShapeDtypeStructs; of an nnx
            module, the submodule.
          mesh: the mesh.

        Returns:
          What takes the place of `module`, of another structure if that is wanted. Each array has
          the NamedSharding it is to have: `place` gives it one. Arrays without one on the mesh are
          like those that a plan does not name.
        """


class ShardingPlanner(abc.ABC):
    """Makes a plan for a model and a mesh."""

    @abc.abstractmethod
    def build_plan(self, module: Any, mesh: Mesh) -> ShardingPlan:
        """The plan.

        Args:
          module: parameters, abstract or not: a pytree, linen variables, or an nnx module;
            `parameters(module)` are their arrays by path.
          mesh: the mesh.
        """


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """How a model is laid out: by parameter or module, and the outputs of modules.

    Nothing is checked before it is resolved.

    Usage:
      plan = ShardingPlan(
          {'fc1/kernel': P(None, 'model'), 'fc2/kernel': ('mlp', 'embed'), 'tables': MySharder()},
          output_plan={'fc2': P('data')})
      params = shard_module(params, plan, mesh)
      print(plan.resolve(jax.eval_shape(model.init, key, x), mesh))

    Attributes:
      plan: for a parameter, by its path with '/' or '.' between the keys, its PartitionSpec, its
        logical names (a tuple), a NamedSharding, or anything with `to_partition_spec(mesh, shape)`,
        such as a PartitionerConfig; for a parameter or a module, a Sharder.
      output_plan: for a module, by its path ('' is the whole model), the layout of its output; see
        `constrain_outputs`.
      return_local_tensor: modules of `output_plan` whose outputs each process reads its own rows
        of. They stay global arrays of their global shape; `partitioner.to_local` returns the rows.
    """

    plan: Mapping[str, Any]
    output_plan: Mapping[str, Any] | None = None
    return_local_tensor: Sequence[str] | None = None

    def resolve(
        self,
        module: Any,
        mesh: Mesh,
        rules: LogicalAxisRules | None = None,
        *,
        on_unmatched: OnUnmatched | None = None,
        on_indivisible: OnIndivisible | None = None,
    ) -> ResolvedPlan:
        """What the plan comes to, array by array.

        Args:
          module: parameters, abstract or not; see `ShardingPlanner.build_plan`.
          mesh: the mesh.
          rules: for logical names, in the plan and of parameters that it does not name. A name may
            be a mesh axis.
          on_unmatched: of names without a rule, and of parameters above 16 KiB that nothing names:
            'error', or 'replicate'.
          on_indivisible: of sizes that their mesh axes do not divide; see `resolve_axes`.

        Raises:
          TypeError: an entry that is no layout.
          ValueError: a path that does not exist, with the nearest ones; entries for the same
            array; a layout that the mesh or the array cannot have.
        """
        copied = module
        if is_nnx_module(module) and any(isinstance(x, Sharder) for x in self.plan.values()):
            from flax import nnx  # imported already, or there would be no such module

            copied = nnx.clone(module)
        planned = apply_sharders(self, copied, mesh)
        return planned.resolve(mesh, AxisRules(rules or (), on_unmatched, on_indivisible))


class Planned(NamedTuple):
    """A model after the Sharders of a plan, and what the plan says of its arrays.

    Attributes:
      module: the model, with what the Sharders have returned in it.
      entries: by path, the entry of each array, and whose it is.
    """

    module: Any
    entries: dict[Path, tuple[Any, str]]

    def resolve(self, mesh: Mesh, policies: AxisRules) -> ResolvedPlan:
        """What that comes to; see `ShardingPlan.resolve`."""
        rows = (
            _row(path, leaf, self.entries.get(path), policies, mesh)
            for path, leaf in parameters(self.module).items()
        )
        return ResolvedPlan(mesh.shape, tuple(rows))


def place(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Arrays laid out over a mesh; of ShapeDtypeStructs, such with that sharding."""
    sharding = NamedSharding(mesh, spec)

    def one(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map(one, tree)


def apply_sharders(plan: ShardingPlan, module: Any, mesh: Mesh) -> Planned:
    """The model with the Sharders of a plan applied; an nnx module is changed in place.

    Raises:
      TypeError, ValueError: as `ShardingPlan.resolve`, for everything but the layouts themselves.
    """
    if not isinstance(plan, ShardingPlan):
        raise TypeError(f'{plan!r} is no ShardingPlan')
    for name, spec in (plan.output_plan or {}).items():
        check_output(name, spec)
    known = parameters(module)
    found: dict[Path, str] = {}
    for name, entry in plan.plan.items():
        _check_entry(name, entry)
        path = split_path(name, known)
        if path not in known and not isinstance(entry, Sharder):
            below = ', '.join('/'.join(p) for p in known if p[: len(path)] == path)
            raise ValueError(f'{name!r} is a module; a layout is for one parameter of it: {below}')
        _check_apart(path, name, found)
        found[path] = name
    entries: dict[Path, tuple[Any, str]] = {}
    prefix = ('params',) if isinstance(module, Mapping) and 'params' in module else ()
    for path, name in found.items():
        entry = plan.plan[name]
        if not isinstance(entry, Sharder):
            entries[path] = (entry, 'the plan')
            continue
        made = entry.shard(subtree(module, (*prefix, *path)), mesh)
        module = replace_subtree(module, (*prefix, *path), made)
        for deeper, leaf in parameters(module).items():
            sharding = getattr(array_of(leaf), 'sharding', None)
            if deeper[: len(path)] == path and _is_on(sharding, mesh):
                entries[deeper] = (sharding, type(entry).__name__)
    return Planned(module, entries)


def check_output(name: str, spec: Any) -> None:
    """Raises TypeError for what is no layout of an output."""
    if not isinstance(spec, PartitionSpec | NamedSharding) and not _are_names(spec):
        raise TypeError(
            f'Only a PartitionSpec, logical names or a NamedSharding is supported as output_plan '
            f'for {name!r}, not {spec!r}'
        )


def _check_entry(name: str, entry: Any) -> None:
    layout = isinstance(entry, PartitionSpec | NamedSharding | Sharder) or _are_names(entry)
    if not layout and not hasattr(entry, 'to_partition_spec'):
        raise TypeError(
            f'Only a PartitionSpec, logical names, a NamedSharding or a Sharder is supported to '
            f'shard {name!r}, not {type(entry).__name__} {entry!r}'
        )
    if not name:
        raise ValueError(
            "'' is no path: a Sharder is for a module or parameter below the top, such as 'decoder'"
        )


def _are_names(entry: Any) -> bool:
    """Whether an entry has a logical name, mesh axes or None for each dimension."""
    return isinstance(entry, tuple | list) and all(
        name is None or isinstance(name, str | tuple) for name in entry
    )


def _check_apart(path: Path, name: str, found: Mapping[Path, str]) -> None:
    """Raises ValueError where another entry is for the same arrays."""
    for other, called in found.items():
        shared = min(len(path), len(other))
        if path[:shared] == other[:shared]:
            both = 'both are the same array' if path == other else 'one is within the other'
            raise ValueError(
                f'the plan has {called!r} and {name!r}, of which only one can be: {both}'
            )


def _is_on(sharding: Any, mesh: Mesh) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape


def _row(
    path: Path, leaf: Any, entry: tuple[Any, str] | None, policies: AxisRules, mesh: Mesh
) -> PlannedArray:
    """The row of one array, laid out by its entry, by the names it carries, or not at all."""
    name, array = '/'.join(path), array_of(leaf)
    shape = shape_of(array)
    carried = carried_names(leaf).names if is_carrier(leaf) else None
    if entry is None and policies and carried is not None:
        entry = (carried, 'the parameter')
    if entry is None:
        _check_small(name, array, mesh, policies.on_unmatched)
        names, reason = (None,) * len(shape), 'not in the plan, so replicated'
    else:
        names, reason = _names(name, entry[0], shape, mesh), f'{entry[1]} says so'
    dimensions, problems = try_resolve(names, policies, mesh=mesh, shape=shape, axes_as_names=True)
    if problems:
        raise ValueError(f'{name}: {problems[0].message}')
    if any(d.policy or isinstance(d.name, str) for d in dimensions):
        reason = reason_of(dimensions)
    logical = [n if isinstance(n, str) else None for n in names]
    return planned_array(
        name,
        array,
        to_spec(dimensions),
        mesh,
        logical_axes=logical if any(logical) else None,
        reason=reason,
    )


def _names(path: str, entry: Any, shape: Sequence[int], mesh: Mesh) -> tuple[Any, ...]:
    """What an entry says of each dimension: a name, a tuple of mesh axes, or None."""
    if isinstance(entry, NamedSharding):
        if entry.mesh.shape != mesh.shape:
            raise ValueError(
                f'{path}: its NamedSharding is for the mesh {describe_axes(entry.mesh.shape)}, but '
                f'this one is {describe_axes(mesh.shape)}'
            )
        entry = entry.spec
    elif hasattr(entry, 'to_partition_spec'):
        try:
            entry = entry.to_partition_spec(mesh, shape)
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from error
    if not isinstance(entry, PartitionSpec):
        return tuple(entry)
    if PartitionSpec.UNCONSTRAINED in tuple(entry):
        raise ValueError(f'{path}: {entry} decides nothing for some dimension: write None or axes')
    check_spec(entry, mesh, path, shape)
    partitions = [*entry, *[None] * (len(shape) - len(entry))]
    return tuple(as_tuple(axes) or None for axes in partitions)


def _check_small(name: str, array: Any, mesh: Mesh, on_unmatched: OnUnmatched) -> None:
    """Nothing of size is replicated without a word."""
    if nbytes(array) > SMALL and on_unmatched == 'error':
        shape = shape_of(array)
        raise ValueError(
            f'{name} of shape {shape} is not in the plan, so all of its {nbytes(array):,} bytes '
            f'would be on each of the {mesh.size} devices ({describe_axes(mesh.shape)}). Add '
            f"'{name}': P(...), with P() to mean it, or on_unmatched='replicate'"
        )
