"""The objects that carry axis names in a pytree: linen boxes, nnx variables, T5X's AxisMetadata.

They are recognized by their attributes, not by their classes, because `import partitioning` must
not import flax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from partitioning.rules import LogicalAxisRules, check_rules
from partitioning.state.optimizer_states import flags_of_leaves, may_be_optimizer_state

Path = tuple[str, ...]
Carrier = Literal['box', 'variable', 'metadata']


class Parameter(NamedTuple):
    """An array with axis names, which statistics of an optimizer may inherit.

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


def pad_names(names: Sequence[Any], rank: int) -> tuple[Any, ...]:
    """The names of all dimensions: if there are fewer names, the last dimensions get None.

    Flax and PartitionSpecs complete names in the same way. An empty tuple stays empty, because
    padding it would silently replicate the array.
    """
    if len(names) == rank or not names:
        return tuple(names)
    return (*names, *[None] * (rank - len(names)))


@functools.cache
def _kind(cls: Any) -> Carrier | None:
    if hasattr(cls, 'get_metadata') and hasattr(cls, 'get_value'):
        return 'variable'
    if 'names' in getattr(cls, '__dataclass_fields__', ()) or hasattr(cls, 'names'):
        if hasattr(cls, 'unbox'):
            return 'box'
        if cls.__name__ == 'AxisMetadata':
            return 'metadata'
    return None


class Entry(NamedTuple):
    """One leaf of a state: its path, its array, and the object that carries its names.

    Attributes:
      path: its place in the state.
      leaf: what the state holds there: an array, or a carrier of names with its array.
      array: the array without its carrier; an AxisMetadata of T5X stays as it is.
      shape: the global shape of the array.
      carrier: what carries the names: a linen box, an nnx variable, or T5X's AxisMetadata, which
        names an array in another collection; None if `leaf` is the array.
      in_optimizer: whether it is inside a state of optax, as far as the types of nodes tell.
    """

    path: Path
    leaf: Any
    array: Any
    shape: tuple[int, ...]
    carrier: Carrier | None
    in_optimizer: bool = False


class FlatState(NamedTuple):
    """A state with its leaves, which are collected once. Each carrier of names is one leaf."""

    state: Any
    entries: Sequence[Entry]
    treedef: Any


def flatten_state(state: Any) -> FlatState:
    """Collects the leaves of a state; a FlatState is returned unchanged."""
    if isinstance(state, FlatState):
        return state
    has_optimizer = False

    def is_leaf(x: Any) -> bool:
        nonlocal has_optimizer
        has_optimizer = has_optimizer or may_be_optimizer_state(x)
        return is_carrier(x)

    flat, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_leaf)
    entries = [make_entry(key_names(path), x) for path, x in flat]
    if has_optimizer:
        flags = flags_of_leaves(state, is_carrier)
        entries = [
            entry._replace(in_optimizer=True) if inside else entry
            for entry, inside in zip(entries, flags, strict=True)
        ]
    return FlatState(state, entries, treedef)


# The paths and shapes of the arrays of known states -> the box of each array, or None.
KnownBoxes = Mapping[tuple[tuple[Path, tuple[int, ...]], ...], Sequence[Any]]
_KEPT = 8  # the number of states whose boxes are remembered


def with_boxes(state: Any, known: KnownBoxes) -> tuple[FlatState, KnownBoxes]:
    """Puts boxes back on a state that was initialized with boxes and is trained without them.

    A state that carries no names at all gets the boxes of the known state whose arrays have the
    same paths and shapes. The dtypes and the static fields may differ. The second result has the
    boxes to remember from now on, the latest first. They hold no arrays.
    """
    flat = flatten_state(state)
    carriers = {entry.carrier for entry in flat.entries}
    if 'box' not in carriers and (not known or carriers != {None}):
        return flat, known
    arrays = tuple([(entry.path, entry.shape) for entry in flat.entries])
    if 'box' in carriers:
        boxes = [_emptied(x.leaf) if x.carrier == 'box' else None for x in flat.entries]
        others = [kept for kept in known.items() if kept[0] != arrays]
        return flat, dict([(arrays, boxes), *others][:_KEPT])
    if arrays not in known:
        return flat, known
    leaves = [
        x.array if box is None else rebox(box, x.array)
        for box, x in zip(known[arrays], flat.entries, strict=True)
    ]
    return flatten_state(jax.tree.unflatten(flat.treedef, leaves)), known


def _emptied(box: Any) -> Any:
    """A copy of a box, and of the boxes nested in it, without the array that takes memory."""
    if type(box.value) is jax.ShapeDtypeStruct:
        return box
    return box.replace(value=_emptied(box.value) if is_box(box.value) else 0)


def make_entry(path: Path, leaf: Any) -> Entry:
    """The entry of a leaf, with the array taken out of its carrier."""
    carrier = _kind(leaf.__class__)
    array = leaf if carrier is None else array_of(leaf)
    return Entry(path, leaf, array, shape_of(array), carrier)


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
    """The tree with its arrays in the boxes of `boxed`, a tree of the same structure."""
    return jax.tree.map(
        lambda box, below: box.replace(value=rebox(box.value, below)) if is_box(box) else below,
        boxed,
        tree,
        is_leaf=is_box,
    )


def array_of(x: Any) -> Any:
    """The array inside a carrier; anything else is returned unchanged."""
    while (kind := _kind(x.__class__)) == 'box':
        x = x.value
    return x.get_value() if kind == 'variable' else x


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a leaf; Python numbers have shape ()."""
    return tuple(getattr(x, 'shape', ()))


def nbytes(array: Any) -> int:
    """The size of an array or a ShapeDtypeStruct in bytes; 4 for a Python number, as in jax."""
    dtype = getattr(array, 'dtype', None)
    return math.prod(shape_of(array)) * (4 if dtype is None else dtype.itemsize)


def is_inexact(x: Any) -> bool:
    """Whether `x` is an array of floating-point numbers, as parameters are."""
    return hasattr(x, 'dtype') and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def carried_names(x: Any, path: Path = ()) -> Parameter | None:
    """The array inside the carrier `x` at `path` with its names, or None if it has no names."""
    kind = _kind(x.__class__)
    if kind == 'variable':
        metadata = x.get_metadata()
        names = metadata.get('out_sharding')
        names = getattr(names, 'spec', names)  # it may be a NamedSharding
        if names is None and 'optimizer_sharding' in metadata:
            names = (None,) * len(shape_of(x.get_value()))  # only its statistics are sharded
        if names is None:
            return None
        rules, mesh = metadata.get('sharding_rules'), metadata.get('mesh')
        axes_as_names = True
    else:
        names, rules, mesh = x.names, getattr(x, 'rules', None), getattr(x, 'mesh', None)
        axes_as_names = kind == 'box' and not hasattr(x, 'rules')
    shape = None if kind == 'metadata' else shape_of(array_of(x))
    carried = tuple(names)
    whole = carried if shape is None else pad_names(carried, len(shape))
    num_carried = len(carried) if len(carried) < len(whole) else None
    checked = check_rules(rules) if rules else ()
    return Parameter(path, whole, shape, axes_as_names, checked, mesh, num_carried)


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
    entries = flatten_state(state).entries
    return [(entry.path, entry.array) for entry in entries if entry.carrier != 'metadata']


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
