"""What is wrong in a layout map: regular expressions on the paths of arrays, with mesh axes."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from meshwright.calls.keras_models import variables_of
from meshwright.findings.map_entries import LayoutEntries, read_entries
from meshwright.findings.program_findings import Findings
from partitioning.amounts import bytes_str, share_str
from partitioning.plan.findings import Finding
from partitioning.rules import MeshLike, as_tuple, axis_sizes, nearest, num_shards
from partitioning.rules.checks import axis_problems, indivisible, rank_problem
from partitioning.state import key_names
from partitioning.values import value_str

_SHARE = 0.05  # of all arrays, for an array without an entry to be large
_LEAST = 2**16  # bytes of an array that is worth a finding
_WORD = re.compile(r'[A-Za-z][A-Za-z0-9_]*(?!\w*\.\*|\w*\\)')  # 'layer.*' begins a longer name


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array that a map lays out: its path, its shape and its size in bytes."""

    path: str
    shape: tuple[int, ...]
    nbytes: int


def lint_layout_map(layout_map: Any, arrays: Any, *, mesh: MeshLike | None = None) -> Findings:
    """Returns what is wrong or wasteful in a layout map, entry by entry; nothing is traced.

    It finds entries that match no array, or that other entries hide; entries with another rank than
    their arrays, with axes that the mesh lacks or that do not divide a size; entries that also
    match arrays with longer names; and large arrays that no entry matches, which are whole.

    Usage:
      print(mw.lint_layout_map(LlamaBackbone.get_layout_map(mesh), model))
      mw.lint_layout_map([('wq/kernel', P('fsdp', 'mp')), ('.*', P())], params, mesh=mesh)

    Args:
      layout_map: a `keras.distribution.LayoutMap`; or pairs of a regular expression and the mesh
        axes of each dimension (a tuple or a PartitionSpec), of which the first one that is found in
        the path of an array lays it out.
      arrays: a Keras model, layer or list of variables; or a tree of arrays or ShapeDtypeStructs.
      mesh: the mesh, or the size of each axis; by default the mesh of a LayoutMap.

    Raises:
      ValueError: if there is no mesh, no array or no entry, or if an entry is malformed.
    """
    entries, sizes = read_entries(layout_map), _sizes_of(layout_map, mesh)
    found = _read_arrays(arrays)
    matched = [entries.matches(array.path) for array in found]
    checks = (
        _wrong_axes(entries, sizes),
        _unmatching(entries, found, matched),
        _several(entries, found, matched),
        _misfits(entries, sizes, found, matched),
        _loose(entries, found, matched),
        _without_entry(entries, sizes, found, matched),
    )
    return Findings(finding for check in checks for finding in check)


def _sizes_of(layout_map: Any, mesh: MeshLike | None) -> Mapping[str, int]:
    if mesh is None:
        mesh = getattr(layout_map, 'device_mesh', None)
        if mesh is None:
            raise ValueError("the layout map has no mesh: pass mesh=, such as mesh={'data': 4}")
    names, shape = getattr(mesh, 'axis_names', None), getattr(mesh, 'shape', None)
    if names is not None and isinstance(shape, tuple | list):  # the mesh of Keras
        return dict(zip(names, shape, strict=True))
    return axis_sizes(mesh)


def _read_arrays(arrays: Any) -> tuple[_Array, ...]:
    variables = variables_of(arrays)
    if variables is None:
        leaves = jax.tree_util.tree_flatten_with_path(arrays)[0]
        variables = [('/'.join(key_names(path)), x) for path, x in leaves]
    found = []
    for path, x in variables:
        if not hasattr(x, 'shape') or not hasattr(x, 'dtype'):
            raise ValueError(
                f'{path or "arrays"} is {value_str(x)}, not an array: pass a Keras model, or a '
                'tree of arrays or ShapeDtypeStructs'
            )
        shape = tuple(int(size) for size in x.shape)
        itemsize = jax.dtypes.canonicalize_dtype(x.dtype).itemsize
        found.append(_Array(path, shape, math.prod(shape) * itemsize))
    if not found:
        raise ValueError(
            'there are no arrays: pass a Keras model that is built, or a tree of arrays'
        )
    return tuple(found)


def _wrong_axes(entries: LayoutEntries, sizes: Mapping[str, int]) -> Iterator[Finding]:
    for i, (_, axes) in enumerate(entries.entries):
        for problem in axis_problems([a for own in axes for a in as_tuple(own)], sizes):
            yield Finding('error', problem.kind, entries.where(i), problem.message)


def _unmatching(
    entries: LayoutEntries, arrays: Sequence[_Array], matched: Sequence[Sequence[int]]
) -> Iterator[Finding]:
    """Entries that decide no layout, and why."""
    used = {i for found in matched for i in (found if entries.alone else found[:1])}
    words = {part for array in arrays for part in array.path.split('/')}
    for i, (pattern, _) in enumerate(entries.entries):
        if i in used or re.search(pattern, ''):  # '.*' is for the rest
            continue
        taken = [a.path for a, found in zip(arrays, matched, strict=True) if i in found]
        parts = [array.path for array in arrays if re.search(pattern, array.path)]
        if taken:
            message = f'earlier entries decide all that it matches, such as {taken[0]}'
            yield Finding('warning', 'shadowed', entries.where(i), message)
            continue
        message = 'it matches no array'
        if parts:
            message += (
                ', because an entry must match the whole path: write '
                f'{_longer(pattern, parts[0])!r} for {parts[0]}'
            )
        else:
            own = [w for w in _WORD.findall(pattern) if w not in words]
            message += nearest(own[-1], words) if own else ''
        yield Finding('warning', 'unused', entries.where(i), message)


def _longer(pattern: str, path: str) -> str:
    """A pattern that matches the whole path, in part of which this one is found."""
    for longer in (f'.*{pattern}', f'{pattern}.*'):
        if re.fullmatch(longer, path):
            return longer
    return f'.*{pattern}.*'


def _several(
    entries: LayoutEntries, arrays: Sequence[_Array], matched: Sequence[Sequence[int]]
) -> Iterator[Finding]:
    """Arrays that several entries match, where only one may."""
    if not entries.alone:
        return
    seen = set[tuple[int, ...]]()
    for array, found in zip(arrays, matched, strict=True):
        if len(found) > 1 and tuple(found) not in seen:
            seen.add(tuple(found))
            others = ' and '.join(repr(entries.entries[i][0]) for i in found[1:])
            message = f'{others} also matches {array.path}, and Keras takes only one: narrow them'
            yield Finding('error', 'ambiguous', entries.where(found[0]), message)


def _misfits(
    entries: LayoutEntries,
    sizes: Mapping[str, int],
    arrays: Sequence[_Array],
    matched: Sequence[Sequence[int]],
) -> Iterator[Finding]:
    """Entries whose rank or axes do not fit the arrays that they match."""
    seen = set[tuple[int, tuple[int, ...]]]()
    for array, found in zip(arrays, matched, strict=True):
        for i in found[:1]:
            axes, key = entries.entries[i][1], (i, array.shape)
            if key in seen:
                continue
            seen.add(key)
            rank = len(array.shape)
            if len(axes) > rank or (entries.exact and len(axes) < rank):
                problem = rank_problem(f'for {array.path}, it', len(axes), array.shape)
                yield Finding('error', 'rank', entries.where(i), problem.message)
                continue
            for dim, own in enumerate(axes):
                known = tuple(a for a in as_tuple(own) if a in sizes)
                if known and array.shape[dim] % num_shards(known, sizes):
                    what = indivisible(dim, array.shape, known, sizes).message
                    yield Finding('error', 'indivisible', entries.where(i), f'{array.path}: {what}')


def _loose(
    entries: LayoutEntries, arrays: Sequence[_Array], matched: Sequence[Sequence[int]]
) -> Iterator[Finding]:
    """Entries that match a name, and in another array a longer name that ends with it."""
    of_entry: dict[int, list[_Array]] = collections.defaultdict(list)
    for array, found in zip(arrays, matched, strict=True):
        for i in found[:1]:
            of_entry[i].append(array)
    for i, own in sorted(of_entry.items()):
        for word in _WORD.findall(entries.entries[i][0]):
            exact = [a for a in own if word in a.path.split('/')]
            longer = [
                (a, part)
                for a in own
                if a not in exact
                for part in a.path.split('/')
                if part.endswith(f'_{word}')
            ]
            if exact and longer:
                array, part = longer[0]
                message = (
                    f'it is for {word!r}, such as {exact[0].path}, and also matches {part!r} in '
                    f'{array.path}, whose shape is {array.shape}: write {f"/{word}"!r} in it, and '
                    f'an entry of its own for {part!r}'
                )
                yield Finding('warning', 'loose', entries.where(i), message)
                break


def _without_entry(
    entries: LayoutEntries,
    sizes: Mapping[str, int],
    arrays: Sequence[_Array],
    matched: Sequence[Sequence[int]],
) -> Iterator[Finding]:
    """Large arrays that no entry shards, each with the like of it and the entry to add."""
    total = sum(array.nbytes for array in arrays)
    whole: dict[str, list[_Array]] = collections.defaultdict(list)
    for array, found in zip(arrays, matched, strict=True):
        if not found or (not entries.alone and re.search(entries.entries[found[0]][0], '')):
            whole[re.sub(r'_?\d+', '', array.path)].append(array)
    if all(size == 1 for size in sizes.values()):
        return
    for group in whole.values():
        held = sum(array.nbytes for array in group)
        if held < max(_SHARE * total, _LEAST) or len(group[0].shape) < 2:
            continue
        first = group[0]
        more = f'with {len(group) - 1} more like it, ' if len(group) > 1 else ''
        near = _nearest_entry(entries, first.path)
        yield Finding(
            'warning',
            'whole array',
            first.path,
            f'{more}no entry matches it, so that each device holds {bytes_str(held)}, '
            f'{share_str(held / total)} of all arrays; its shape is {first.shape}{near}',
        )


def _nearest_entry(entries: LayoutEntries, path: str) -> str:
    """The entry whose words are most like the words of a path that it does not match."""
    parts = path.split('/')
    for i, (pattern, _) in enumerate(entries.entries):
        for word in reversed(_WORD.findall(pattern)):
            near = next((part for part in parts if word != part and part.endswith(word)), None)
            if near and len(word) > 3:
                return f'; {entries.where(i)} is for {word!r}: add one for {near!r}'
    return f'; add an entry for {"/".join(parts[-2:])!r}'
