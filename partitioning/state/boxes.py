"""The objects that carry axis names in a pytree: linen boxes, nnx variables, T5X's AxisMetadata.

They are recognized by their attributes, not by their classes, because `import partitioning` must
not import flax.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from partitioning.rules import LogicalAxisRules, check_rules

Path = tuple[str, ...]


class Carrier(enum.Enum):
    """The kinds of objects that carry axis names."""

    BOX = 'linen box'
    VARIABLE = 'nnx variable'
    METADATA = 'AxisMetadata'  # in a separate collection, next to that of the array


class CarriedNames(NamedTuple):
    """The names that a carrier gives to its array.

    Attributes:
      names: one entry per dimension: a name, None, or a tuple of mesh axes. None if the carrier
        has no names.
      axes_as_names: whether a name may be a mesh axis, as in `flax.linen.Partitioned` and nnx.
      rules: rules for this array only, tried before all others.
      mesh: the mesh that the array was created for, or None.
    """

    names: tuple[Any, ...] | None
    axes_as_names: bool
    rules: LogicalAxisRules
    mesh: Any


@functools.cache
def _carrier_of_type(cls: Any) -> Carrier | None:
    if hasattr(cls, 'get_metadata') and hasattr(cls, 'get_value'):
        return Carrier.VARIABLE
    if 'names' in getattr(cls, '__dataclass_fields__', ()) or hasattr(cls, 'names'):
        if hasattr(cls, 'unbox'):
            return Carrier.BOX
        if cls.__name__ == 'AxisMetadata':
            return Carrier.METADATA
    return None


def carrier(x: Any) -> Carrier | None:
    """The kind of carrier that `x` is, or None if it is not a carrier."""
    return _carrier_of_type(x.__class__)


def is_carrier(x: Any) -> bool:
    """Whether `x` is a linen box, an nnx variable or an AxisMetadata."""
    return _carrier_of_type(x.__class__) is not None


def is_metadata(x: Any) -> bool:
    """Whether `x` is an AxisMetadata of T5X, which names an array in another collection."""
    return _carrier_of_type(x.__class__) is Carrier.METADATA


def is_box(x: Any) -> bool:
    """Whether `x` is a linen box that carries axis names."""
    return _carrier_of_type(x.__class__) is Carrier.BOX


def unbox(tree: Any) -> Any:
    """The tree with each linen box, nested or not, replaced by its content."""
    return jax.tree.map(lambda x: unbox(x.value) if is_box(x) else x, tree, is_leaf=is_box)


def rebox(boxed: Any, tree: Any) -> Any:
    """The tree with its arrays in boxes like those of `boxed`, a tree of the same structure."""
    return jax.tree.map(
        lambda box, below: box.replace(value=rebox(box.value, below)) if is_box(box) else below,
        boxed,
        tree,
        is_leaf=is_box,
    )


def array_of(x: Any) -> Any:
    """The array inside a carrier; anything else is returned unchanged."""
    while (kind := carrier(x)) is Carrier.BOX:
        x = x.value
    return x.get_value() if kind is Carrier.VARIABLE else x


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a leaf; Python numbers have shape ()."""
    return tuple(getattr(x, 'shape', ()))


def nbytes(array: Any) -> int:
    """The size of an array or a ShapeDtypeStruct in bytes; 4 for a Python number, as in jax."""
    dtype = getattr(array, 'dtype', None)
    return math.prod(shape_of(array)) * (4 if dtype is None else dtype.itemsize)


def carried_names(x: Any) -> CarriedNames:
    """The names that the carrier `x` gives to its array."""
    if carrier(x) is Carrier.VARIABLE:
        metadata = x.get_metadata()
        names = metadata.get('out_sharding')
        names = getattr(names, 'spec', names)  # it may be a NamedSharding
        if names is None and 'optimizer_sharding' in metadata:
            names = (None,) * len(shape_of(x.get_value()))  # only its statistics are sharded
        rules = check_rules(metadata.get('sharding_rules') or ())
        return CarriedNames(
            None if names is None else tuple(names), True, rules, metadata.get('mesh')
        )
    logical = hasattr(x, 'rules') or carrier(x) is Carrier.METADATA
    rules = check_rules(getattr(x, 'rules', None) or ())
    return CarriedNames(tuple(x.names), not logical, rules, getattr(x, 'mesh', None))


def lacks_names(x: Any) -> bool:
    """Whether a leaf may be a parameter, has dimensions, and carries no names for them."""
    if carrier(x) is Carrier.VARIABLE:
        unnamed = is_parameter_variable(x) and carried_names(x).names is None
        return unnamed and bool(shape_of(array_of(x)))
    return not is_carrier(x) and bool(shape_of(x))


def is_parameter_variable(x: Any) -> bool:
    """Whether `x` is an nnx.Param or an instance of a subclass."""
    return carrier(x) is Carrier.VARIABLE and _has_base(x.__class__, 'Param')


def is_optimizer_variable(x: Any) -> bool:
    """Whether `x` is a variable of the state of an nnx.Optimizer."""
    return carrier(x) is Carrier.VARIABLE and _has_base(x.__class__, 'OptState')


@functools.cache
def _has_base(cls: Any, name: str) -> bool:
    return any(base.__name__ == name for base in cls.__mro__)


@functools.cache
def key_name(key: Any) -> str:
    """One key of a pytree path as a string."""
    return jax.tree_util.keystr((key,), simple=True)


def key_names(path: Sequence[Any]) -> Path:
    """The keys of a pytree path as strings."""
    return tuple(map(key_name, path))


def path_str(path: Sequence[Any]) -> str:
    """A pytree path as one string, such as 'params/decoder/wq'."""
    return '/'.join(key_names(path))


def array_leaves(state: Any) -> list[tuple[Path, Any]]:
    """The (path, array) pairs of a state, with the arrays taken out of their carriers."""
    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_carrier)
    return [
        (key_names(path), array_of(x)) for path, x in flat if carrier(x) is not Carrier.METADATA
    ]
