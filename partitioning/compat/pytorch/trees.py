"""Arrays and modules by their paths, in pytrees of parameters and in nnx modules."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from partitioning.rules import nearest
from partitioning.state import Path, key_names
from partitioning.state.boxes import (
    array_of,
    flatten_state,
    is_carrier,
    is_metadata,
    is_optimizer_variable,
    is_parameter_variable,
)
from partitioning.state.naming import parameter_roots


def is_nnx_module(x: Any) -> bool:
    """Whether `x` is an nnx module, whose parameters are variables in its attributes."""
    nnx = sys.modules.get('flax.nnx')  # before it is imported, there are no nnx modules
    return nnx is not None and isinstance(x, nnx.Module)


def is_variables(module: Any) -> bool:
    """Whether `module` is linen variables, in which the parameters are one of the collections."""
    return isinstance(module, Mapping) and not is_nnx_module(module) and 'params' in module


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or a number, and not a string."""
    array = array_of(leaf)
    return hasattr(array, 'shape') or isinstance(array, int | float | complex)


def parameters(module: Any) -> dict[Path, Any]:
    """The parameters of a module by path, in the boxes or variables that carry their names.

    These are the collection 'params' of linen variables, by the path below it; the Params of an nnx
    module or state, a shared one once; and all arrays of any other pytree.

    Raises:
      ValueError: if there are no parameters.
    """
    found = _parameters_and_others(module)[0]
    if not found:
        raise ValueError(f'a {type(module).__name__} without arrays has nothing to lay out')
    return found


def parameters_of_state(state: Any) -> Any:
    """The parameters of a train state: its linen variables, its nnx variables, or a nested dict."""
    flat = flatten_state(state)
    roots = parameter_roots(flat.entries)
    if any(entry.carrier == 'variable' for entry in flat.entries) or len({*roots.values()}) != 1:
        return state
    nested: dict[str, Any] = {}
    for entry in flat.entries:
        if entry.path in roots:
            *above, last = entry.path[len(roots[entry.path]) :] or ('',)
            tree = nested
            for key in above:
                tree = tree.setdefault(key, {})
            tree[last] = entry.leaf
    return nested


def buffers(module: Any) -> dict[Path, Any]:
    """The other arrays of a module by path: caches, statistics, random number states.

    These are the other collections of linen variables, as in 'cache/key', and the other variables
    of an nnx module or state. Any other pytree has none. The state of an optimizer is left out: its
    paths end in the paths of the parameters, and its layout follows theirs.
    """
    followed, others = _parameters_and_others(module)

    def follows(path: Path) -> bool:  # to the end, or up to one more key
        return any(path[n:] in followed or path[n:-1] in followed for n in range(len(path)))

    return {p: x for p, x in others.items() if not is_optimizer_variable(x) and not follows(p)}


def _parameters_and_others(module: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
    leaves = dict(arrays_by_path(nnx_state(module)))
    if is_variables(module):
        found = {path: x for path, x in leaves.items() if path[0] == 'params'}
    else:
        found = {path: x for path, x in leaves.items() if is_parameter_variable(x)} or leaves
    others = {path: x for path, x in leaves.items() if path not in found}
    return {p[1:] if is_variables(module) else p: x for p, x in found.items()}, others


def arrays_by_path(tree: Any) -> list[tuple[Path, Any]]:
    """The arrays and numbers of a tree with their paths, in the boxes that carry their names."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_carrier)
    return [(key_names(path), x) for path, x in flat if not is_metadata(x) and is_array(x)]


def other_names(module: Any, known: Iterable[Path]) -> dict[Path, Path]:
    """The further paths of shared parameters of an nnx module, with the path in `parameters`."""
    if not is_nnx_module(module):
        return {}
    leaves = [(path, x) for path, x in arrays_by_path(module) if is_parameter_variable(x)]
    paths = {*known}
    first = {id(x): path for path, x in leaves if path in paths}
    return {path: first[id(x)] for path, x in leaves if path not in paths}


_WILDCARDS = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}


def is_pattern(name: str) -> bool:
    """Whether a name stands for several paths, 'layers/*/kernel'."""
    return '*' in name or '?' in name


class Places:
    """The paths of parameters and of the modules that hold them, to look up by name."""

    def __init__(self, paths: Iterable[Path]):
        self._paths = [*paths]
        self._inner = {path[:n] for path in self._paths for n in range(1, len(path) + 1)}

    def __contains__(self, path: Path) -> bool:
        return path in self._inner

    def find(self, name: str) -> Path:
        """The path of a name, which separates its keys by '/' or '.'.

        Raises:
          ValueError: if there is no such parameter or module; the message has the nearest name.
        """
        for keys in (name.split('/'), name.split('.'), name.replace('.', '/').split('/')):
            path = tuple(keys)
            path = path[1:] if path[0] == 'params' and path not in self._inner else path
            if path in self._inner:
                return path
        hint = nearest(name.replace('.', '/'), map('/'.join, self._inner))
        raise ValueError(
            f'there is no parameter or module {name!r}.{hint} The parameters are {self._listed()}'
        )

    def match(self, pattern: str, *, modules: bool = False) -> list[Path]:
        """The paths, of modules too if they count, that a pattern matches as a whole.

        Its keys are separated by '/' or, if it has no '/', by '.'. '*' and '?' stand for parts of
        one key, and '**' for any number of keys. Raises ValueError if no path matches.
        """
        text = pattern if '/' in pattern else pattern.replace('.', '/')
        parts = re.split(r'(\*\*/|\*\*|\*|\?)', text.removeprefix('params/'))
        expression = re.compile(''.join(_WILDCARDS.get(part, re.escape(part)) for part in parts))
        paths = [*self._paths, *(self._inner - {*self._paths})] if modules else self._paths
        if found := [path for path in paths if expression.fullmatch('/'.join(path))]:
            return found
        raise ValueError(
            f"{pattern!r} matches no parameter: '*' stands for one key, and '**' for any number. "
            f'The parameters are {self._listed()}'
        )

    def _listed(self) -> str:
        more = f' and {len(self._paths) - 6} more' if len(self._paths) > 6 else ''
        return ', '.join(sorted(map('/'.join, self._paths))[:6]) + more


def subtree(tree: Any, path: Sequence[str]) -> Any:
    """The node at a path of a pytree or an nnx module; LookupError if the path does not exist."""
    for key in path:
        tree = _children(tree)[key]
    return tree


def replace_subtree(tree: Any, path: Sequence[str], new: Any) -> Any:
    """The tree with `new` at a path; an nnx module is changed in place."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    children = _children(tree)
    below = replace_subtree(children[key], rest, new)
    if not is_nnx_module(tree):
        structure: Any = jax.tree.structure(tree, is_leaf=lambda x: x is not tree)
        return structure.unflatten({**children, key: below}.values())
    if is_carrier(children[key]) and not is_carrier(below):
        below = children[key].replace(below)  # keeps the variable, with its type and metadata
    if isinstance(tree, Mapping):
        tree[key] = below  # type: ignore[index]
    elif isinstance(tree, Sequence):
        tree[int(key)] = below  # type: ignore[index]
    else:
        setattr(tree, key, below)
    return tree


def nnx_state(module: Any) -> Any:
    """The state of an nnx module; anything else is returned unchanged."""
    if not is_nnx_module(module):
        return module
    from flax import nnx  # already imported, because the module is an nnx module

    return nnx.state(module)


def _children(tree: Any) -> dict[str, Any]:
    """The children of a node of a pytree, by key."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    return {key_names(path)[0]: child for path, child in flat if path}
