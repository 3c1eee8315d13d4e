"""Which row of a plan is for which array of a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from partitioning.plan.rows import PlannedArray
from partitioning.rules import nearest
from partitioning.state import Path, shape_of
from partitioning.state.boxes import array_of, is_metadata
from partitioning.state.parameters import parameter_names


def rows_of(
    entries: Sequence[tuple[Path, Any]], rows: Sequence[PlannedArray]
) -> dict[Path, PlannedArray]:
    """The rows of the leaves of a state, whose paths may be longer than those of the plan.

    Args:
      entries: the leaves, in whatever carries their names, with their paths.
      rows: of a plan; without any of an optimizer what that keeps has none.

    Raises:
      ValueError: a parameter without a row, a row without its array, another shape or type.
    """
    left = {row.path: row for row in rows}
    by_end: dict[str, list[PlannedArray]] = {}
    for one in rows:
        whole = one.category == 'optimizer'  # other optimizers have trees of the same ends
        for end in [one.path] if whole else ends(tuple(one.path.split('/'))):
            by_end.setdefault(end, []).append(one)
    parameters = {*parameter_names(entries)}
    found: dict[Path, PlannedArray] = {}
    for path, leaf in entries:
        if is_metadata(leaf):
            continue
        array, name, is_parameter = array_of(leaf), '/'.join(path), path in parameters
        fitting = (
            row
            for end in ends(path)
            for row in by_end.get(end, ())
            # One of the two paths is the end of the other.
            if row.path in left
            and end in (name, row.path)
            and (row.category == 'parameters') == is_parameter
            and (row.category != 'optimizer' or row.path == name)
        )
        if (row := next(fitting, None)) is not None:
            _check_same(name, array, row)
            found[path] = left.pop(row.path)
        elif is_parameter and shape_of(array):
            known = [row.path for row in rows if row.category == 'parameters']
            raise ValueError(
                f'{name} is not in the plan.{nearest(name, known)} Resolve it again for these '
                'parameters'
            )
    alone = parameters >= {path for path, leaf in entries if not is_metadata(leaf)}
    absent = [row for row in left.values() if row.category == 'parameters' or not alone]
    if absent:
        arrays = f'{len(absent)} array{"s" if len(absent) > 1 else ""}'
        raise ValueError(
            f'{arrays} of the plan not there, {absent[0].path} first: resolve it again for this '
            'state, or for its parameters alone, which what an optimizer keeps then follows'
        )
    return found


def ends(path: Path) -> list[str]:
    """A path and what it ends in, the longest first."""
    return ['/'.join(path[n:]) for n in range(max(len(path), 1))]


def _check_same(name: str, array: Any, row: PlannedArray) -> None:
    """Raises ValueError for an array of another shape or type than its row."""
    if row.shape != shape_of(array):
        raise ValueError(
            f'{name} has shape {shape_of(array)}, but {row.shape} in the plan: resolve it again '
            'for these parameters'
        )
    dtype = getattr(array, 'dtype', None)
    if dtype is not None and _held(dtype) != _held(row.dtype):
        raise ValueError(
            f'{name} is {dtype}, but {row.dtype} in the plan, whose bytes are others: resolve it '
            'again for these parameters'
        )


def _held(dtype: Any) -> str:
    """A type as jax holds it, which may have fewer bits; of random keys, their own."""
    if str(dtype).startswith('key<'):
        return str(dtype)
    return str(jax.dtypes.canonicalize_dtype(dtype))
