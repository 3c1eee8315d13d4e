"""The rows of a plan, made of the leaves of a state; and a plan that is imposed on a state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from partitioning.plan.layouts import RuleSet
from partitioning.plan.plan import Plan, Unplanned
from partitioning.plan.rows import (
    NO_NAMES,
    NOT_OF_PARAMETER,
    Decision,
    PlanRow,
    dtype_name,
    make_row,
    without_name,
)
from partitioning.rules import (
    MeshLike,
    Problem,
    Report,
    ResolvedDimension,
    axis_sizes,
    definite_problems,
    describe_axes,
    nearest,
    padding_problems,
    raise_problem,
    to_spec,
)
from partitioning.state import Leaf, Parameter, Path, Role, shape_of, walk
from partitioning.state.boxes import Entry, flatten_state
from partitioning.state.naming import parameter_roots
from partitioning.state.traversal import StateTree

_Followed = tuple[PlanRow | Unplanned, Sequence[Problem]]
_NOT_OF_PARAMETER = without_name(NOT_OF_PARAMETER)


@dataclasses.dataclass(kw_only=True)
class PlanBuilder:
    """Makes the rows of one plan; arrays that share a layout are laid out once.

    Subclasses decide about parameters and about arrays that follow none. By default, the names of a
    parameter are its dimensions, as in a walk with `exact`, and other arrays are replicated.
    `report` receives every problem. `covered` are rows of arrays inside a subtree without names.
    """

    mesh: MeshLike
    report: Report
    covered: list[PlanRow] = dataclasses.field(default_factory=list)
    _followed: dict[Any, _Followed] = dataclasses.field(default_factory=dict)
    _rows: dict[Any, PlanRow] = dataclasses.field(default_factory=dict)

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

    def _follow(self, leaf: Leaf, parameter: Parameter) -> _Followed:
        """The entry of a leaf, taken from the layout of its parameter.

        If its names were resolved separately, they could get mesh axes that the parameter uses for
        other dimensions.
        """
        resolved, found = self.resolve(leaf.role, parameter)
        dimensions = leaf.pick(resolved, _NOT_OF_PARAMETER)
        spec = PartitionSpec(*[d.mesh_axes for d in dimensions])
        problems = [*found, *definite_problems(spec)]
        if 'pad' in [d.policy for d in dimensions]:
            problems += padding_problems(self.mesh)
        if problems:
            rank = len(dimensions) if leaf.array is None else len(shape_of(leaf.array))
            dimensions = (*dimensions, *[_NOT_OF_PARAMETER] * rank)[:rank]
            dimensions = tuple(
                dataclasses.replace(d, mesh_axes=None, policy=None) for d in dimensions
            )
        if leaf.array is None:
            return Unplanned(leaf.names, to_spec(dimensions)), problems
        row = make_row('/'.join(leaf.path), leaf.array, self.mesh, dimensions, leaf.role)
        return row, problems


def is_array(x: Any) -> bool:
    """Whether a leaf is an array or a number, and not a string or a function."""
    return hasattr(x, 'dtype') or isinstance(x, complex | float | int)


def impose_plan(plan: Plan, state: Any, mesh: Mesh) -> Plan:
    """The plan of a state that is laid out by another plan.

    The other plan may have rows for the parameters only. The optimizer's state then follows them.

    Raises:
      ValueError: if the mesh, or the path, shape or dtype of an array differs from the plan.
    """
    check_mesh(plan, mesh)
    flat = flatten_state(state)
    rows = match_rows(flat.entries, plan.rows)
    named = {path: row.dimensions for path, row in rows.items() if row.role != 'optimizer'}
    tree = walk(flat, exact=named)
    given = {}
    for x in tree.leaves:
        if isinstance(x, Leaf) and x.path in rows:  # its path may be longer than in the plan
            row = rows[x.path]
            dtype = dtype_name(x.array.dtype) if hasattr(x.array, 'dtype') else row.dtype
            given[x.path] = row._replace(path='/'.join(x.path), dtype=dtype)
    return PlanBuilder(mesh=mesh, report=raise_problem).plan(tree, given=given)


def check_mesh(plan: Plan, mesh: MeshLike) -> None:
    """Raises ValueError unless the mesh has the axes that the plan is for, with their sizes."""
    if dict(axis_sizes(mesh)) != dict(axis_sizes(plan.mesh)):
        raise ValueError(
            f'the plan is for the mesh {describe_axes(plan.mesh)}, but the mesh is '
            f'{describe_axes(mesh)}: make the plan again for this mesh'
        )


def match_rows(entries: Sequence[Entry], rows: Sequence[PlanRow]) -> dict[Path, PlanRow]:
    """The row of each leaf of a state, whose paths may be longer than the paths of the plan.

    Raises:
      ValueError: if a parameter has no row, a row has no array, or a shape or dtype differs.
    """
    left = {row.path: row for row in rows}
    by_suffix: dict[str, list[PlanRow]] = {}
    for one in rows:
        whole = one.role == 'optimizer'  # other optimizers have trees with the same suffixes
        for suffix in [one.path] if whole else suffixes(tuple(one.path.split('/'))):
            by_suffix.setdefault(suffix, []).append(one)
    parameters = parameter_roots(entries).keys()
    found: dict[Path, PlanRow] = {}
    for path, _, array, shape, carrier, _ in entries:
        if carrier == 'metadata':
            continue
        name, is_parameter = '/'.join(path), path in parameters
        fitting = (
            row
            for suffix in suffixes(path)
            for row in by_suffix.get(suffix, ())
            # One of the two paths is a suffix of the other.
            if row.path in left
            and suffix in (name, row.path)
            and (row.role == 'parameters') == is_parameter
            and (row.role != 'optimizer' or row.path == name)
        )
        if (row := next(fitting, None)) is not None:
            _check_same(name, array, row)
            found[path] = left.pop(row.path)
        elif is_parameter and shape:
            known = [row.path for row in rows if row.role == 'parameters']
            raise ValueError(
                f'{name} is not in the plan.{nearest(name, known)} Make the plan again for these '
                'parameters'
            )
    alone = parameters >= {entry.path for entry in entries if entry.carrier != 'metadata'}
    absent = [row for row in left.values() if row.role == 'parameters' or not alone]
    if absent:
        plural = 's' if len(absent) > 1 else ''
        raise ValueError(
            f'the state lacks {len(absent)} array{plural} of the plan, first {absent[0].path}: '
            'make a plan for this state, or a plan for its parameters only, which fits every '
            'optimizer'
        )
    return found


def suffixes(path: Path) -> list[str]:
    """A path and all its suffixes, the longest first."""
    return ['/'.join(path[n:]) for n in range(max(len(path), 1))]


def _check_same(name: str, array: Any, row: PlanRow) -> None:
    """Raises ValueError if an array has another shape or dtype than its row."""
    if row.shape != shape_of(array):
        raise ValueError(
            f'{name} has shape {shape_of(array)}, but {row.shape} in the plan: make the plan again '
            'for these parameters'
        )
    dtype = getattr(array, 'dtype', None)
    if dtype is not None and _canonical(dtype) != _canonical(row.dtype):
        raise ValueError(
            f'{name} has dtype {dtype}, but {row.dtype} in the plan: make the plan again for these '
            'parameters'
        )


def _canonical(dtype: Any) -> str:
    """The dtype that jax uses for it, possibly with fewer bits. Random keys keep theirs."""
    if str(dtype).startswith('key<'):
        return str(dtype)
    return str(jax.dtypes.canonicalize_dtype(dtype))
