"""The file format of plans: JSON with one line per array, in the order of their paths.

    {"format": "meshwright plan 2",
     "mesh": {"data": 4, "model": 2},
     "rows": [
      {"path": "fc1/kernel", "shape": [16, 64], "dtype": "float32", "role": "parameters",
       "dimensions": [{"name": "embed", "axes": null, "reason": "a rule replicates it", ...},
                      {"name": "mlp", "axes": "model", "reason": "a rule shards it", ...}],
       "shard_shape": [16, 32], "bytes_total": 4096, "bytes_per_device": 2048}
     ]}

A dimension also has "rule", the rule that decided; "lost", the rules that did not apply, each with
the reason; and "policy", "wanted" and "fits" if a policy was applied. Empty ones are omitted.
If programs are compiled with options, these come before the rows:

     "compiler_options": [
      {"name": "xla_x", "value": 1, "reason": "why", "figure": "what it changes", "chips": ["v5e"]}
     ],

Equal plans have equal files, so version control shows what changed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.hardware import CompilerOption
from partitioning.plan.rows import PlanRow, check_layout_of, make_row
from partitioning.rules import MeshLike, ResolvedDimension, axis_sizes, is_count, nearest, to_spec
from partitioning.rules.names import Policy
from partitioning.state import Role
from partitioning.untrusted_text import parse_json
from partitioning.values import value_str

FORMAT = 'meshwright plan 2'
_AGAIN = 'Make the file again with plan.save(path)'
_ROW_KEYS = [*(name for name in PlanRow._fields if name != 'spec'), 'bytes_per_device']


def to_json(
    rows: Sequence[PlanRow], mesh: MeshLike, compiler_options: Sequence[CompilerOption] = ()
) -> str:
    """The text of a plan's file; see the format above."""
    ordered = sorted(rows, key=lambda row: row.path.split('/'))
    lines = ',\n'.join(f'  {json.dumps(row_to_json(row))}' for row in ordered)
    listed = ',\n'.join(f'  {json.dumps(dataclasses.asdict(o))}' for o in compiler_options)
    options = f' "compiler_options": [\n{listed}\n ],\n' if listed else ''
    return (
        f'{{"format": {json.dumps(FORMAT)},\n "mesh": {json.dumps(dict(axis_sizes(mesh)))},\n'
        f'{options} "rows": [\n{lines}\n ]}}\n'
    )


def from_json(
    text: str,
) -> tuple[tuple[PlanRow, ...], dict[str, int], tuple[CompilerOption, ...]]:
    """Reads a text that `to_json` wrote, which may have been edited since.

    Raises:
      ValueError: if the text is not a plan, if a spec does not fit the mesh or its array, or if a
        figure contradicts the spec.
    """
    try:
        held = parse_json(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f'the file is not JSON: {error}. {_AGAIN}') from None
    if not isinstance(held, Mapping) or held.get('format') != FORMAT:
        found = held.get('format') if isinstance(held, Mapping) else held
        raise ValueError(
            f'the file must have "format": "{FORMAT}", not {value_str(found)}. {_AGAIN}'
        )
    required = ('format', 'mesh', 'rows')
    check_keys('the file', held, required, (*required, 'compiler_options'))
    mesh, rows = held['mesh'], held['rows']
    if not isinstance(mesh, Mapping) or not mesh or not all(map(is_count, mesh.values())):
        raise ValueError(f'"mesh" must map each axis to a size, as {{"data": 4}}, not {mesh!r}')
    if not isinstance(rows, list):
        raise ValueError(f'"rows" must be a list, not {rows!r}')
    options = held.get('compiler_options', [])
    if not isinstance(options, list):
        raise ValueError(f'"compiler_options" must be a list, not {options!r}')
    made = tuple(row_from_json(row, mesh) for row in rows)
    return made, dict(mesh), tuple(map(_option_from_json, options))


def _option_from_json(held: Any) -> CompilerOption:
    if not isinstance(held, Mapping):
        raise ValueError(
            f'a compiler option must be an object such as {{"name": "xla_x", ...}}, not {held!r}'
        )
    fields = [field.name for field in dataclasses.fields(CompilerOption)]
    check_keys(f'the compiler option {held.get("name")!r}', held, fields[:3], fields)
    return CompilerOption(**{**held, 'chips': tuple(held.get('chips', ()))})


def row_to_json(row: PlanRow) -> dict[str, Any]:
    """A row as values that JSON can hold."""
    held = {key: _lists(getattr(row, key)) for key in _ROW_KEYS}
    return held | {'dimensions': [_dimension_to_json(d) for d in row.dimensions]}


def _dimension_to_json(d: ResolvedDimension) -> dict[str, Any]:
    held = {key: _lists(getattr(d, 'mesh_axes' if key == 'axes' else key)) for key in _DIMENSION}
    empty = {'rule': None, 'lost': [], 'policy': None, 'wanted': held['axes'], 'fits': []}
    return {k: value for k, value in held.items() if k not in empty or value != empty[k]}


def _lists(value: Any) -> Any:
    """A value with its tuples as lists, as JSON has them."""
    return [_lists(x) for x in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no key may appear twice."""
    held = dict(pairs)
    for key in held if len(held) < len(pairs) else ():
        if sum(other == key for other, _ in pairs) > 1:
            raise ValueError(f'{key!r} appears twice in {dict(pairs)}')
    return held


def row_from_json(row: Any, mesh: Mapping[str, int]) -> PlanRow:
    """Makes a row from what `row_to_json` wrote.

    Raises ValueError if it is malformed, or if a figure in the file contradicts its axes.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get('path'), str):
        raise ValueError(f'a row must be an object with a "path", not {row!r}')
    path = row['path']
    check_keys(path, row, _ROW_KEYS, _ROW_KEYS)
    shape, dimensions = row['shape'], row['dimensions']
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f'{path}: "shape" must be a list of sizes, not {shape!r}')
    if not isinstance(dimensions, list) or len(dimensions) != len(shape):
        raise ValueError(
            f'{path}: "dimensions" must be a list with one entry per dimension of {shape}, not '
            f'{dimensions!r}'
        )
    if row['role'] not in typing.get_args(Role):
        known = ', '.join(map(repr, typing.get_args(Role)))
        raise ValueError(f'{path}: "role" must be one of {known}, not {row["role"]!r}')
    array = jax.ShapeDtypeStruct(tuple(shape), _dtype(path, row['dtype']))
    resolved = [_dimension_from_json(path, dim, d) for dim, d in enumerate(dimensions)]
    check_layout_of(path, array.shape, to_spec(resolved), mesh)
    made = make_row(path, array, mesh, resolved, row['role'])
    figures = row_to_json(made)
    for name in ('shard_shape', 'bytes_total', 'bytes_per_device'):
        if row[name] != figures[name]:
            raise ValueError(
                f'{path}: the file says {name} {row[name]}, but its axes give {figures[name]}: '
                f'write {figures[name]}'
            )
    return made


def _dimension_from_json(path: str, dim: int, held: Any) -> ResolvedDimension:
    where = f'{path}, dimension {dim}'
    if not isinstance(held, Mapping):
        raise ValueError(
            f'{where}: it must be an object such as {{"name": null, ...}}, not {held!r}'
        )
    check_keys(where, held, ('name', 'axes', 'reason'), [*_DIMENSION])
    for key, value in held.items():
        is_valid, expected = _DIMENSION[key]
        if not is_valid(value):
            raise ValueError(f'{where}: "{key}" must be {expected}, not {value!r}')
    given = {key: _tuples(value) for key, value in held.items()}
    axes = given.pop('axes')
    return ResolvedDimension(
        **{'rule': None, 'lost': (), 'mesh_axes': axes, 'wanted': axes, **given}
    )


def _is_axes(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(axis, str) for axis in value)
    return value is None or isinstance(value, str)


def _is_mesh_axes(value: Any) -> bool:
    return _is_axes(value) and '' not in (value if isinstance(value, list) else [value])


def _is_rule(value: Any) -> bool:
    return _is_pair(value) and isinstance(value[0], str) and _is_axes(value[1])


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


_POLICIES = [x for kind in typing.get_args(Policy) for x in typing.get_args(kind)]
_AXES = (_is_axes, 'a name, a list of mesh axes or null')
# The entries of a dimension, each with its check and what it must be.
_DIMENSION: dict[str, tuple[Callable[[Any], bool], str]] = {
    'name': _AXES,
    'axes': (_is_mesh_axes, _AXES[1]),
    'reason': (lambda x: isinstance(x, str), 'a text'),
    'rule': (_is_rule, 'a [logical axis, mesh axes] pair'),
    'lost': (
        lambda x: (
            isinstance(x, list)
            and all(_is_pair(y) and _is_rule(y[0]) and isinstance(y[1], str) for y in x)
        ),
        'a list of [rule, reason] pairs',
    ),
    'policy': (lambda x: x in _POLICIES, f'one of {_POLICIES}'),
    'wanted': _AXES,
    'fits': (lambda x: isinstance(x, list) and all(map(is_count, x)), 'a list of sizes'),
}


def check_keys(
    where: str, held: Mapping[str, Any], required: Sequence[str], known: Sequence[str]
) -> None:
    """Raises ValueError if an object of JSON lacks a required key, or has an unknown one."""
    for key in held:
        if key not in known:
            raise ValueError(f'{where} has an unknown entry {key!r}.{nearest(key, known)}')
    if absent := [key for key in required if key not in held]:
        raise ValueError(f'{where} lacks {", ".join(absent)}')


def _dtype(path: str, name: Any) -> Any:
    try:
        return _dtype_of_name(name)
    except TypeError:
        raise ValueError(f'{path}: "dtype" {name!r} is not the name of a dtype') from None


@functools.cache
def _dtype_of_name(name: str) -> Any:
    """The dtype with this name. Dtypes of random keys have names too, such as 'key<fry>'."""
    for impl in ('threefry2x32', 'rbg', 'unsafe_rbg'):
        key = jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl))
        if str(key.dtype) == name:
            return key.dtype
    if not isinstance(name, str) or jnp.dtype(name).kind == 'O':
        raise TypeError(name)
    return jnp.dtype(name)
