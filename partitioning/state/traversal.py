"""Walks over a train state, and finds for each leaf its role and the parameter that names it.

Parameters carry names (linen's boxes, T5X's `params_axes`, nnx's metadata) or get them from path
rules. Every other leaf takes its names from the parameter that it follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax

from partitioning.rules import (
    AxisNames,
    PathRules,
    Problem,
    ProblemError,
    Report,
    names_rank_problem,
    raise_problem,
)
from partitioning.state.boxes import (
    Entry,
    FlatState,
    Parameter,
    Path,
    array_leaves,
    array_of,
    flatten_state,
    is_carrier,
    is_metadata,
    key_names,
    shape_of,
)
from partitioning.state.follow import Dims
from partitioning.state.naming import NamedArrays, named_arrays

Role = Literal['parameters', 'optimizer', 'other']

# The keys of optimizer state and of parameters in states with as_logical_axes(), such as T5X's.
_OPTIMIZER_KEYS = frozenset({'opt_state', 'param_states', 'state'})
_PARAMETER_KEYS = frozenset({'params', 'target'})


class Leaf(NamedTuple):
    """One array of a state.

    Attributes:
      path: the place of the array in the state.
      array: the array or its ShapeDtypeStruct; None if a state names axes for something that is not
        one array.
      role: what the array is for.
      parameter: the parameter that names the dimensions, which is the array itself if it has names;
        None if the array has no names and follows no parameter.
      dims: for each dimension, the index of the matching dimension of `parameter`, or None.
      said_none: whether the state itself says that the array has no axes (T5X's None).
      problematic: whether a problem with the names was reported.
      covered: the arrays that a T5X None stands for, if it stands for a whole subtree.
    """

    path: Path
    array: Any
    role: Role
    parameter: Parameter | None
    dims: Dims
    said_none: bool = False
    problematic: bool = False
    covered: tuple[tuple[Path, Any], ...] = ()

    def pick(self, of_parameter: Sequence[Any], otherwise: Any = None) -> tuple[Any, ...]:
        """The entry for each dimension of the leaf, from one entry per parameter dimension."""
        return tuple([otherwise if d is None else of_parameter[d] for d in self.dims])

    @property
    def names(self) -> AxisNames:
        """The logical axes of the dimensions."""
        return AxisNames(*(self.pick(self.parameter.names) if self.parameter else self.dims))


LeafT = TypeVar('LeafT')


@dataclasses.dataclass(frozen=True)
class StateTree(Generic[LeafT]):
    """The leaves of a state in the order of the state, and the tree that they make.

    Attributes:
      leaves: one entry per array, and T5X's AxisMetadata unchanged.
      treedef: the tree, in which each box, variable and AxisMetadata is a leaf.
    """

    leaves: tuple[LeafT | Any, ...]
    treedef: Any

    def map(self, function: Callable[[LeafT], Any]) -> Any:
        """The tree of the state with `function(entry)` in place of each array."""
        # Entries are NamedTuples, and AxisMetadata is not a tuple.
        return self.treedef.unflatten(
            [function(x) if isinstance(x, tuple) else x for x in self.leaves]  # type: ignore[arg-type]
        )


def walk(
    state: Any,
    overrides: PathRules = (),
    report: Report = raise_problem,
    *,
    exact: Mapping[Path, tuple[Any, ...]] | None = None,
    said: Any = None,
) -> StateTree[Leaf]:
    """Finds the role, the parameter and the axis names of each leaf of a train state.

    Args:
      state: a pytree, abstract or not, whose parameters carry names, or its FlatState; or an
        object with T5X's `as_logical_axes()`.
      overrides: path rules that name parameters; they win over the names that parameters carry.
      report: is called with the path and the problem of each array that lacks the names it should
        have, or does not fit its parameter; by default it raises.
      exact: the names of arrays by their exact paths, as for a plan that is imposed on the state.
        If given, they are the only source of names; a name may be any object.
      said: the logical axes to use in place of the result of `as_logical_axes()`.

    Raises:
      ValueError: if no parameter has names, if a path rule has no effect, or if `report` raises it.
    """
    if exact is None and (said is not None or says_itself(state)):
        if overrides:
            raise ValueError(
                'AxisRules(names=...) has no effect on a state that names its axes itself with '
                'as_logical_axes(): remove one of the two'
            )
        return _as_it_says(state, state.as_logical_axes() if said is None else said)
    flat = flatten_state(state)
    known = named_arrays(flat.entries, overrides, exact)
    leaves = [_leaf(entry, known, report) for entry in flat.entries]
    # An array next to statistics of parameters, such as a count, belongs to the optimizer too.
    depth = max(1, min(map(len, known.trees), default=1))
    followed = {x.path[:depth] for x in leaves if type(x) is Leaf and x.role == 'optimizer'}
    for n, x in enumerate(leaves):
        if type(x) is Leaf and x.role == 'other' and x.path[:depth] in followed:
            leaves[n] = x._replace(role='optimizer')
    return StateTree(tuple(leaves), flat.treedef)


def says_itself(state: Any) -> bool:
    """Whether a state names the axes of all its arrays, including the optimizer's."""
    return hasattr(state, 'as_logical_axes') and not getattr(
        state, 'names_follow_parameters', False
    )


def get_logical_axes(state: Any, overrides: PathRules = ()) -> Any:
    """The logical axes of a train state: the same tree with AxisNames in place of every array.

    The arguments and errors are as in `walk`. If the state has T5X's `as_logical_axes()`, the
    result of that method is returned.
    """
    if says_itself(state):
        return state.as_logical_axes()
    return walk(state, overrides).map(lambda leaf: leaf.names)


def _leaf(entry: Entry, known: NamedArrays, report: Report) -> Leaf | Any:
    path, leaf, array, shape, carrier, _ = entry
    own = known.parameters.get(path)
    if own is not None and len(own.names) == len(shape):
        return Leaf(path, array, 'parameters', own, tuple(range(len(shape))))
    if carrier == 'metadata':
        return leaf
    try:
        role, owner, dims = _origin(path, shape, known)
        return Leaf(path, array, role, owner, dims)
    except ProblemError as error:
        problem = error.problem
    report('/'.join(path), problem)  # an error that it raises has no other one before it
    return Leaf(path, array, 'other', None, (None,) * len(shape), problematic=True)


def _origin(
    path: Path, shape: tuple[int, ...], known: NamedArrays
) -> tuple[Role, Parameter | None, Dims]:
    """The role of a leaf, the parameter it follows, and how their dimensions correspond."""
    role: Role = 'parameters'
    own = known.parameters.get(path)
    if own is None and known.overridden:
        role, own = 'other', known.overridden.get(path)
    if own is None:
        own = known.carried.get(path)
        if known.missing and path in known.missing:
            raise ProblemError(Problem('names', known.missing[path]))
        owner, dims = known.to_follow.follow(path, shape)
        role = 'other' if owner is None else 'optimizer'
        if own is None:
            return role, owner, dims
        if owner is not None and own.carried == known.carried.get(owner.path, owner).carried:
            return role, owner, dims  # the names came along with the copy
        if owner is not None and len(own.names) == len(owner.shape or ()):
            # The names are nnx's optimizer_sharding, which replaces the names of the parameter.
            return role, own._replace(shape=owner.shape), dims
    if len(own.names) != len(shape):
        raise ProblemError(names_rank_problem(own.names, shape))
    return role, own, tuple(range(len(shape)))


def _as_it_says(state: Any, said: Any) -> StateTree[Leaf]:
    """The leaves of a state that names its axes itself, with None where it gives no names."""
    state = state.state if isinstance(state, FlatState) else state
    treedef: Any  # the type that jax declares lacks flatten_up_to

    def is_leaf(x: Any) -> bool:  # an optax chain's state is a tuple too, but not of names
        is_names = type(x) is tuple and {str} <= {*map(type, x)} <= {str, type(None)}
        return x is None or is_names

    flat, treedef = jax.tree_util.tree_flatten_with_path(said, is_leaf=is_leaf)
    named = [(key_names(path), names) for path, names in flat]
    try:
        held = treedef.flatten_up_to(state)  # much faster than matching by path
    except (ValueError, TypeError, KeyError):
        held = _matched_by_path(named, state)
    return StateTree(
        tuple(_leaf_as_said(path, names, x) for (path, names), x in zip(named, held, strict=True)),
        treedef,
    )


def _matched_by_path(named: Sequence[tuple[Path, Any]], state: Any) -> list[Any]:
    """For each path, its array, or the arrays below it by their paths, or None if it has none.

    The tree of as_logical_axes() may differ from the state in fields that are empty in one
    of them, such as the collections that T5X's states do not have.

    Raises:
      ValueError: if as_logical_axes() lacks an array, or names one in a place that does not exist.
    """
    flat = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: _is_empty(x) or is_carrier(x)
    )
    arrays = {key_names(path): x for path, x in flat if not (_is_empty(x) or is_metadata(x))}
    held: dict[Path, Any] = dict.fromkeys(path for path, _ in named)
    if () in arrays:  # jax does not look into the state
        return list(held.values())
    for path, array in arrays.items():
        above = next((path[:n] for n in range(len(path) + 1) if path[:n] in held), None)
        if above is None:
            raise ValueError(
                f'{"/".join(path)} is not in as_logical_axes(): add its names, or None'
            )
        if above == path:
            held[path] = array
        else:
            held[above] = {**(held[above] or {}), '/'.join(path[len(above) :]): array}
    empty = {key_names(path) for path, x in flat if _is_empty(x)}
    for path, names in named:
        nothing = names is not None and held[path] is None
        if nothing and not any(path[:n] in empty for n in range(len(path) + 1)):
            raise ValueError(
                f'as_logical_axes() has {"/".join(path)}, but the state does not: remove it'
            )
    return list(held.values())


def _is_empty(x: Any) -> bool:
    return x is None or (isinstance(x, Mapping | tuple | list) and not x)


def _leaf_as_said(path: Path, names: Any, held: Any) -> Leaf:
    """The leaf at a path of as_logical_axes(), where the state holds an array or a subtree."""
    is_array = hasattr(held, 'dtype') or is_carrier(held) or jax.tree_util.all_leaves((held,))
    array = array_of(held) if is_array else None
    role: Role = 'other'
    if not _OPTIMIZER_KEYS.isdisjoint(path):
        role = 'optimizer'
    elif not _PARAMETER_KEYS.isdisjoint(path):
        role = 'parameters'
    if names is None:
        dims = (None,) * len(shape_of(array))
        covered = () if is_array else tuple(((*path, *p), x) for p, x in array_leaves(held))
        return Leaf(path, array, role, None, dims, said_none=True, covered=covered)
    shape = None if array is None else shape_of(array)
    return Leaf(path, array, role, Parameter(path, tuple(names), shape), tuple(range(len(names))))
