"""Any train state -> what each of its leaves is, and where it has its axes from, in one walk.

Parameters carry names (linen's boxes, T5X's `params_axes`, nnx's metadata) or are named by path
rules. Every other leaf gets its axes from the parameter that it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from partitioning.rules import AxisNames
from partitioning.state.boxes import (
    CarriedNames,
    Carrier,
    Path,
    array_of,
    carried_names,
    carrier,
    is_carrier,
    is_optimizer_variable,
    is_parameter_variable,
    key_names,
    shape_of,
)
from partitioning.state.follow import Dims, Parameter, Parameters
from partitioning.state.path_names import PathRules, check_rank, names_by_path

Role = Literal['parameters', 'optimizer', 'other']


class Leaf(NamedTuple):
    """One array of a state.

    Attributes:
      path: its place in the state.
      array: the array, or its ShapeDtypeStruct; None where a state names its axes without it.
      role: what it is there for.
      parameter: what it takes its axes from, itself where it has names; None: from nothing.
      dims: for each of its dimensions that of `parameter` which it is; None: none.
      said_none: whether the state itself says that it has no axes (T5X's None).
    """

    path: Path
    array: Any
    role: Role
    parameter: Parameter | None
    dims: Dims
    said_none: bool = False

    def pick(self, of_parameter: Sequence[Any]) -> tuple[Any, ...]:
        """Entries of something of the parameter, one a dimension, for the leaf's dimensions."""
        return tuple(None if d is None else of_parameter[d] for d in self.dims)

    @property
    def names(self) -> AxisNames:
        """The logical axes of its dimensions."""
        return AxisNames(*(self.pick(self.parameter.names) if self.parameter else self.dims))


class StateLeaves(NamedTuple):
    """The leaves of a state in its order, and the tree they make.

    Attributes:
      leaves: a Leaf for each array; T5X's AxisMetadata are there as they are.
      treedef: the tree, with each box, variable and AxisMetadata as a leaf.
    """

    leaves: tuple[Leaf | Any, ...]
    treedef: Any

    def map(self, function: Callable[[Leaf], Any]) -> Any:
        """The tree with `function` of every Leaf in its place."""
        return self.treedef.unflatten(
            [function(x) if isinstance(x, Leaf) else x for x in self.leaves]
        )

    @property
    def arrays(self) -> list[Leaf]:
        """The leaves without the AxisMetadata."""
        return [x for x in self.leaves if isinstance(x, Leaf)]


class _Known(NamedTuple):
    """What is known of a state before its leaves are looked at one by one.

    Attributes:
      named: the arrays with names.
      roots: those of them that are parameters, each with the path of its tree.
      trees: the paths of trees of parameters, where they have one of their own.
      parameters: to be followed.
    """

    named: Mapping[Path, Parameter]
    roots: Mapping[Path, Path]
    trees: set[Path]
    parameters: Parameters


def walk(state: Any, overrides: PathRules = ()) -> StateLeaves:
    """What the leaves of a train state are.

    Args:
      state: a pytree, abstract or not, whose parameters carry names; or an object with T5X's
        `as_logical_axes()`.
      overrides: path rules that name parameters, before the names that they carry.

    Raises:
      ValueError: a parameter carries no names or too few, or a leaf that follows a parameter has a
        shape that its parameter's does not explain.
    """
    if hasattr(state, 'as_logical_axes') and not getattr(state, 'names_follow_parameters', False):
        return _as_it_says(state)
    flat, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_carrier)
    entries = [(key_names(path), leaf) for path, leaf in flat]
    named = _named(entries) | _named_by_path(entries, overrides)
    if not named:
        raise ValueError(
            'Missing axis names: no parameter of the state carries any. Create parameters with '
            'flax.linen.with_logical_partitioning(init, names), name them by path with '
            "params_axes_names_override=[('.*/kernel', ('embed', 'mlp')), ...], or give the state "
            'as_logical_axes()'
        )
    optimizer = {path for path, leaf in entries if is_optimizer_variable(leaf)}
    roots = _roots([path for path in named if path not in optimizer] or list(named))
    known = _Known(named, roots, set(roots.values()) - {()}, _parameters(named, roots))
    leaves = [_leaf(path, x, known) for path, x in entries]
    depth = max(1, min(map(len, roots.values())))
    followed = {x.path[:depth] for x in leaves if isinstance(x, Leaf) and x.role == 'optimizer'}
    return StateLeaves(
        tuple(
            x._replace(role='optimizer')
            if isinstance(x, Leaf) and x.role == 'other' and x.path[:depth] in followed
            else x
            for x in leaves
        ),
        treedef,
    )


def get_logical_axes(state: Any, overrides: PathRules = ()) -> Any:
    """The logical axes of a train state: the same tree with AxisNames in place of every array.

    Arguments and errors are those of `walk`. Of a state with T5X's `as_logical_axes()`, its result.
    """
    if hasattr(state, 'as_logical_axes') and not getattr(state, 'names_follow_parameters', False):
        return state.as_logical_axes()
    return walk(state, overrides).map(lambda leaf: leaf.names)


def _named(entries: Sequence[tuple[Path, Any]]) -> dict[Path, Parameter]:
    """The arrays that carry names, or whose collection has names beside it."""
    carriers = [(path, leaf) for path, leaf in entries if is_carrier(leaf)]
    held = dict(entries) if any(_is_metadata(leaf) for _, leaf in carriers) else {}
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
        if _is_metadata(leaf):
            target = _described(path)
            if target not in held:
                raise ValueError(
                    f'{"/".join(path)} names an array that is not there: {"/".join(target)}'
                )
            array = array_of(held[target])
        named[target] = _parameter(target, carried, shape_of(array))
    return named


def _parameter(path: Path, carried: CarriedNames, shape: tuple[int, ...]) -> Parameter:
    return Parameter(path, carried.names or (), shape, carried.axes_as_names, carried.rules)


def _is_metadata(leaf: Any) -> bool:
    return carrier(leaf) is Carrier.METADATA


def _described(path: Path) -> Path:
    """The array whose names are at `path`: params_axes/dense/kernel_axes -> params/dense/kernel."""
    place = next((i for i, key in enumerate(path) if key.endswith('_axes')), len(path) - 1)
    collection, name = path[place].removesuffix('_axes'), path[-1].removesuffix('_axes')
    return (*path[:place], collection, *path[place + 1 : -1], name)


def _named_by_path(
    entries: Sequence[tuple[Path, Any]], overrides: PathRules
) -> dict[Path, Parameter]:
    """The parameters that path rules name; every one that carries no names must be among them."""
    if not overrides:
        return {}
    arrays = [(path, x) for path, x in entries if not _is_metadata(x)]
    described = {_described(path) for path, x in entries if _is_metadata(x)}
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


def _parameters(named: Mapping[Path, Parameter], roots: Mapping[Path, Path]) -> Parameters:
    by_path: dict[Path, list[Parameter]] = {}
    for path, root in roots.items():
        by_path.setdefault(path[len(root) :], []).append(named[path])
    if len(roots) == 1:  # a lone array: its statistics have no key of its own
        by_path.setdefault((), list(next(iter(by_path.values()))))
    return Parameters(by_path)


def _leaf(path: Path, leaf: Any, known: _Known) -> Leaf | Any:
    if _is_metadata(leaf):
        return leaf
    array = array_of(leaf)
    shape = shape_of(array)
    own = known.named.get(path)
    if own is not None and path in known.roots:
        check_rank('/'.join(path), own.names, shape)
        return Leaf(path, array, 'parameters', own, tuple(range(len(shape))))
    if own is None and shape and _is_missing(path, leaf, known.trees):
        raise ValueError(_missing(path, leaf, shape))
    owner, dims = known.parameters.follow(path, shape)
    role: Role = 'other' if owner is None else 'optimizer'
    # Names that came along from the parameter are of no use for a statistic of another rank.
    if own is not None and len(own.names) == len(shape):
        owner, dims = own, tuple(range(len(shape)))
    return Leaf(path, array, role, owner, dims)


def _is_missing(path: Path, leaf: Any, trees: set[Path]) -> bool:
    """Whether a leaf without names should have some: it is a parameter."""
    if carrier(leaf) is Carrier.VARIABLE:
        return is_parameter_variable(leaf)
    return any(path[: len(tree)] == tree for tree in trees)


def _missing(path: Path, leaf: Any, shape: tuple[int, ...]) -> str:
    nothing = (None,) * len(shape)
    how = f'create it with flax.linen.with_logical_partitioning(init, {nothing})'
    if carrier(leaf) is Carrier.VARIABLE:
        how = f'create it with the metadata out_sharding={nothing}'
    return (
        f'Missing axis names for parameters: {"/".join(path)} of shape {shape} has none, but '
        f'others beside it do. To replicate it, {how}, or name it in params_axes_names_override'
    )


def _as_it_says(state: Any) -> StateLeaves:
    """The leaves of a state that names its axes itself, None where it has no names."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        state.as_logical_axes(), is_leaf=lambda x: x is None or isinstance(x, tuple)
    )
    held = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_carrier)
    arrays = {key_names(path): array_of(x) for path, x in held}
    return StateLeaves(
        tuple(_leaf_as_said(key_names(path), names, arrays) for path, names in flat), treedef
    )


def _leaf_as_said(path: Path, names: Any, arrays: Mapping[Path, Any]) -> Leaf:
    array = arrays.get(path)
    keys = set(path)
    role: Role = 'other'
    if keys & {'opt_state', 'param_states', 'state'}:
        role = 'optimizer'
    elif keys & {'params', 'target'}:
        role = 'parameters'
    if names is None:
        return Leaf(path, array, role, None, (None,) * len(shape_of(array)), said_none=True)
    shape = None if array is None else shape_of(array)
    return Leaf(path, array, role, Parameter(path, tuple(names), shape), tuple(range(len(names))))
