"""A plan imposed on a state: each row is matched to its array, and the rest follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from partitioning.plan.building import PlanBuilder
from partitioning.plan.plan import Plan
from partitioning.plan.rows import PlanRow, dtype_name
from partitioning.rules import MeshLike, axis_sizes, describe_axes, nearest, raise_problem
from partitioning.state import Leaf, Path, shape_of, walk
from partitioning.state.boxes import Entry, flatten_state
from partitioning.state.naming import parameter_roots


def impose_plan(plan: Plan, state: Any, mesh: Mesh) -> Plan:
    """The plan of a state whose arrays another plan lays out.

    Args:
      plan: a plan of the whole state or only of its parameters.
      state: a pytree, abstract or not. Without rows for the optimizer's state,
        its layout follows the parameters.
      mesh: a mesh with the axes that the plan is for.

    Raises:
      ValueError: if the mesh, or the path, shape or dtype of an array differs from the plan.
    """
    check_mesh(plan, mesh)
    flat = flatten_state(state)
    rows = match_rows(flat.entries, plan.rows)
    named = {path: row.dimensions for path, row in rows.items() if row.role != 'optimizer'}
    tree = walk(flat, exact=named)
    given = {
        x.path: _at(x, rows[x.path]) for x in tree.leaves if isinstance(x, Leaf) and x.path in rows
    }
    return PlanBuilder(mesh, raise_problem).plan(tree, given=given)


def _at(leaf: Leaf, row: PlanRow) -> PlanRow:
    """The row of a leaf, whose path may be longer than in the plan."""
    dtype = dtype_name(leaf.array.dtype) if hasattr(leaf.array, 'dtype') else row.dtype
    return row._replace(path='/'.join(leaf.path), dtype=dtype)


def check_mesh(plan: Plan, mesh: MeshLike) -> None:
    """Raises ValueError unless the mesh has the axes that the plan is for, with their sizes."""
    if dict(axis_sizes(mesh)) != dict(axis_sizes(plan.mesh)):
        raise ValueError(
            f'the plan is for the mesh {describe_axes(plan.mesh)}, but the mesh is '
            f'{describe_axes(mesh)}: make the plan again for this mesh'
        )


def match_rows(entries: Sequence[Entry], rows: Sequence[PlanRow]) -> dict[Path, PlanRow]:
    """The row of each leaf of a state, whose paths may be longer than the paths of the plan.

    Args:
      entries: the leaves of the state.
      rows: the rows of a plan, which may have no rows for the optimizer's state.

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
    for path, _, array, shape, carrier in entries:
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
