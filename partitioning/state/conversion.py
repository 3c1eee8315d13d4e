"""One carrier of axis names into another: linen's boxes, nnx's variables, T5X's `params_axes`.

A module of its own because it imports flax. Each function takes any of the three, and of dicts
those of collections, `{'params': ...}`: one that has no collection known to nnx is a ValueError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from flax import nnx
from flax.core import FrozenDict
from flax.linen.partitioning import AxisMetadata
from flax.traverse_util import flatten_dict, unflatten_dict

from partitioning.rules import LogicalAxisRules
from partitioning.state.boxes import array_of, carried_names, is_box, is_carrier, is_metadata
from partitioning.state.follow import Parameter
from partitioning.state.linen import LogicallyPartitioned, Partitioned
from partitioning.state.parameters import named_arrays

Keys = tuple[Any, ...]
_BOX_FIELDS = {'value', 'names', 'mesh', 'rules'}
# What of a variable's metadata is a box's, by flax's names for it.
_VARIABLE_FIELDS = {'out_sharding', 'mesh', 'sharding_rules', 'linen_meta_type'}


class _Array(NamedTuple):
    """One array with what is said of it.

    Attributes:
      collection: 'params', 'batch_stats', ...
      keys: its place in the collection.
      value: the array.
      names: one a dimension; None: it has none.
      mesh: the only mesh it is for, if it says.
      rules: of its own.
      box: the class of linen's box for it.
    """

    collection: str
    keys: Keys
    value: Any
    names: tuple[Any, ...] | None
    mesh: Any
    rules: LogicalAxisRules
    box: Any

    @property
    def path(self) -> str:
        return '/'.join(map(str, (self.collection, *self.keys)))


def to_nnx_state(variables: Any) -> nnx.State:
    """Variables of a linen model as the state of an nnx model.

    Usage:
      state = to_nnx_state(linen_model.init(key, x))
      nnx.update(nnx_model, state)  # whose attributes have the same names

    Args:
      variables: a dict of collections, with linen's boxes or T5X's `params_axes`.

    Returns:
      The State, with a Param for each array of 'params', a BatchStat for one of 'batch_stats', and
      so on. Names are `out_sharding`, rules `sharding_rules`, a mesh `mesh`; no array is moved.
      What is a State already is returned.

    Raises:
      ValueError: with the path, of a box around several arrays or with fields that a variable has
        no place for; of one place that two collections have.
    """
    if isinstance(variables, nnx.State):
        return variables
    arrays = _read(variables)
    _check_places(arrays)
    with nnx.use_eager_sharding(False):  # the values are laid out where they are used
        return nnx.from_flat_state([(array.keys, _variable(array)) for array in arrays])


def to_linen_boxes(state: Any) -> dict[str, Any]:
    """The state of an nnx model, or variables with T5X's `params_axes`, in linen's boxes.

    Args:
      state: a State, as of `nnx.state(model)`; or a dict of collections.

    Returns:
      A dict of collections. Arrays with names are in boxes of the class that they came from, or
      Partitioned, or LogicallyPartitioned where the names are T5X's or have rules of their own.

    Raises:
      ValueError: with the path, of a variable with metadata that a box has no place for, or of a
        type that is no collection of linen's.
    """
    return _tree((array, _boxed(array)) for array in _read(state))


def to_params_axes(state: Any) -> dict[str, Any]:
    """Variables of a linen model, or the state of an nnx model, with names as T5X keeps them.

    Returns:
      A dict of collections of plain arrays, with a collection of AxisMetadata beside each that has
      names: `params_axes` beside `params`, where `kernel_axes` has the names of `kernel`.

    Raises:
      ValueError: with the path, of names with a mesh or rules of their own, or that are tuples of
        mesh axes: T5X has no place for these.
    """
    arrays = _read(state)
    for array in arrays:
        own = {
            'mesh axes': any(isinstance(name, tuple) for name in array.names or ()),
            'a mesh': array.mesh is not None,
            'rules': bool(array.rules),
        }
        if any(own.values()):
            extra = ' and '.join(what for what, has in own.items() if has)
            raise ValueError(
                f'{array.path}: names {array.names} with {extra} of their own, which T5X has no '
                'place for beside an array: give them to the partitioner'
            )
    names = (
        (
            array._replace(
                collection=f'{array.collection}_axes',
                keys=(*array.keys[:-1], f'{array.keys[-1]}_axes'),
            ),
            AxisMetadata(names=array.names),
        )
        for array in arrays
        if array.names is not None
    )
    return {**_tree((array, array.value) for array in arrays), **_tree(names)}


def _read(tree: Any) -> list[_Array]:
    """The arrays of a tree, whichever of the three it is."""
    if isinstance(tree, nnx.State):
        return [_of_variable(keys, variable) for keys, variable in nnx.to_flat_state(tree)]
    if not isinstance(tree, dict | FrozenDict):
        raise ValueError(
            f"{type(tree).__name__} is neither a dict of collections, as linen's init gives it, "
            'nor an nnx.State, as nnx.state(model) does'
        )
    if tree and not any(map(_is_collection, tree)):
        raise ValueError(
            f"{', '.join(map(str, list(tree)[:3]))}: none of these is a collection of linen's. "
            "Give all variables, {'params': ...}, not those of one collection"
        )
    flat = flatten_dict(tree, is_leaf=lambda _, x: is_carrier(x))
    for keys, x in flat.items():
        _check_carrier('/'.join(map(str, keys)), x)
    entries = [(tuple(map(str, keys)), x) for keys, x in flat.items()]
    carried = named_arrays(entries, ()).carried if any(is_carrier(x) for x in flat.values()) else {}
    return [
        _of_collection(keys, x, carried.get(path))
        for keys, (path, x) in zip(flat, entries, strict=True)
        if not is_metadata(x)
    ]


def _is_collection(name: Any) -> bool:
    """Whether nnx has a type of variables for what may be a collection of linen's."""
    try:
        nnx.variable_type_from_name(name)
    except ValueError:
        return False
    return True


def _of_collection(keys: Keys, x: Any, said: Parameter | None) -> _Array:
    box = type(x) if is_box(x) else LogicallyPartitioned
    array = _Array(keys[0], keys[1:], array_of(x), None, None, (), box)
    if said is not None:
        array = array._replace(names=said.names, mesh=said.mesh, rules=said.rules)
    if is_box(x):
        _check_fields(array, _field_names(box) - _BOX_FIELDS)
    return array


def _check_carrier(path: str, x: Any) -> None:
    if is_box(x) and is_box(x.value):
        raise ValueError(f'{path} is a box in a box, which has no place: unbox one of them')
    if is_carrier(x) and not is_box(x) and not is_metadata(x):
        raise ValueError(
            f'{path} is a {type(x).__name__}, which has no place in a dict of collections: give an '
            'nnx.State'
        )


def _of_variable(keys: Keys, variable: Any) -> _Array:
    path = '/'.join(map(str, keys))
    try:
        collection = nnx.variable_name_from_type(type(variable))
    except (AttributeError, ValueError):
        raise ValueError(
            f"{path} is a {type(variable).__name__}, which is no collection of linen's: leave it "
            'out, as nnx.state(model, nnx.Param) does, or name one with nnx.register_variable_name'
        ) from None
    said = carried_names(variable)
    metadata = variable.get_metadata()
    box = metadata.get('linen_meta_type', LogicallyPartitioned if said.rules else Partitioned)
    mesh = said.mesh
    if mesh is None:
        mesh = getattr(metadata.get('out_sharding'), 'mesh', None)  # of a NamedSharding
    array = _Array(collection, keys, variable.get_value(), said.names, mesh, said.rules, box)
    known = _VARIABLE_FIELDS | nnx.Variable.required_metadata
    _check_fields(array, {k for k, v in metadata.items() if k not in known and v not in (None, ())})
    return array


def _check_fields(array: _Array, unknown: Iterable[str]) -> None:
    if extra := sorted(unknown):
        raise ValueError(
            f'{array.path}: there is no place for {", ".join(extra)} beside names, mesh and rules: '
            'take them off first'
        )


def _check_places(arrays: Iterable[_Array]) -> None:
    """Raises ValueError where collections, which are types in nnx, have one place for two."""
    places: dict[Keys, str] = {}
    for array in arrays:
        if array.keys in places or not array.keys:
            raise ValueError(_clash(array, places.get(array.keys, 'its collection')))
        places[array.keys] = array.path
    for array in arrays:
        for n in range(1, len(array.keys)):
            if array.keys[:n] in places:
                raise ValueError(_clash(array, places[array.keys[:n]]))


def _clash(array: _Array, other: str) -> str:
    return (
        f'{array.path} and {other} have one place in an nnx model, where collections are types and '
        'no part of a path: rename one of them'
    )


def _variable(array: _Array) -> Any:
    kind = nnx.variable_type_from_name(array.collection, allow_register=True)
    metadata: dict[str, Any] = {}
    if array.names is not None:
        metadata = {'out_sharding': array.names, 'linen_meta_type': array.box}
    if array.mesh is not None:
        metadata['mesh'] = array.mesh
    if array.rules:
        metadata['sharding_rules'] = array.rules
    return kind(array.value, **metadata)


def _boxed(array: _Array) -> Any:
    if array.names is None:
        return array.value
    own = {'rules': array.rules or None} if 'rules' in _field_names(array.box) else {}
    if array.rules and not own:
        raise ValueError(f'{array.path}: {array.box.__name__} has no place for rules of its own')
    return array.box(array.value, array.names, mesh=array.mesh, **own)


def _field_names(box: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(box)}


def _tree(entries: Iterable[tuple[_Array, Any]]) -> dict[str, Any]:
    return unflatten_dict({(array.collection, *array.keys): x for array, x in entries})
