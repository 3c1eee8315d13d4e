"""A train state with the rules applied: for each leaf its spec, and why."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.rules import (
    AxisRules,
    MeshLike,
    PaddedSpec,
    Problem,
    Report,
    ResolvedDimension,
    axis_sizes,
    boundary_spec,
    describe_axes,
    raise_problem,
    to_spec,
    try_resolve,
)
from partitioning.state.boxes import nbytes
from partitioning.state.follow import Parameter
from partitioning.state.path_names import PathRules
from partitioning.state.traversal import Leaf, Role, StateTree, walk

# An array of no more bytes that has no names and follows no parameter needs none: random keys,
# hyperparameters, statistics of a few thousand channels. The audit lists it all the same.
SMALL = 16 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSet:
    """What a partitioner knows about layouts.

    Attributes:
      rules: logical axis rules.
      optimizer_rules: those for what the optimizer keeps; None: `rules`.
      overrides: path rules that name parameters.
    """

    rules: AxisRules
    optimizer_rules: AxisRules | None = None
    overrides: PathRules = ()

    def of(self, role: Role) -> AxisRules:
        """The rules for leaves of a role."""
        if role == 'optimizer' and self.optimizer_rules is not None:
            return self.optimizer_rules
        return self.rules


class ResolvedLeaf(NamedTuple):
    """One array of a state and its layout.

    Attributes:
      leaf: the array and where it has its axes from.
      spec: its PartitionSpec, a PaddedSpec, or None where its state names no axes for it.
      dimensions: the reason for each dimension; of one that no parameter has, none.
    """

    leaf: Leaf
    spec: Any
    dimensions: tuple[ResolvedDimension | None, ...]


@dataclasses.dataclass(frozen=True)
class ResolvedState(StateTree[ResolvedLeaf]):
    """A state with the rules applied, on a mesh."""

    mesh: Mesh

    @property
    def mesh_axes(self) -> Any:
        """The state with PartitionSpecs for leaves."""
        return self.map(lambda x: x.spec)

    @property
    def logical_axes(self) -> Any:
        """The state with AxisNames for leaves."""
        return self.map(lambda x: x.leaf.names)

    @property
    def shardings(self) -> Any:
        """The state with NamedShardings for leaves."""
        sharding = functools.cache(functools.partial(NamedSharding, self.mesh))
        return self.map(lambda x: sharding(boundary_spec(x.spec) or PartitionSpec()))


def resolve_state(state: Any, rules: RuleSet, mesh: Mesh) -> ResolvedState:
    """Applies rules to a train state, in one walk of it.

    Args:
      state: a pytree, abstract or not; see `partitioning.state.traversal.walk`.
      rules: the rules and policies.
      mesh: the mesh.

    Raises:
      ValueError: with the path of the first array whose layout the rules do not decide.
    """
    tree = resolve_leaves(state, rules, mesh)
    return ResolvedState(tree.leaves, tree.treedef, mesh)


def resolve_leaves(
    state: Any, rules: RuleSet, mesh: MeshLike, report: Report = raise_problem
) -> StateTree[ResolvedLeaf]:
    """The leaves of a state with their layouts, and the tree they make.

    Args:
      state, rules, mesh: as of `resolve_state`; of the mesh, the sizes of its axes do.
      report: is told of every problem; by default it raises.
    """
    tree = walk(state, rules.overrides, report)
    known: dict[Any, _Layout] = {}

    def resolve(leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        parameter = leaf.parameter
        if parameter is None:
            if (problem := _too_large(leaf, mesh)) is not None:
                report('/'.join(leaf.path), problem)
            spec = None if leaf.said_none else _replicated(len(leaf.dims))
            return ResolvedLeaf(leaf, spec, (None,) * len(leaf.dims))
        of = (parameter[1:], leaf.role == 'optimizer', leaf.dims)
        if of not in known:
            known[of] = _layout(leaf, parameter, rules, mesh)
        layout = known[of]
        for problem in layout.problems:
            report('/'.join(parameter.path), problem)
        return ResolvedLeaf(leaf, layout.spec, layout.dimensions)

    return StateTree(tuple(map(resolve, tree.leaves)), tree.treedef)


class _Layout(NamedTuple):
    spec: Any
    dimensions: tuple[ResolvedDimension | None, ...]
    problems: tuple[Problem, ...]


@functools.cache
def _replicated(rank: int) -> PartitionSpec:
    return PartitionSpec(*[None] * rank)


_NO_DIMENSION = ResolvedDimension(None, None, None, (), 'no dimension of a parameter')


def _layout(leaf: Leaf, parameter: Parameter, rules: RuleSet, mesh: MeshLike) -> _Layout:
    """The spec of a leaf, out of that of its parameter.

    Names resolved apart from the others could win mesh axes that the parameter has elsewhere.
    """
    of_role = rules.of(leaf.role)
    if parameter.rules:
        of_role = of_role.with_rules((*parameter.rules, *of_role))
    resolved, problems = try_resolve(
        parameter.names,
        of_role,
        mesh=mesh,
        shape=parameter.shape,
        axes_as_names=parameter.axes_as_names,
    )
    if parameter.mesh is not None and dict(parameter.mesh.shape) != dict(axis_sizes(mesh)):
        message = (
            f'its names are for the mesh {describe_axes(parameter.mesh.shape)}, but this one is '
            f'{describe_axes(axis_sizes(mesh))}'
        )
        problems = (*problems, Problem('conflict', message))
    if leaf.role == 'optimizer' and rules.optimizer_rules is not None:
        note = ' (by optimizer_axis_rules)'
        problems = tuple(p._replace(message=p.message + note) for p in problems)
    dimensions = leaf.pick(resolved)
    if problems:
        return _Layout(_replicated(len(leaf.dims)), dimensions, problems)
    spec = to_spec([_NO_DIMENSION if d is None else d for d in dimensions])
    if isinstance(spec, PaddedSpec) and AxisType.Explicit in getattr(mesh, 'axis_types', ()):
        message = "on_indivisible='pad' needs Auto mesh axes, not Explicit ones: choose 'drop_axis'"
        problems = (Problem('policy', message),)
    return _Layout(spec, dimensions, problems)


def _too_large(leaf: Leaf, mesh: MeshLike) -> Problem | None:
    """Nothing of size is replicated without a word: what follows no parameter needs names."""
    if leaf.said_none or leaf.problematic or leaf.array is None or nbytes(leaf.array) <= SMALL:
        return None
    sizes = axis_sizes(mesh)
    shape = tuple(leaf.array.shape)
    return Problem(
        'names',
        f'Missing axis names: this array of shape {shape} has none and follows no parameter, so '
        f'all of its {nbytes(leaf.array):,} bytes would be on each of the '
        f'{math.prod(sizes.values())} devices ({describe_axes(sizes)}). Name it: put it in a '
        f"flax.linen.LogicallyPartitioned, or add ('{'/'.join(leaf.path)}', {(None,) * len(shape)})"
        ' to params_axes_names_override to replicate it',
    )
