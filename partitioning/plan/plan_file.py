"""The file format of plans: JSON with a line for each array, in the order of their paths.

    {"format": "sharding plan 1",
     "mesh": {"data": 4, "model": 2},
     "arrays": [
      {"path": "fc1/kernel", "shape": [16, 64], "dtype": "float32", "logical_axes": null,
       "spec": [null, "model"], "padded_spec": null, "shard_shape": [16, 32], "bytes_total": 4096,
       "bytes_per_device": 2048, "category": "parameters", "reason": "the plan says so"}
     ]}

Equal plans are equal files, so that version control shows what has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.plan.resolved import ResolvedPlan
from partitioning.plan.rows import PlannedArray, planned_array
from partitioning.rules import PaddedSpec, is_count, nearest
from partitioning.state import Role

FORMAT = 'sharding plan 1'
_FIELDS = tuple(field.name for field in dataclasses.fields(PlannedArray))


def to_json(plan: ResolvedPlan) -> str:
    """A plan as the text of a file; see the format above."""
    rows = ',\n'.join(f'  {json.dumps(_row_to_json(row))}' for row in plan.arrays)
    return (
        f'{{"format": {json.dumps(FORMAT)},\n "mesh": {json.dumps(plan.mesh)},\n'
        f' "arrays": [\n{rows}\n ]}}\n'
    )


def from_json(text: str) -> ResolvedPlan:
    """The plan that `to_json` wrote, or that someone has changed since.

    Raises:
      ValueError: no such text; a spec that the mesh or an array cannot have; a figure that is not
        what the spec makes it.
    """
    try:
        held = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f'a plan is JSON, but this is none: {error}') from error
    if not isinstance(held, Mapping) or held.get('format') != FORMAT:
        found = held.get('format') if isinstance(held, Mapping) else held
        raise ValueError(f'a plan has "format": "{FORMAT}", this has {found!r}')
    if extra := sorted(held.keys() - {'format', 'mesh', 'arrays'}):
        raise ValueError(f'a plan has "format", "mesh" and "arrays", and no {extra[0]!r}')
    mesh, rows = held.get('mesh'), held.get('arrays')
    if not isinstance(mesh, Mapping) or not mesh or not all(map(is_count, mesh.values())):
        raise ValueError(f'"mesh" must be the size of each axis, as {{"data": 4}}, not {mesh!r}')
    if not isinstance(rows, list):
        raise ValueError(f'"arrays" must be a list of rows, not {rows!r}')
    return ResolvedPlan(mesh, tuple(_row_from_json(row, mesh) for row in rows))


def save_plan(plan: ResolvedPlan, path: str | Path) -> None:
    """Writes a plan to a file.

    Raises:
      TypeError: no ResolvedPlan.
    """
    if not isinstance(plan, ResolvedPlan):
        raise TypeError(f'a {type(plan).__name__} is no ResolvedPlan: give plan.resolve(...)')
    Path(path).write_text(to_json(plan))


def load_plan(path: str | Path) -> ResolvedPlan:
    """The plan of a file.

    Raises:
      OSError: there is no such file.
      ValueError: as `from_json`, with the path.
    """
    try:
        return from_json(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which has each of its keys once."""
    held = dict(pairs)
    for key in held:
        if sum(other == key for other, _ in pairs) > 1:
            raise ValueError(f'{key!r} is there twice, beside {dict(pairs)}')
    return held


def _row_to_json(row: PlannedArray) -> dict[str, Any]:
    held = {name: getattr(row, name) for name in _FIELDS}
    return held | {'spec': _spec_to_json(row.spec), 'padded_spec': _spec_to_json(row.padded_spec)}


def _spec_to_json(spec: PartitionSpec | None) -> list[Any] | None:
    if spec is None:
        return None
    return [list(axes) if isinstance(axes, tuple) else axes for axes in spec]


def _row_from_json(row: Any, mesh: Mapping[str, int]) -> PlannedArray:
    """The row, with the figures computed anew: those of the file must be the same."""
    if not isinstance(row, Mapping) or not isinstance(row.get('path'), str):
        raise ValueError(f'{row!r} is no row of a plan: it has no "path"')
    path = row['path']
    for name in row:
        if name not in _FIELDS:
            raise ValueError(f'{path}: a row has no {name!r}.{nearest(name, _FIELDS)}')
    absent = [name for name in _FIELDS if name not in row]
    if absent:
        raise ValueError(f'{path}: the row has no {", ".join(absent)}')
    spec, padded = (_spec_from_json(path, row[name]) for name in ('spec', 'padded_spec'))
    if not isinstance(row['reason'], str):
        raise ValueError(f'{path}: "reason" must be a text, not {row["reason"]!r}')
    if spec is None:
        raise ValueError(f'{path}: "spec" is null: write [] for an array that is replicated')
    made = planned_array(
        path,
        jax.ShapeDtypeStruct(_shape(path, row['shape']), _dtype(path, row['dtype'])),
        spec if padded is None else PaddedSpec(spec, padded),
        mesh,
        logical_axes=_logical_axes(path, row),
        category=_category(path, row['category']),
        reason=row['reason'],
    )
    figures = _row_to_json(made)
    for name in ('shard_shape', 'bytes_total', 'bytes_per_device'):
        computed = json.loads(json.dumps(figures[name]))
        if row[name] != computed:
            raise ValueError(
                f'{path}: the file says {name} {row[name]}, but its spec makes it {computed}: '
                'after a change of the spec write that too'
            )
    return made


def _shape(path: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(is_count(n) or n == 0 for n in shape):
        raise ValueError(f'{path}: "shape" must be a list of sizes, not {shape!r}')
    return tuple(shape)


def _dtype(path: str, name: Any) -> Any:
    try:
        return _dtype_of(name)
    except TypeError as error:
        raise ValueError(f'{path}: "dtype" {name!r} is no type of arrays') from error


@functools.cache
def _dtype_of(name: str) -> Any:
    """The type of a name as arrays write it, those of random keys included."""
    for impl in ('threefry2x32', 'rbg', 'unsafe_rbg'):
        key = jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl))
        if str(key.dtype) == name:
            return key.dtype
    if not isinstance(name, str) or jnp.dtype(name).kind == 'O':
        raise TypeError(name)
    return jnp.dtype(name)


def _logical_axes(path: str, row: Mapping[str, Any]) -> list[str | None] | None:
    names = row['logical_axes']
    if names is None:
        return None
    texts = isinstance(names, list) and all(n is None or isinstance(n, str) for n in names)
    if not texts or len(names) != len(row['shape']):
        raise ValueError(
            f'{path}: "logical_axes" {names!r} must be null, or a name or null for each dimension '
            f'of {row["shape"]}'
        )
    return names


def _category(path: str, category: Any) -> Role:
    if category not in typing.get_args(Role):
        known = ', '.join(map(repr, typing.get_args(Role)))
        raise ValueError(f'{path}: "category" must be one of {known}, not {category!r}')
    return category


def _spec_from_json(path: str, entries: Any) -> PartitionSpec | None:
    if entries is None:
        return None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError(
            f'{path}: {entries!r} is no spec: write a mesh axis, a list of them or null for each '
            'dimension'
        )
    return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, list):
        return all(isinstance(axis, str) for axis in entry)
    return entry is None or isinstance(entry, str)
