"""Arrays and modules by their paths, in pytrees of parameters and in nnx modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from partitioning.rules import nearest
from partitioning.state import Path, key_names
from partitioning.state.boxes import is_carrier, is_metadata, is_parameter_variable


def is_nnx_module(x: Any) -> bool:
    """True for an nnx module, whose parameters are variables in its attributes."""
    nnx = sys.modules.get('flax.nnx')  # nothing is one before that is imported
    return nnx is not None and isinstance(x, nnx.Module)


def parameters(module: Any) -> dict[Path, Any]:
    """The arrays to plan, in whatever carries their names, by path.

    Of linen variables those below 'params', by the path below it; of an nnx module or state its
    Params; of any other pytree all arrays.

    Raises:
      ValueError: there are none.
    """
    flat = jax.tree_util.tree_leaves_with_path(held_parameters(module), is_leaf=is_carrier)
    leaves = [(key_names(path), x) for path, x in flat if not is_metadata(x)]
    variables = [(path, x) for path, x in leaves if is_parameter_variable(x)]
    found = dict(variables or leaves)
    if not found:
        raise ValueError(f'a {type(module).__name__} without any arrays has nothing to plan')
    return found


def held_parameters(module: Any) -> Any:
    """The tree of parameters: what is below 'params' of linen variables, else all of it."""
    return module['params'] if isinstance(module, Mapping) and 'params' in module else module


def split_path(name: str, known: Iterable[Path]) -> Path:
    """A path as a plan writes it, with '/' or with '.' between its keys.

    Raises:
      ValueError: it is the beginning of none of the known paths; with the nearest ones.
    """
    paths = [*known]
    inner = {path[:n] for path in paths for n in range(1, len(path) + 1)}
    for separator in '/', '.':
        path = tuple(name.split(separator))
        path = path[1:] if path[0] == 'params' and path not in inner else path
        if path in inner:
            return path
    names = ['/'.join(path) for path in inner]
    listed = ', '.join(sorted('/'.join(path) for path in paths)[:6])
    more = f' and {len(paths) - 6} more' if len(paths) > 6 else ''
    hint = nearest(name.replace('.', '/'), names)
    raise ValueError(f'{name!r} is no parameter or module.{hint} There are {listed}{more}')


def subtree(tree: Any, path: Sequence[str]) -> Any:
    """What is at a path of nested mappings, sequences and nnx modules."""
    for key in path:
        tree = _child(tree, key)
    return tree


def replace_subtree(tree: Any, path: Sequence[str], new: Any) -> Any:
    """The tree with something else at a path; an nnx module is changed in place."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    below = replace_subtree(_child(tree, key), rest, new)
    if is_nnx_module(tree):
        if isinstance(tree, Sequence):
            tree[int(key)] = below  # type: ignore[index]
        else:
            setattr(tree, key, below)
        return tree
    if isinstance(tree, Mapping):
        made = {k: below if str(k) == key else x for k, x in tree.items()}
        return made if type(tree) is dict else type(tree)(made)  # type: ignore[call-arg]
    return type(tree)(below if str(i) == key else x for i, x in enumerate(tree))


def _child(tree: Any, key: str) -> Any:
    if isinstance(tree, Mapping):
        return next(x for k, x in tree.items() if str(k) == key)
    if isinstance(tree, Sequence):
        return tree[int(key)]
    return getattr(tree, key)
