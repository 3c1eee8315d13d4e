"""`mark_sharding` and related functions, which lay out arrays and their gradients.

Manual sharding gives functions the block of one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from partitioning.compat.torch_xla.meshes_and_specs import (
    SpecLike,
    mesh_or_global,
    resolve_partition_spec,
    shards_per_dimension,
)
from partitioning.constraints import lay_out
from partitioning.hardware import JaxDevice
from partitioning.mesh.validation import as_tuple_of
from partitioning.rules import check_layout, describe_axes

OnIndivisible = Literal['error', 'pad', 'replicate']
P = ParamSpec('P')
R = TypeVar('R')


@functools.partial(jax.tree_util.register_dataclass, data_fields=['array'], meta_fields=['shape'])
@dataclasses.dataclass(frozen=True)
class PaddedArray:
    """An array in equal tiles, the last of which end in zeros.

    jax cannot lay out an array whose sizes are not divisible. torch_xla pads such arrays invisibly;
    this class makes the padding visible. It is a pytree, so it can be passed to jit. Its only leaf
    is `array`, so jax.tree.map and reductions over `array` see the padding too.

    Attributes:
      array: the padded jax.Array.
      shape: the shape of the array without padding.
    """

    array: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def unpadded(self) -> jax.Array:
        """Returns the array without padding; the padded dimensions are no longer sharded.

        Raises:
          ValueError: if `array` is smaller than `shape`, or has another rank.
        """
        padded = np.shape(self.array)
        if len(padded) != len(self.shape) or any(np.less(padded, self.shape)):
            raise ValueError(f'an array of shape {padded} cannot be {self.shape} with padding')
        dims = [dim for dim, size in enumerate(self.shape) if size < padded[dim]]
        if not dims:
            return self.array
        return _unsharded_along(dims, self.array)[tuple(slice(size) for size in self.shape)]


def mark_sharding(
    t: Any,
    mesh: Mesh | None,
    partition_spec: SpecLike,
    *,
    on_indivisible: OnIndivisible = 'error',
) -> Any:
    """Lays out an array over a mesh.

    Outside traced functions the array moves to the devices of the mesh. Inside, its layout is
    constrained over Auto axes, and the array is resharded over Explicit ones. `t` itself does not
    change, because arrays are immutable, so an array can be marked again in any other way.

    Args:
      t: an array of jax or numpy, a scalar, or a PaddedArray.
      partition_spec: for each dimension a mesh dimension or name, a tuple of them, or None.
      on_indivisible: what happens to a dimension whose size is not divisible by its number of
        shards. 'error' raises an error. 'pad' pads the array with zeros to equal tiles, inside
        traced functions too (there, XLA itself would pad the array but return it replicated).
        'replicate' keeps the dimension whole on every device.

    Returns:
      A jax.Array in this layout; with on_indivisible='pad' a PaddedArray if it needs padding.

    Raises:
      ValueError: if the mesh or the array cannot have this spec, or if a size is not divisible.
    """
    mesh = mesh_or_global(mesh)
    if on_indivisible not in get_args(OnIndivisible):
        known = ', '.join(map(repr, get_args(OnIndivisible)))
        raise ValueError(f'on_indivisible must be one of {known}, not {on_indivisible!r}')
    array = t.unpadded() if isinstance(t, PaddedArray) else t
    if on_indivisible == 'error':
        remedy = "pass on_indivisible='pad' or 'replicate'"
        return lay_out_evenly(array, mesh, partition_spec, remedy)[0]
    shape = check_array(array)
    spec = resolve_partition_spec(mesh, partition_spec, shape)
    counts = shards_per_dimension(mesh, spec)
    uneven = {dim for dim, n in enumerate(counts) if shape[dim] % n}
    if uneven and on_indivisible == 'pad':
        widths = [(0, -size % n) for size, n in zip(shape, counts, strict=True)]
        padded: Any
        if isinstance(array, jax.Array):
            padded = jnp.pad(_unsharded_along(uneven, array), widths)
        else:
            padded = np.pad(array, widths)
        return PaddedArray(array=lay_out(padded, spec, mesh), shape=shape)
    kept = PartitionSpec(*(None if dim in uneven else axes for dim, axes in enumerate(spec)))
    return lay_out(array, kept, mesh)


def clear_sharding(t: Any) -> jax.Array:
    """Returns an array without a layout.

    Outside traced functions, the result is whole on one device, the one with the lowest id of those
    that held `t`. Inside, its layout is left to XLA; over Explicit axes, where every array has a
    layout, it is replicated.

    Raises:
      ValueError: if `t` is not a jax.Array, or if several processes hold it.
    """
    array = t.unpadded() if isinstance(t, PaddedArray) else t
    if isinstance(array, jax.core.Tracer):
        mesh = jax.typeof(array).sharding.mesh
        if mesh.empty:
            return array  # Without a mesh the layout is already left to XLA.
        if AxisType.Explicit in mesh.axis_types:
            return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))
        if AxisType.Manual in mesh.axis_types:
            raise ValueError(
                'an array inside a shard_map is the block of one device: it has no layout'
            )
        free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * array.ndim)
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, free))
    if not isinstance(array, jax.Array):
        raise ValueError(f'{type(t).__qualname__} has no sharding to clear: it is not a jax.Array')
    if not array.is_fully_addressable:
        raise ValueError(
            f'an array of shape {array.shape} on several processes cannot move to one device: '
            'replicate it with mark_sharding(t, mesh, (None, ...)), or use local_shards(t)'
        )
    devices: Iterable[JaxDevice] = array.sharding.device_set
    first = min(devices, key=lambda device: device.id)
    return jax.device_put(array, SingleDeviceSharding(first))


# In jax, a layout applies to the gradient too. Over Auto axes, a constraint on `t` is also a
# constraint on its gradient. Over Explicit axes, the gradient of `t` always has the layout of `t`,
# and only the gradient of the result has this one.
mark_sharding_with_gradients = mark_sharding


def apply_backward_optimization_barrier(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns a function whose gradients XLA computes separately from all others.

    The gradients of all arguments pass one optimization barrier together, so XLA neither moves nor
    fuses operations of the backward pass across it. Wrapped around each layer, it keeps the
    collectives for the gradients of a layer with that layer. Values do not change.

    Raises:
      ValueError: if `fn` is not a function.
    """
    if not callable(fn):
        raise ValueError(f'{fn!r} must be a function, such as the apply of one layer')

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((args, kwargs))
        dtypes = [getattr(leaf, 'dtype', np.bool_) for leaf in leaves]
        places = [i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact)]
        passed = _backward_barrier(tuple(leaves[i] for i in places))
        for place, leaf in zip(places, passed, strict=True):
            leaves[place] = leaf
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fn(*args, **kwargs)

    return wrapped


def check_array(t: Any) -> tuple[int, ...]:
    """Returns the shape of an array or a number; anything else is a ValueError."""
    if isinstance(t, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return tuple(np.shape(t))
    raise ValueError(
        f'{type(t).__qualname__} is not an array of jax or numpy; for a pytree, use jax.tree.map'
    )


def lay_out_evenly(
    t: Any, mesh: Mesh, partition_spec: SpecLike, remedy: str
) -> tuple[jax.Array, PartitionSpec]:
    """Returns an array in the layout of a spec, and the spec; an uneven size is a ValueError."""
    shape = check_array(t)
    spec = resolve_partition_spec(mesh, partition_spec, shape)
    try:
        check_layout(spec, mesh, f'an array of shape {shape}', shape)
    except ValueError as error:
        raise ValueError(f'{error}; or {remedy}') from None
    return lay_out(t, spec, mesh), spec


def _unsharded_along(dims: Collection[int], array: Any) -> Any:
    """Returns an array that is not sharded along some dimensions, so that their sizes can change.

    The type of a traced array knows only Explicit axes; XLA handles sizes over Auto axes itself.
    """
    traced = isinstance(array, jax.core.Tracer)
    sharding = jax.typeof(array).sharding if traced else getattr(array, 'sharding', None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return array
    entries = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    if all(entries[dim] is None for dim in dims):
        return array
    kept = PartitionSpec(*(None if d in dims else entry for d, entry in enumerate(entries)))
    move = jax.sharding.reshard if traced else jax.device_put
    return move(array, NamedSharding(sharding.mesh, kept))


@jax.custom_vjp
def _backward_barrier(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return arrays


_backward_barrier.defvjp(
    lambda arrays: (arrays, None),
    lambda _, gradients: (jax.lax.optimization_barrier(gradients),),
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['array'], meta_fields=['mesh', 'spec']
)
@dataclasses.dataclass(frozen=True)
class ManualShards:
    """A global array as blocks, one per device, laid out by `spec` over `mesh`.

    It is a pytree, so it can be passed to jit.
    """

    array: jax.Array
    mesh: Mesh
    spec: PartitionSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one block."""
        counts = shards_per_dimension(self.mesh, self.spec)
        return tuple(size // n for size, n in zip(np.shape(self.array), counts, strict=True))

    def apply(
        self,
        fn: Callable[..., jax.Array],
        *others: ManualShards,
        partition_spec: SpecLike | None = None,
    ) -> ManualShards:
        """Runs a function on the blocks of every device.

        Usage:
          shards = enable_manual_sharding(x, mesh, ('x', None))
          total = shards.apply(lambda block: jax.lax.psum(block, 'x'), partition_spec=(None, None))

        Args:
          fn: a function that takes one block of this array and of each of `others`, and returns one
            block. It can use the names of the mesh axes in `jax.lax.psum`, `psum_scatter`,
            `ppermute` and so on. Outside jit, every call compiles it again.
          *others: more arrays on the same mesh.
          partition_spec: the layout of the returned array; by default the layout of this array.

        Raises:
          ValueError: if the results differ along a mesh axis that `partition_spec` does not use; if
            the function does not return one array with the rank of `partition_spec`; if a
            collective uses an axis that the mesh lacks; or if `others` are not on this mesh.
        """
        for number, other in enumerate(others, start=1):
            if not isinstance(other, ManualShards):
                raise ValueError(
                    f'operand {number} is {type(other).__qualname__}, not ManualShards: pass it to '
                    'enable_manual_sharding, with (None, ...) if every device should see all of it'
                )
            if other.mesh != self.mesh:
                raise ValueError(
                    f'operand {number} is on another mesh ({describe_axes(other.mesh)}) than the '
                    f'first array ({describe_axes(self.mesh)}), or their device orders differ'
                )
        spec = self.spec
        if partition_spec is not None:
            spec = resolve_partition_spec(self.mesh, partition_spec)

        @functools.wraps(fn)
        def checked(*blocks: jax.Array) -> jax.Array:
            result = fn(*blocks)
            if not isinstance(result, jax.Array):
                raise ValueError(
                    f'the function must return one array, not {type(result).__qualname__}: call '
                    'apply once per result'
                )
            if result.ndim != len(spec):
                raise ValueError(
                    f'the function returns blocks of shape {result.shape}, but partition spec '
                    f'{tuple(spec)} has {len(spec)} entries: pass partition_spec= for the result'
                )
            return result

        operands = (self, *others)
        in_specs = tuple(operand.spec for operand in operands)
        run = jax.shard_map(checked, mesh=self.mesh, in_specs=in_specs, out_specs=spec)
        try:
            array = jax.jit(run)(*(operand.array for operand in operands))
        except (ValueError, AssertionError, NameError) as error:
            if (message := _explain(error, self.mesh, spec)) is None:
                raise
            raise ValueError(message) from error
        return ManualShards(array=array, mesh=self.mesh, spec=spec)


def enable_manual_sharding(t: Any, mesh: Mesh | None, partition_spec: SpecLike) -> ManualShards:
    """Lays out an array and returns its blocks, for functions that see one block each.

    It takes and raises what `mark_sharding` does.
    """
    mesh = mesh_or_global(mesh)
    if isinstance(t, PaddedArray):
        raise ValueError('t is a PaddedArray: pass t.array, which includes the padding')
    remedy = "pass mark_sharding(..., on_indivisible='pad').array"
    array, spec = lay_out_evenly(t, mesh, partition_spec, remedy)
    return ManualShards(array=array, mesh=mesh, spec=spec)


def disable_manual_sharding(
    shards: ManualShards, full_shape: Sequence[int] | None = None
) -> jax.Array:
    """Returns the global array that consists of the blocks.

    Raises:
      ValueError: if `shards` is not ManualShards, or if the array does not have `full_shape`.
    """
    if not isinstance(shards, ManualShards):
        raise ValueError(
            f'{type(shards).__qualname__} is not ManualShards; enable_manual_sharding returns them'
        )
    shape = tuple(shards.array.shape)
    if full_shape is not None and as_tuple_of(full_shape, 'full_shape') != shape:
        raise ValueError(
            f'blocks of shape {shards.shape}, laid out by {tuple(shards.spec)} over '
            f'{describe_axes(shards.mesh)}, form an array of shape {shape}, not {tuple(full_shape)}'
        )
    return shards.array


def _explain(error: Exception, mesh: Mesh, spec: PartitionSpec) -> str | None:
    """Returns a clearer message for an error of jax, or None if it is clear already."""
    axes = describe_axes(mesh)
    if 'require replication' in str(error):
        return (
            f'partition spec {tuple(spec)} does not use all axes of the mesh {axes}, and the '
            'results may differ along the others: reduce over them (jax.lax.psum, pmean, ...), or '
            'add them to partition_spec=. To gather a dimension, call disable_manual_sharding and '
            'then mark_sharding with None for it'
        )
    # For an axis that the mesh lacks, some collectives of jax raise an empty AssertionError.
    if 'unbound axis name' in str(error):
        return f'{error} The mesh is {axes}'
    if isinstance(error, AssertionError) and not error.args:
        return f'jax raised an AssertionError; perhaps an axis is missing. The mesh is {axes}'
    return None
