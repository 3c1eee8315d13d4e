"""Arrays and modules by their paths, in pytrees of parameters and in nnx modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from partitioning.rules import nearest
from partitioning.state import Path, key_names
from partitioning.state.boxes import (
    array_of,
    is_carrier,
    is_metadata,
    is_optimizer_variable,
    is_parameter_variable,
)


def is_nnx_module(x: Any) -> bool:
    """True for an nnx module, whose parameters are variables in its attributes."""
    nnx = sys.modules.get('flax.nnx')  # nothing is one before that is imported
    return nnx is not None and isinstance(x, nnx.Module)


def parameters(module: Any) -> dict[Path, Any]:
    """The arrays to plan, in whatever carries their names, by path.

    Of linen variables those below 'params', by the path below it; of an nnx module or state its
    Params, one that several attributes share once; of any other pytree all arrays.

    Raises:
      ValueError: there are none.
    """
    if is_variables(module):
        found = dict(arrays_by_path(module['params']))
    else:
        leaves = arrays_by_path(_state(module))
        found = dict([(path, x) for path, x in leaves if is_parameter_variable(x)] or leaves)
    if not found:
        raise ValueError(f'a {type(module).__name__} without any arrays has nothing to plan')
    return found


def buffers(module: Any) -> dict[Path, Any]:
    """The arrays beside the parameters: caches, statistics, states of random numbers.

    Of linen variables those of the other collections, 'cache/key'; of an nnx module or state its
    other variables; of any other pytree none. What an optimizer keeps, whose paths end in those of
    the parameters, follows them and is none.
    """
    if is_variables(module):
        others = [(path, x) for path, x in arrays_by_path(module) if path[0] != 'params']
    else:
        leaves = arrays_by_path(_state(module))
        others = [(path, x) for path, x in leaves if not is_parameter_variable(x)]
        if len(others) == len(leaves):
            return {}
    followed = {*parameters(module)}
    return {
        path: x
        for path, x in others
        if not is_optimizer_variable(x) and not _follows(path, followed)
    }


def _follows(path: Path, followed: set[Path]) -> bool:
    """Whether a path ends in one of these, or one key further."""
    return any(path[n:] in followed or path[n:-1] in followed for n in range(len(path)))


def arrays_by_path(tree: Any) -> list[tuple[Path, Any]]:
    """The arrays and numbers of a tree with their paths, in whatever carries their names."""
    return [(path, x) for path, x in _leaves(tree) if not is_metadata(x) and is_array(x)]


def is_variables(module: Any) -> bool:
    """True for linen's variables, whose parameters are one collection of several."""
    return isinstance(module, Mapping) and not is_nnx_module(module) and 'params' in module


def other_names(module: Any, known: Iterable[Path]) -> dict[Path, Path]:
    """For each path by which an nnx module has a parameter again, that of `parameters`."""
    if not is_nnx_module(module):
        return {}
    leaves = [(path, x) for path, x in _leaves(module) if is_parameter_variable(x)]
    paths = {*known}
    first = {id(x): path for path, x in leaves if path in paths}
    return {path: first[id(x)] for path, x in leaves if path not in paths}


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or a number, and not a text that a tree holds beside them."""
    array = array_of(leaf)
    return hasattr(array, 'shape') or isinstance(array, int | float | complex)


class Places:
    """The paths of parameters and of the modules that hold them, to look up by their names."""

    def __init__(self, paths: Iterable[Path]):
        self._paths = [*paths]
        self._inner = {path[:n] for path in self._paths for n in range(1, len(path) + 1)}

    def __contains__(self, path: Path) -> bool:
        return path in self._inner

    def find(self, name: str) -> Path:
        """The path of a name, which has '/' or '.' between its keys.

        Raises:
          ValueError: it is no parameter and no module; with the nearest one.
        """
        for keys in (name.split('/'), name.split('.'), name.replace('.', '/').split('/')):
            path = tuple(keys)
            path = path[1:] if path[0] == 'params' and path not in self._inner else path
            if path in self._inner:
                return path
        hint = nearest(name.replace('.', '/'), map('/'.join, self._inner))
        listed = ', '.join(sorted(map('/'.join, self._paths))[:6])
        more = f' and {len(self._paths) - 6} more' if len(self._paths) > 6 else ''
        raise ValueError(f'{name!r} is no parameter or module.{hint} There are {listed}{more}')


def subtree(tree: Any, path: Sequence[str]) -> Any:
    """What is at a path of a pytree or an nnx module.

    Raises:
      LookupError: nothing is there.
    """
    for key in path:
        tree = _children(tree)[key]
    return tree


def replace_subtree(tree: Any, path: Sequence[str], new: Any) -> Any:
    """The tree with something else at a path; an nnx module is changed in place."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    children = _children(tree)
    below = replace_subtree(children[key], rest, new)
    if not is_nnx_module(tree):
        structure: Any = jax.tree.structure(tree, is_leaf=lambda x: x is not tree)
        return structure.unflatten({**children, key: below}.values())
    if is_carrier(children[key]) and not is_carrier(below):
        below = children[key].replace(below)  # an array: it stays the parameter that it was
    if isinstance(tree, Mapping):
        tree[key] = below  # type: ignore[index]
    elif isinstance(tree, Sequence):
        tree[int(key)] = below  # type: ignore[index]
    else:
        setattr(tree, key, below)
    return tree


def _state(module: Any) -> Any:
    if not is_nnx_module(module):
        return module
    from flax import nnx  # imported already, or there would be no such module

    return nnx.state(module)


def _children(tree: Any) -> dict[str, Any]:
    """What a node of a pytree holds, by key."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    return {key_names(path)[0]: child for path, child in flat if path}


def _leaves(tree: Any) -> list[tuple[Path, Any]]:
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_carrier)
    return [(key_names(path), x) for path, x in flat]
