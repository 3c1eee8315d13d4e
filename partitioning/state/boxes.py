"""The objects that carry axis names in a pytree: linen boxes, nnx variables, T5X's AxisMetadata.

They are recognized by their attributes, not by their classes, because `import partitioning` must
not import flax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from partitioning.rules import LogicalAxisRules, check_rules

Path = tuple[str, ...]


class Parameter(NamedTuple):
    """An array with axis names. Statistics of an optimizer may follow it.

    Attributes:
      path: its path in the state.
      names: one entry per dimension: a name, None, or a tuple of mesh axes.
      shape: the global shape, or None if the state gives the names without the array.
      axes_as_names: whether a name may be a mesh axis, as in `flax.linen.Partitioned` and nnx.
      rules: rules for this array only, tried before all others.
      mesh: the mesh that the names are for, or None.
      num_carried: how many names the array carries, if these are fewer than its dimensions. They
        belong to the first dimensions, and `names` has None for the others.
    """

    path: Path
    names: tuple[Any, ...]
    shape: tuple[int, ...] | None
    axes_as_names: bool = False
    rules: LogicalAxisRules = ()
    mesh: Any = None
    num_carried: int | None = None

    @property
    def carried(self) -> tuple[Any, ...]:
        """The names that the array itself carries."""
        return self.names[: self.num_carried]

    def with_shape(self, shape: tuple[int, ...]) -> Parameter:
        """The same names for an array of this shape."""
        carried = self.carried
        names = pad_names(carried, len(shape))
        num_carried = len(carried) if len(carried) < len(names) else None
        return self._replace(names=names, shape=shape, num_carried=num_carried)


def pad_names(names: Sequence[Any], rank: int) -> tuple[Any, ...]:
    """The names of all dimensions: if there are fewer names, the last dimensions get None.

    Fewer names mean the same in flax and in a PartitionSpec. An empty tuple stays as it is: it
    names nothing, so the array would be replicated silently.
    """
    return (*names, *[None] * (rank - len(names))) if names else ()


@functools.cache
def _kind(cls: Any) -> Literal['box', 'variable', 'metadata'] | None:
    if hasattr(cls, 'get_metadata') and hasattr(cls, 'get_value'):
        return 'variable'
    if 'names' in getattr(cls, '__dataclass_fields__', ()) or hasattr(cls, 'names'):
        if hasattr(cls, 'unbox'):
            return 'box'
        if cls.__name__ == 'AxisMetadata':
            return 'metadata'
    return None


def is_carrier(x: Any) -> bool:
    """Whether `x` is a linen box, an nnx variable or an AxisMetadata."""
    return _kind(x.__class__) is not None


def is_metadata(x: Any) -> bool:
    """Whether `x` is an AxisMetadata of T5X, which names an array in another collection."""
    return _kind(x.__class__) == 'metadata'


def is_box(x: Any) -> bool:
    """Whether `x` is a linen box that carries axis names."""
    return _kind(x.__class__) == 'box'


def is_variable(x: Any) -> bool:
    """Whether `x` is an nnx variable."""
    return _kind(x.__class__) == 'variable'


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
    while is_box(x):
        x = x.value
    return x.get_value() if is_variable(x) else x


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a leaf; Python numbers have shape ()."""
    return tuple(getattr(x, 'shape', ()))


def nbytes(array: Any) -> int:
    """The size of an array or a ShapeDtypeStruct in bytes; 4 for a Python number, as in jax."""
    dtype = getattr(array, 'dtype', None)
    return math.prod(shape_of(array)) * (4 if dtype is None else dtype.itemsize)


def carried_names(x: Any, path: Path = ()) -> Parameter | None:
    """The array inside the carrier `x` at `path` with its names, or None if it has no names."""
    if is_variable(x):
        metadata, shape = x.get_metadata(), shape_of(x.get_value())
        names = metadata.get('out_sharding')
        names = getattr(names, 'spec', names)  # it may be a NamedSharding
        if names is None and 'optimizer_sharding' in metadata:
            names = (None,) * len(shape)  # only its statistics are sharded
        if names is None:
            return None
        rules = check_rules(metadata.get('sharding_rules') or ())
        variable = Parameter(path, tuple(names), None, True, rules, metadata.get('mesh'))
        return variable.with_shape(shape)
    logical = hasattr(x, 'rules') or is_metadata(x)
    rules = check_rules(getattr(x, 'rules', None) or ())
    mesh = getattr(x, 'mesh', None)
    named = Parameter(path, tuple(x.names), None, not logical, rules, mesh)
    return named if is_metadata(x) else named.with_shape(shape_of(array_of(x)))


def lacks_names(x: Any) -> bool:
    """Whether a leaf may be a parameter, has dimensions, and carries no names for them."""
    unnamed = carried_names(x) is None if is_parameter_variable(x) else not is_carrier(x)
    return unnamed and bool(shape_of(array_of(x)))


def is_parameter_variable(x: Any) -> bool:
    """Whether `x` is an nnx.Param or an instance of a subclass."""
    return is_variable(x) and _has_base(x.__class__, 'Param')


def is_optimizer_variable(x: Any) -> bool:
    """Whether `x` is a variable of the state of an nnx.Optimizer."""
    return is_variable(x) and _has_base(x.__class__, 'OptState')


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
    return [(key_names(path), array_of(x)) for path, x in flat if not is_metadata(x)]


def metadata_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path inside T5X's 'params_axes' that names the array at `path` inside 'params'."""
    return (*path[:-1], f'{path[-1]}_axes')


def described_path(path: Path) -> Path:
    """The path of the array that an AxisMetadata names: params/kernel for params_axes/kernel_axes.

    The first key that ends with '_axes' is the collection.
    """
    place = next((i for i, key in enumerate(path) if key.endswith('_axes')), len(path) - 1)
    collection, name = path[place].removesuffix('_axes'), path[-1].removesuffix('_axes')
    return (*path[:place], collection, *path[place + 1 : -1], name)
