"""Converts axis names between linen boxes, nnx variables and T5X's `params_axes`.

Each function accepts all three. A dict must hold collections, as in `{'params': ...}`; a dict
without any collection that nnx knows is a ValueError. This module imports flax, so `import
partitioning` loads it on first use only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from flax import nnx
from flax.core import FrozenDict
from flax.linen.partitioning import AxisMetadata
from flax.traverse_util import flatten_dict, unflatten_dict

from partitioning.state.boxes import (
    Parameter,
    carried_names,
    is_box,
    is_carrier,
    is_variable,
    make_entry,
    metadata_path,
)
from partitioning.state.linen import LogicallyPartitioned, Partitioned
from partitioning.state.naming import named_arrays

Keys = tuple[Any, ...]
_BOX_FIELDS = {'value', 'names', 'mesh', 'rules'}
# The metadata of a variable that a box can hold, by flax's names.
_VARIABLE_FIELDS = {'out_sharding', 'mesh', 'sharding_rules', 'linen_meta_type'}


class _Array(NamedTuple):
    """One array with its names."""

    collection: str  # 'params', 'batch_stats', ...
    keys: Keys  # its path inside the collection
    value: Any
    named: Parameter | None  # its names, mesh and rules
    box: Any = LogicallyPartitioned  # the class of the linen box to put it in

    @property
    def path(self) -> str:
        return '/'.join(map(str, (self.collection, *self.keys)))


def to_nnx_state(variables: Any) -> nnx.State:
    """Converts the variables of a linen model to the state of an nnx model.

    Usage:
      state = to_nnx_state(linen_model.init(key, x))
      nnx.update(nnx_model, state)  # the attributes of both models have the same names

    Args:
      variables: a dict of collections, with linen boxes or T5X's `params_axes`. An nnx.State is
        returned unchanged.

    Returns:
      A State with a Param for each array of 'params', a BatchStat for each array of 'batch_stats',
      and so on. The metadata holds names as `out_sharding`, rules as `sharding_rules` and a mesh as
      `mesh`. No array is moved.

    Raises:
      ValueError: if a box contains several arrays or has fields that a variable cannot hold, or if
        arrays of two collections have the same path. The message contains the path.
    """
    if isinstance(variables, nnx.State):
        return variables
    arrays = _read(variables)
    _check_distinct_paths(arrays)
    with nnx.use_eager_sharding(False):  # arrays are laid out where they are used
        return nnx.from_flat_state([(array.keys, _to_variable(array)) for array in arrays])


def to_linen_boxes(state: Any) -> dict[str, Any]:
    """Converts the state of an nnx model, or variables with T5X's `params_axes`, to linen boxes.

    Returns:
      A dict of collections. Each array with names is in a box of the class that it came from. If
      there was none, it is in a LogicallyPartitioned if its names come from `params_axes` or it has
      its own rules, and in a Partitioned otherwise.

    Raises:
      ValueError: if a variable has metadata that a box cannot hold, or if its type does not
        correspond to a linen collection. The message contains the path.
    """
    return unflatten_dict({(a.collection, *a.keys): _to_box(a) for a in _read(state)})


def to_params_axes(state: Any) -> dict[str, Any]:
    """Converts linen variables, or the state of an nnx model, to arrays with T5X's `params_axes`.

    Returns:
      A dict of collections of plain arrays. Each collection with names gets a second one of
      AxisMetadata: `params_axes` for `params`, where `kernel_axes` holds the names of `kernel`.

    Raises:
      ValueError: if an array has its own mesh or rules, or a dimension has a tuple of mesh axes:
        AxisMetadata cannot hold these. The message contains the path.
    """
    flat: dict[Keys, Any] = {}
    for array in _read(state):
        flat[array.collection, *array.keys] = array.value
        if (named := array.named) is None:
            continue
        unsupported = {
            'tuples of mesh axes': any(isinstance(name, tuple) for name in named.names),
            'a mesh': named.mesh is not None,
            'rules': bool(named.rules),
        }
        if any(unsupported.values()):
            extra = ' and '.join(what for what, has in unsupported.items() if has)
            raise ValueError(
                f'{array.path} has names {named.names} with {extra}, which AxisMetadata cannot '
                'hold; pass the mesh and the rules to the partitioner'
            )
        names_path = (f'{array.collection}_axes', *metadata_path(array.keys))
        flat[names_path] = AxisMetadata(names=named.names)
    return unflatten_dict(flat)


def _read(tree: Any) -> list[_Array]:
    """The arrays of a tree of any of the three kinds."""
    if isinstance(tree, nnx.State):
        return [_from_variable(keys, variable) for keys, variable in nnx.to_flat_state(tree)]
    if not isinstance(tree, dict | FrozenDict):
        raise ValueError(
            f'expected a dict of collections (from the init of a linen model) or an nnx.State '
            f'(from nnx.state(model)), not {type(tree).__name__}'
        )
    if tree and not any(map(_is_collection, tree)):
        raise ValueError(
            f'{", ".join(map(str, list(tree)[:3]))}: none of these keys is a linen collection; '
            "pass all variables, {'params': ...}, not the content of one collection"
        )
    flat = flatten_dict(tree, is_leaf=lambda _, x: is_carrier(x))
    for keys, x in flat.items():
        path = '/'.join(map(str, keys))
        if is_box(x) and is_box(x.value):
            raise ValueError(f'{path} is a box inside a box; remove one of them')
        if is_variable(x):
            raise ValueError(
                f'{path} is an nnx variable ({type(x).__name__}) in a dict of collections; pass an '
                'nnx.State instead'
            )
    entries = [make_entry(tuple(map(str, keys)), x) for keys, x in flat.items()]
    carried = named_arrays(entries, ()).carried if any(map(is_carrier, flat.values())) else {}
    arrays = []
    for keys, entry in zip(flat, entries, strict=True):
        array = _Array(keys[0], keys[1:], entry.array, carried.get(entry.path))
        if entry.carrier == 'box':
            array = array._replace(box=type(entry.leaf))
            _check_fields(array, _field_names(array.box) - _BOX_FIELDS)
        if entry.carrier != 'metadata':
            arrays.append(array)
    return arrays


def _is_collection(name: Any) -> bool:
    """Whether nnx has a variable type for a linen collection of this name."""
    try:
        nnx.variable_type_from_name(name)
    except ValueError:
        return False
    return True


def _from_variable(keys: Keys, variable: Any) -> _Array:
    path = '/'.join(map(str, keys))
    try:
        collection = nnx.variable_name_from_type(type(variable))
    except (AttributeError, ValueError):
        raise ValueError(
            f'{path} is a {type(variable).__name__}, which has no linen collection; leave it out '
            'with nnx.state(model, nnx.Param), or name one with nnx.register_variable_name'
        ) from None
    metadata, named = variable.get_metadata(), carried_names(variable)
    if named is not None and named.mesh is None:  # out_sharding may be a NamedSharding
        named = named._replace(mesh=getattr(metadata.get('out_sharding'), 'mesh', None))
    box = LogicallyPartitioned if named is not None and named.rules else Partitioned
    box = metadata.get('linen_meta_type', box)
    array = _Array(collection, keys, variable.get_value(), named, box)
    known = _VARIABLE_FIELDS | nnx.Variable.required_metadata
    _check_fields(array, {k for k, v in metadata.items() if k not in known and v not in (None, ())})
    return array


def _check_fields(array: _Array, unknown: Iterable[str]) -> None:
    if extra := sorted(unknown):
        raise ValueError(
            f'{array.path} has {", ".join(extra)}, which cannot be converted (only names, mesh and '
            'rules can); remove it first'
        )


def _check_distinct_paths(arrays: Iterable[_Array]) -> None:
    """Raises ValueError if two arrays have the same path once their collections are removed."""
    paths: dict[Keys, str] = {(): 'its collection'}
    clashes: list[tuple[str, str]] = []
    for array in arrays:
        if array.keys in paths:
            clashes.append((array.path, paths[array.keys]))
        paths[array.keys] = array.path
    inner = ((array, array.keys[:n]) for array in arrays for n in range(1, len(array.keys)))
    clashes += [(array.path, paths[above]) for array, above in inner if above in paths]
    for one, other in clashes:
        raise ValueError(
            f'{one} and {other} have the same path in an nnx model, because nnx paths do not '
            'contain the collection; rename one of them'
        )


def _to_variable(array: _Array) -> Any:
    kind = nnx.variable_type_from_name(array.collection, allow_register=True)
    if (named := array.named) is None:
        return kind(array.value)
    optional = {'mesh': named.mesh, 'sharding_rules': named.rules}
    return kind(
        array.value,
        out_sharding=named.names,
        linen_meta_type=array.box,
        **{key: value for key, value in optional.items() if value not in (None, ())},
    )


def _to_box(array: _Array) -> Any:
    if (named := array.named) is None:
        return array.value
    rules = {'rules': named.rules or None} if 'rules' in _field_names(array.box) else {}
    if named.rules and not rules:
        raise ValueError(
            f'{array.path} has rules, which a {array.box.__name__} cannot hold; use a '
            'LogicallyPartitioned, or pass the rules to the partitioner'
        )
    return array.box(array.value, named.names, mesh=named.mesh, **rules)


def _field_names(box: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(box)}
