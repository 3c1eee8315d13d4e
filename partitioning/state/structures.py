"""Compares pytrees leaf by leaf, where static fields may differ, and names the first difference.

The static fields of a state, such as the optimizer in Flax's TrainState, are made anew by each
trace of an init function and are never equal, although jax compares them with the static fields of
the tree of shardings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

KeyPath = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StaticValue:
    """A static argument in the record of a trace."""

    value: Any


class TreeMismatchError(Exception):
    """Two trees have different structures.

    Attributes:
      path: the path of the first node that differs.
      first, second: what the two trees have there, such as `a tuple of 2` and `a tuple of 3`.
    """

    def __init__(self, path: KeyPath, first: str, second: str):
        super().__init__(f'{jax.tree_util.keystr(path)}: {first}, {second}')
        self.path, self.first, self.second = path, first, second


def pair_leaves(
    first: Any,
    second: Any,
    *,
    prefix: bool = False,
    static_fields: bool = True,
    types: bool = True,
    path: KeyPath = (),
) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yields the path of each leaf of `second`, the leaf of `first` for it, and the leaf itself.

    With `prefix`, None is a leaf in `first`, and a leaf of it may stand for a whole tree in
    `second`. With `types`, the types of the nodes must be equal too. With `static_fields`, their
    static fields must be, but differences between children come first. The paths begin with `path`.

    Raises:
      TreeMismatchError: at the first place where the structures differ.
    """
    ours, theirs = children_of(first), children_of(second)
    if prefix and first is None:
        ours = None
    if ours is None and (prefix or theirs is None):
        for below, leaf in jax.tree_util.tree_leaves_with_path(second):
            yield (*path, *below), first, leaf
        return
    if ours is None or theirs is None or (types and type(first) is not type(second)):
        raise TreeMismatchError(path, _describe(first), _describe(second))
    _check_keys(path, first, second, ours, theirs)
    how: Any = {'prefix': prefix, 'static_fields': static_fields, 'types': types}
    for key, child in theirs.items():
        yield from pair_leaves(ours[key], child, path=(*path, key), **how)
    if static_fields and _one_level(first) != _one_level(second):
        raise TreeMismatchError(path, *_describe_static_fields(first, second))


def children_of(tree: Any) -> Mapping[Any, Any] | None:
    """The children of a node by their keys, or None if `tree` is a leaf."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    return None if flat and not flat[0][0] else {path[0]: child for path, child in flat}


def _one_level(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=lambda x: x is not tree)


def _check_keys(
    path: KeyPath, first: Any, second: Any, ours: Mapping[Any, Any], theirs: Mapping[Any, Any]
) -> None:
    if isinstance(first, tuple | list) and len(ours) != len(theirs):
        raise TreeMismatchError(path, _describe(first), _describe(second))
    for key in [*ours, *theirs]:
        name = repr(jax.tree_util.keystr((key,), simple=True))
        if key not in theirs:
            raise TreeMismatchError(path, name, f'no {name}')
        if key not in ours:
            raise TreeMismatchError(path, f'no {name}', name)


def _describe(tree: Any) -> str:
    """What a tree is at its root: `an array`, `a tuple of 3` or `a dict`."""
    if tree is None:
        return 'None'
    if children_of(tree) is None:
        return 'an array' if hasattr(tree, 'dtype') else 'one entry'
    count = f' of {len(tree)}' if isinstance(tree, tuple | list) else ''
    kind = type(tree).__name__
    return f'{"an" if kind[0] in "AEIOUaeiou" else "a"} {kind}{count}'


def _describe_static_fields(first: Any, second: Any) -> tuple[str, str]:
    """The static fields that differ in two nodes with equal keys."""
    kind = type(first).__name__
    dynamic = {jax.tree_util.keystr((key,), simple=True) for key in children_of(first) or ()}
    fields = dataclasses.fields(first) if dataclasses.is_dataclass(first) else ()
    for field in fields:
        one, other = (getattr(tree, field.name, None) for tree in (first, second))
        if field.name not in dynamic and one is not other and one != other:
            if (shown := short_repr(one)) == (shown_other := short_repr(other)):
                return f'{kind}.{field.name}={shown}', 'another object there'
            return f'{kind}.{field.name}={shown}', f'{kind}.{field.name}={shown_other}'
    return f'a {kind}', f'a {kind} with other static data'


def short_repr(value: Any, limit: int = 60) -> str:
    """The repr of a value without addresses, on one line and at most `limit` characters long."""
    text = re.sub(' at 0x[0-9a-f]+', '', ' '.join(repr(value).split()))
    return text if len(text) <= limit else f'{text[: limit - 3]}...'


def has_structure_of(prefix: Any, tree: Any) -> bool:
    """Whether jax accepts `prefix` as a prefix of `tree`."""
    try:
        jax.tree.map(lambda *_: 0, prefix, tree, is_leaf=lambda x: x is None)
    except ValueError:
        return False
    return True


def match_by_path(prefix: Any, tree: Any, *, types: bool = False) -> list[Any] | None:
    """The leaf of `prefix` that belongs to each leaf of a tree, in the order of the tree.

    It is None if `prefix`, in which None is a leaf, is not a prefix of the tree. Static fields may
    differ, and the types of nodes too, unless `types` is True.
    """
    pairs = pair_leaves(prefix, tree, prefix=True, static_fields=False, types=types)
    try:
        return [leaf for _, leaf, _ in pairs]
    except TreeMismatchError:
        return None


def with_static_fields(
    in_shardings: Any, out_shardings: Any, args: Sequence[Any]
) -> tuple[Any, Any] | None:
    """Shardings for arguments that have other static fields than the shardings.

    The shardings of the arguments and of the result are returned, with the static fields of the
    arguments. Wherever the result has the structure of an argument, it gets its static fields, as
    in a step that returns its state. None is returned if each argument has the structure of its
    shardings, or if the paths of its arrays differ.
    """
    if not isinstance(in_shardings, tuple) or len(in_shardings) != len(args):
        return None
    pairs = list(zip(in_shardings, args, strict=True))
    adapted = {i: like(*pair) for i, pair in enumerate(pairs) if not has_structure_of(*pair)}
    if not adapted or None in adapted.values():
        return None
    old: dict[Any, Any] = {jax.tree.structure(in_shardings[i]): args[i] for i in adapted}
    out_shardings = jax.tree.map(
        lambda x: like(x, old[jax.tree.structure(x)]) if jax.tree.structure(x) in old else x,
        out_shardings,
        is_leaf=lambda x: x is None or jax.tree.structure(x) in old,
    )
    return tuple(adapted.get(i, x) for i, x in enumerate(in_shardings)), out_shardings


def like(shardings: Any, tree: Any) -> Any | None:
    """Shardings as a tree with the structure of `tree`; None if the paths of the two differ."""
    found = match_by_path(shardings, tree)
    return None if found is None else jax.tree.unflatten(jax.tree.structure(tree), found)
