"""A plan imposed on a state: each row is matched to its array, and the rest follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from partitioning.plan.plan import Plan, Unplanned
from partitioning.plan.rows import (
    NO_NAMES,
    NOT_OF_PARAMETER,
    PlanRow,
    dtype_name,
    make_row,
    without_name,
)
from partitioning.rules import MeshLike, axis_sizes, describe_axes, nearest
from partitioning.state import Leaf, Path, shape_of, walk
from partitioning.state.boxes import array_of, is_carrier, is_metadata, key_names
from partitioning.state.naming import parameter_roots
from partitioning.state.traversal import StateTree


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
    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_carrier)
    rows = match_rows([(key_names(path), x) for path, x in flat], plan.rows)
    named = {path: row.dimensions for path, row in rows.items() if row.role != 'optimizer'}
    tree = walk(state, exact=named)
    entries = tuple(x if is_metadata(x) else _entry(x, rows, mesh) for x in tree.leaves)
    made = tuple(x for x in entries if isinstance(x, PlanRow))
    return Plan(mesh, made, tree=StateTree(entries, tree.treedef))


def check_mesh(plan: Plan, mesh: MeshLike) -> None:
    """Raises ValueError unless the mesh has the axes that the plan is for, with their sizes."""
    if dict(axis_sizes(mesh)) != dict(axis_sizes(plan.mesh)):
        raise ValueError(
            f'the plan is for the mesh {describe_axes(plan.mesh)}, but the mesh is '
            f'{describe_axes(mesh)}: make the plan again for this mesh'
        )


def _entry(leaf: Leaf, rows: Mapping[Path, PlanRow], mesh: Mesh) -> PlanRow | Unplanned:
    """The row of a leaf: its own in the plan, or one that follows from its parameter."""
    path, row = '/'.join(leaf.path), rows.get(leaf.path)
    if row is not None:
        dtype = dtype_name(leaf.array.dtype) if hasattr(leaf.array, 'dtype') else row.dtype
        return row._replace(path=path, dtype=dtype)
    if leaf.parameter is None:
        dimensions = [without_name(NO_NAMES)] * len(shape_of(leaf.array))
    else:
        picked = leaf.pick(leaf.parameter.names)
        dimensions = [without_name(NOT_OF_PARAMETER) if d is None else d for d in picked]
    return make_row(path, leaf.array, mesh, dimensions, leaf.role)


def match_rows(entries: Sequence[tuple[Path, Any]], rows: Sequence[PlanRow]) -> dict[Path, PlanRow]:
    """The row of each leaf of a state, whose paths may be longer than those of the plan.

    Args:
      entries: the leaves with their paths; each carrier of names is one leaf.
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
    for path, leaf in entries:
        if is_metadata(leaf):
            continue
        array, name, is_parameter = array_of(leaf), '/'.join(path), path in parameters
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
        elif is_parameter and shape_of(array):
            known = [row.path for row in rows if row.role == 'parameters']
            raise ValueError(
                f'{name} is not in the plan.{nearest(name, known)} Make the plan again for these '
                'parameters'
            )
    alone = parameters >= {path for path, leaf in entries if not is_metadata(leaf)}
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
