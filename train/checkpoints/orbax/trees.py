"""The trees that Orbax saves: dicts and lists of arrays, in which a part may be empty."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from etils import epath

from partitioning.untrusted_text import parse_json

# What Orbax calls a part of a tree that has no array.
NO_ARRAY = ('None', 'Dict', 'List', 'Tuple', 'NamedTuple', 'string')


class _Key(NamedTuple):
    name: str
    is_index: bool


def read_tree(folder: epath.Path) -> Any:
    """Reads the tree that Orbax has written into the folder of an item, such as `<step>/state`.

    Returns:
      Dicts and lists, with the name of an array in its place, and None where a part is empty. A
      name is the keys of an array in the tree, joined by '/'.
    """
    root: dict[Any, Any] = {}
    for entry in parse_json((folder / '_METADATA').read_text())['tree_metadata'].values():
        keys = [_Key(str(key['key']), key['key_type'] == 1) for key in entry['key_metadata']]
        has_array = entry.get('value_metadata', {}).get('value_type') not in NO_ARRAY
        leaf = '/'.join(key.name for key in keys) if has_array else None
        _put(root, keys, leaf)
    return _with_lists(root)


def make_tree(names: Iterable[str]) -> Any:
    """The tree of dicts that gives arrays these names."""
    root: dict[Any, Any] = {}
    for name in names:
        _put(root, [_Key(key, False) for key in name.split('/')], name)
    return _with_lists(root)


def has_structure(tree: Any) -> bool:
    """Whether a tree has lists or empty parts, which names of arrays alone do not tell."""
    return tree is not None and tree != make_tree(jax.tree.leaves(tree))


def _put(root: dict[Any, Any], keys: list[_Key], leaf: str | None) -> None:
    """Adds a leaf to a tree of dicts."""
    parent = root
    for key in keys[:-1]:
        parent = parent.setdefault(key, {})
        if not isinstance(parent, dict):
            raise ValueError(f'{leaf} is below {parent}, which is an array')
    if keys[-1] in parent:
        raise ValueError(f'{leaf} is an array, but other arrays are below it')
    parent[keys[-1]] = leaf


def _with_lists(tree: Any) -> Any:
    """The tree with a list for every dict whose keys are indices, and names as keys elsewhere."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(key.is_index for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree, key=lambda key: int(key.name))]
    return {key.name: _with_lists(value) for key, value in tree.items()}
