"""Why a partitioned function was compiled again: the argument that changed, before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from partitioning.rules import describe_axes, spec_str
from partitioning.state.structures import StaticValue, TreeMismatchError, pair_leaves, short_repr

_Record = Mapping[str, Any]


class _Change(NamedTuple):
    """A difference between two compilations, and what to write instead."""

    text: str
    hint: str


def describe_changes(pairs: Sequence[tuple[_Record, _Record]]) -> str:
    """Describes the first difference between two compilations, and counts the others.

    Each pair has the abstract arguments by name, or the shardings of keyword arguments by path.
    """
    changes = [change for before, after in pairs for change in _changes(before, after)]
    if not changes:
        return (
            'its arguments are equal, so a jax setting, a mesh context or a cleared cache changed '
            'between the calls'
        )
    others = len(changes) - 1
    more = f' (and {others} more {"change" if others == 1 else "changes"})' if others else ''
    return f'{changes[0].text}{more}. {changes[0].hint}'


def _changes(before: _Record, after: _Record) -> Iterator[_Change]:
    if any(isinstance(x, Sharding) for x in (*before.values(), *after.values())):
        where = next(k for k in {**before, **after} if before.get(k) != after.get(k))
        one, other = (_layout_str(layouts.get(where)) for layouts in (before, after))
        yield _Change(
            f'the keyword argument {where} changed its layout from {one} to {other}',
            'Give the argument an entry in in_shardings, which fixes its layout',
        )
        return
    same = 'Pass the same arguments in every call, either by position or by name'
    for name in {**before, **after}:
        if name not in after:
            yield _Change(f'{name} was given and is now left out', same)
        elif name not in before:
            yield _Change(f'{name} was left out and is now given', same)
        elif isinstance(before[name], StaticValue) or isinstance(after[name], StaticValue):
            yield from _static_changes(name, before[name], after[name])
        else:
            yield from _array_changes(name, before[name], after[name])


def _static_changes(name: str, before: StaticValue, after: StaticValue) -> Iterator[_Change]:
    if before == after:
        return
    one, other = short_repr(before.value), short_repr(after.value)
    if one == other:
        yield _Change(
            f'the static argument {name} is another object in each call, not equal to the first, '
            f'{one}',
            'Create it once, or give its class __eq__ and __hash__',
        )
        return
    yield _Change(
        f'the static argument {name} changed from {one} to {other}',
        f'Pass {name} as an array, or partition one function for each of its values',
    )


def _array_changes(name: str, before: Any, after: Any) -> Iterator[_Change]:
    try:
        for path, one, other in pair_leaves(before, after):
            if one != other:
                yield _leaf_change(f'{name}{jax.tree_util.keystr(path)}', one, other)
    except TreeMismatchError as error:
        where = f'{name}{jax.tree_util.keystr(error.path)}'
        yield _Change(
            f'{where} had {error.first} and now has {error.second}',
            'Pass trees of one structure in every call',
        )


def _leaf_change(where: str, before: Any, after: Any) -> _Change:
    one, other = _array_str(before), _array_str(after)
    changed = f'{where} changed from {one} to {other}'
    if before.shape != after.shape:
        return _Change(changed, 'Pass one shape in every call: pad or drop the last batch')
    if before.dtype != after.dtype:
        turn = f"with x.astype('{before.dtype}')"
        if after.weak_type:  # a Python number
            is_float = jax.numpy.issubdtype(before.dtype, jax.numpy.floating)
            turn = f"as jnp.asarray(x, '{before.dtype}')"
            if before.weak_type and is_float:
                turn = f'as float({where})'
        return _Change(changed, f'Convert it before the call, {turn}')
    if before.weak_type != after.weak_type:
        return _Change(
            changed, f"A Python number is weakly typed: write jnp.asarray(x, '{before.dtype}')"
        )
    # The layout that is part of an array's type: the mesh, and the spec on Explicit axes.
    layouts = ' to '.join(
        'no mesh (such as a numpy array)'
        if x.sharding.mesh.empty
        else f'{spec_str(x.sharding.spec)} over {describe_axes(x.sharding.mesh)}'
        for x in (before, after)
    )
    return _Change(
        f'{where}, {one}, changed its layout from {layouts}',
        'Put it there before the first call, as jax.device_put(state, plan.shardings) does',
    )


def _array_str(aval: Any) -> str:
    """The kind of an array: `float32[8, 16]`."""
    weak = 'weakly typed ' if getattr(aval, 'weak_type', False) else ''
    return f'{weak}{aval.dtype}{list(aval.shape)}'


def _layout_str(sharding: Any) -> str:
    spec = getattr(sharding, 'spec', None)
    if sharding is None:
        return 'none'
    return str(sharding) if spec is None else spec_str(spec)
