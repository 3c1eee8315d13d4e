"""The rows of a plan, made of the leaves of a state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.plan.layouts import RuleSet
from partitioning.plan.plan import Plan, Unplanned
from partitioning.plan.rows import (
    NO_NAMES,
    NOT_OF_PARAMETER,
    Decision,
    PlanRow,
    make_row,
    without_name,
)
from partitioning.rules import (
    MeshLike,
    Problem,
    Report,
    ResolvedDimension,
    definite_problems,
    padding_problems,
    to_spec,
)
from partitioning.state import Leaf, Parameter, Path, Role, shape_of
from partitioning.state.traversal import StateTree


class PlanBuilder:
    """Makes the rows of one plan; arrays that share a layout are laid out once.

    Subclasses decide about parameters and about arrays that follow none. By default, the names of a
    parameter are its dimensions, as in a walk with `exact`, and other arrays are replicated.

    Args:
      mesh: the mesh, or the sizes of its axes.
      report: receives every problem.
    """

    def __init__(self, mesh: MeshLike, report: Report):
        self.mesh, self.report = mesh, report
        self.covered: list[PlanRow] = []  # rows of arrays inside a subtree without names
        self._followed: dict[Any, tuple[PlanRow | Unplanned, Sequence[Problem]]] = {}
        self._rows: dict[Any, PlanRow] = {}

    def resolve(self, role: Role, parameter: Parameter) -> Decision:
        """The dimensions of a parameter, for the arrays of a role that follow it."""
        return parameter.names, ()

    def nameless(self, leaf: Leaf) -> PlanRow | Unplanned:
        """The row of an array that follows no parameter."""
        return self.replicated(leaf.path, leaf.array, leaf.role, NO_NAMES)

    def plan(
        self,
        tree: StateTree[Leaf],
        rules: RuleSet | None = None,
        given: Mapping[Path, PlanRow] = MappingProxyType({}),
    ) -> Plan:
        """The plan of a state that `walk` has read, in which some rows may be given."""
        entries = tuple(
            (given.get(x.path) or self._entry(x)) if isinstance(x, Leaf) else x for x in tree.leaves
        )
        rows = [x for x in entries if isinstance(x, PlanRow)] + self.covered
        tree_of_rows = StateTree(entries, tree.treedef)
        return Plan(self.mesh, tuple(rows), tree=tree_of_rows, rules=rules)

    def row(
        self, path: Path, array: Any, role: Role, dimensions: Sequence[ResolvedDimension]
    ) -> PlanRow:
        """The row of an array with these dimensions."""
        key = (shape_of(array), getattr(array, 'dtype', type(array)), role, tuple(dimensions))
        if (row := self._rows.get(key)) is None:
            row = self._rows[key] = make_row('/'.join(path), array, self.mesh, dimensions, role)
        return PlanRow('/'.join(path), *row[1:])

    def replicated(self, path: Path, array: Any, role: Role, reason: str) -> PlanRow:
        """The row of an array that every device holds whole."""
        return self.row(path, array, role, (without_name(reason),) * len(shape_of(array)))

    def _entry(self, leaf: Leaf) -> PlanRow | Unplanned:
        if leaf.parameter is None:
            if leaf.said_none or is_array(leaf.array):
                return self.nameless(leaf)
            return Unplanned(leaf.names, PartitionSpec())  # a string or a function
        shape = getattr(leaf.array, 'shape', None)
        dtype = getattr(leaf.array, 'dtype', type(leaf.array))
        key = (leaf.parameter[1:], leaf.role, leaf.dims, shape, dtype)
        if (known := self._followed.get(key)) is None:
            known = self._followed[key] = self._follow(leaf, leaf.parameter)
        entry, problems = known
        for problem in problems:
            self.report('/'.join(leaf.parameter.path), problem)
        return entry if type(entry) is Unplanned else PlanRow('/'.join(leaf.path), *entry[1:])

    def _follow(
        self, leaf: Leaf, parameter: Parameter
    ) -> tuple[PlanRow | Unplanned, Sequence[Problem]]:
        """The entry of a leaf, taken from the layout of its parameter.

        If its names were resolved separately, they could get mesh axes that the parameter uses for
        other dimensions.
        """
        resolved, found = self.resolve(leaf.role, parameter)
        nothing = without_name(NOT_OF_PARAMETER)
        dimensions = [nothing if d is None else d for d in leaf.pick(resolved)]
        spec = PartitionSpec(*(d.mesh_axes for d in dimensions))
        problems = [*found, *definite_problems(spec)]
        if any(d.policy == 'pad' for d in dimensions):
            problems += padding_problems(self.mesh)
        if problems:
            rank = len(dimensions) if leaf.array is None else len(shape_of(leaf.array))
            dimensions = [*dimensions, *[nothing] * rank][:rank]
            dimensions = [dataclasses.replace(d, mesh_axes=None, policy=None) for d in dimensions]
        if leaf.array is None:
            return Unplanned(leaf.names, to_spec(dimensions)), problems
        row = make_row('/'.join(leaf.path), leaf.array, self.mesh, dimensions, leaf.role)
        return row, problems


def is_array(x: Any) -> bool:
    """Whether a leaf is an array or a number, and not a string or a function."""
    return hasattr(x, 'dtype') or isinstance(x, complex | float | int)
