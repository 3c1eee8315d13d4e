"""The arrays of a state that have names, and which of them are the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from partitioning.state.boxes import (
    Carrier,
    Path,
    array_of,
    carried_names,
    carrier,
    is_carrier,
    is_metadata,
    is_optimizer_variable,
    is_parameter_variable,
    shape_of,
)
from partitioning.state.follow import Parameter, Parameters
from partitioning.state.path_names import PathRules, names_by_path

Entries = Sequence[tuple[Path, Any]]  # the leaves of a state, whatever carries names as one


class NamedArrays(NamedTuple):
    """What is known of a state before its leaves are looked at one by one.

    Attributes:
      named: the arrays with names.
      parameters: those of them that are parameters, each with the path of its tree.
      trees: the paths of trees of parameters, where they have one of their own.
      to_follow: the parameters, to be found by the ends of paths.
    """

    named: Mapping[Path, Parameter]
    parameters: Mapping[Path, Path]
    trees: set[Path]
    to_follow: Parameters


def named_arrays(entries: Entries, overrides: PathRules) -> NamedArrays:
    """The arrays with names, carried or given by path rules, and the parameters among them.

    Raises:
      ValueError: none has names; path rules that leave a parameter out, or name nothing.
    """
    named = _carried(entries) | _overridden(entries, overrides)
    if not named:
        raise ValueError(
            'Missing axis names: no parameter of the state carries any. Create parameters with '
            'flax.linen.with_logical_partitioning(init, names), name them by path with '
            "params_axes_names_override=[('.*/kernel', ('embed', 'mlp')), ...], or give the state "
            'as_logical_axes()'
        )
    optimizer = {path for path, leaf in entries if is_optimizer_variable(leaf)}
    roots = _roots([path for path in named if path not in optimizer] or list(named))
    by_path: dict[Path, list[Parameter]] = {}
    for path, root in roots.items():
        by_path.setdefault(path[len(root) :], []).append(named[path])
    if len(roots) == 1 and not any('params' in path for path in roots):
        # Perhaps a lone array: then its statistics have no key of its own.
        by_path.setdefault((), list(next(iter(by_path.values()))))
    return NamedArrays(named, roots, set(roots.values()) - {()}, Parameters(by_path))


def _carried(entries: Entries) -> dict[Path, Parameter]:
    """The arrays that carry names, or whose collection has names beside it."""
    carriers = [(path, leaf) for path, leaf in entries if is_carrier(leaf)]
    held = dict(entries) if any(is_metadata(leaf) for _, leaf in carriers) else {}
    named = {}
    for path, leaf in carriers:
        carried = carried_names(leaf)
        if carried.names is None:
            continue
        target, array = path, array_of(leaf)
        if isinstance(array, dict | list | tuple):
            raise ValueError(
                f'{"/".join(path)}: a box with names {carried.names} around several arrays; put '
                'each array in a box of its own'
            )
        if is_metadata(leaf):
            target = _described(path)
            if target not in held:
                raise ValueError(
                    f'{"/".join(path)} names an array that is not there: {"/".join(target)}'
                )
            array = array_of(held[target])
        named[target] = Parameter(
            target, carried.names, shape_of(array), carried.axes_as_names, carried.rules
        )
    return named


def _described(path: Path) -> Path:
    """The array whose names are at `path`: params_axes/dense/kernel_axes -> params/dense/kernel."""
    place = next((i for i, key in enumerate(path) if key.endswith('_axes')), len(path) - 1)
    collection, name = path[place].removesuffix('_axes'), path[-1].removesuffix('_axes')
    return (*path[:place], collection, *path[place + 1 : -1], name)


def _overridden(entries: Entries, overrides: PathRules) -> dict[Path, Parameter]:
    """The parameters that path rules name; every one that carries no names must be among them."""
    if not overrides:
        return {}
    arrays = [(path, x) for path, x in entries if not is_metadata(x)]
    described = {_described(path) for path, x in entries if is_metadata(x)}
    variables = [path for path, x in arrays if is_parameter_variable(x)]
    if variables:
        roots = dict.fromkeys(variables, _shared_keys(variables))
    else:
        roots = _roots([path for path, _ in arrays])
    texts = [
        ('/'.join(path), '/'.join(path[len(roots[path]) :])) if path in roots else ('/'.join(path),)
        for path, _ in arrays
    ]
    unnamed = [
        i
        for i, (path, x) in enumerate(arrays)
        if path in roots and path not in described and shape_of(array_of(x))
        if not is_carrier(x) or (carrier(x) is Carrier.VARIABLE and not carried_names(x).names)
    ]
    found = names_by_path(texts, overrides, unnamed=unnamed)
    return {
        arrays[i][0]: Parameter(arrays[i][0], names, shape_of(array_of(arrays[i][1])))
        for i, names in found.items()
    }


def _shared_keys(paths: Sequence[Path]) -> Path:
    """The keys that all paths begin with, the last of each left out."""
    first, *others = (path[:-1] for path in paths)
    differ = (
        next((i for i, key in enumerate(first) if other[i : i + 1] != (key,)), len(first))
        for other in others
    )
    return first[: min(differ, default=len(first))]


def _roots(paths: Sequence[Path]) -> dict[Path, Path]:
    """The parameters among the paths of named arrays, each with the path of its tree.

    What is below the first 'params' of a path, as near to the top as there is one: optimizers have
    states of that name deeper down. Without any, all, in one tree.
    """
    depths = {path: path.index('params') + 1 for path in paths if 'params' in path}
    if not depths:
        return dict.fromkeys(paths, _shared_keys(paths))
    least = min(depths.values())
    return {path: path[:depth] for path, depth in depths.items() if depth == least}
