"""Laying out arrays over a mesh, outside a program and within."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, overload

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from partitioning.compat.torch_xla.meshes import mesh_or_global
from partitioning.compat.torch_xla.padded_array import PaddedArray, pad_to_multiple
from partitioning.compat.torch_xla.partition_spec import SpecLike, resolve_partition_spec, ways_of
from partitioning.constraints import with_sharding_constraint
from partitioning.hardware import JaxDevice
from partitioning.rules import describe_axes

OnIndivisible = Literal['error', 'pad', 'replicate']


@overload
def mark_sharding(
    t: Any,
    mesh: Mesh | None,
    partition_spec: SpecLike,
    *,
    on_indivisible: Literal['error', 'replicate'] = 'error',
) -> jax.Array: ...


@overload
def mark_sharding(
    t: Any, mesh: Mesh | None, partition_spec: SpecLike, *, on_indivisible: OnIndivisible
) -> jax.Array | PaddedArray: ...


def mark_sharding(
    t: Any,
    mesh: Mesh | None,
    partition_spec: SpecLike,
    *,
    on_indivisible: OnIndivisible = 'error',
) -> jax.Array | PaddedArray:
    """Lays out an array over a mesh.

    Outside a traced function the array is moved there; within one its layout is constrained, over
    Explicit axes resharded. Arrays are immutable: `t` stays as it is, and what is marked already
    may be marked again, in any other way.

    Usage:
      x = mark_sharding(x, mesh, ('data', None))

    Args:
      t: an array, of jax or numpy, a scalar, or a PaddedArray.
      mesh: the mesh; None for the global one.
      partition_spec: for each dimension a mesh dimension or name, a tuple of them, or None.
      on_indivisible: what becomes of a dimension whose size its mesh axes do not divide:
        'error'; 'pad': the array is padded with zeros to equal tiles, also within traced functions
        (where XLA itself would pad what is constrained, but return it whole on each device);
        'replicate': the dimension is whole on each device.

    Returns:
      The array, laid out so; a PaddedArray where it had to be padded.

    Raises:
      ValueError: a spec that the mesh or the array cannot have, sizes that do not divide.
    """
    mesh = mesh_or_global(mesh)
    if on_indivisible not in get_args(OnIndivisible):
        *others, last = map(repr, get_args(OnIndivisible))
        raise ValueError(
            f'on_indivisible must be {", ".join(others)} or {last}, not {on_indivisible!r}'
        )
    array = t.unpadded() if isinstance(t, PaddedArray) else t
    shape = check_array(array)
    spec = resolve_partition_spec(mesh, partition_spec, len(shape))
    ways = ways_of(mesh, spec)
    uneven = uneven_dims(shape, ways)
    if on_indivisible == 'error':
        way_out = "or mark_sharding with on_indivisible='pad' or 'replicate'"
        check_divisible(shape, mesh, spec, way_out)
    if uneven and on_indivisible == 'pad':
        padded = pad_to_multiple(array, ways)
        return PaddedArray(array=_lay_out(padded, NamedSharding(mesh, spec)), shape=shape)
    kept = PartitionSpec(*(None if dim in uneven else axes for dim, axes in enumerate(spec)))
    return _lay_out(array, NamedSharding(mesh, kept))


def clear_sharding(t: Any) -> jax.Array:
    """An array without a layout of its own.

    Args:
      t: a jax.Array, or a PaddedArray.

    Returns:
      Outside a traced function the whole array on one device, of those it lies on the one with the
      lowest id. Within one the array with every dimension left to XLA; over Explicit axes, whose
      arrays always have a layout, the one that is whole on each device.

    Raises:
      ValueError: no jax.Array, or one that several processes hold.
    """
    array = t.unpadded() if isinstance(t, PaddedArray) else t
    if isinstance(array, jax.core.Tracer):
        return _unconstrained(array)
    if not isinstance(array, jax.Array):
        raise ValueError(f'{type(t).__qualname__} has no sharding to clear: it is no jax.Array')
    if not array.is_fully_addressable:
        raise ValueError(
            f'an array of shape {array.shape} on devices of several processes cannot be on one '
            'device: replicate it with mark_sharding(t, mesh, (None, ...)), or take this '
            "process's part with local_shards"
        )
    devices: Iterable[JaxDevice] = array.sharding.device_set
    first = min(devices, key=lambda device: device.id)
    return jax.device_put(array, SingleDeviceSharding(first))


def check_array(t: Any) -> tuple[int, ...]:
    """The shape of an array, or of a number.

    Raises:
      ValueError: neither.
    """
    if isinstance(t, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return tuple(np.shape(t))
    raise ValueError(
        f'{type(t).__qualname__} is no array: give one of jax or numpy; of a pytree, map over '
        'its leaves'
    )


def check_divisible(shape: Sequence[int], mesh: Mesh, spec: PartitionSpec, way_out: str) -> None:
    """Raises ValueError where the axes of a resolved spec do not divide a size.

    Args:
      way_out: what else to do where this is called, `or ...`.
    """
    ways = ways_of(mesh, spec)
    for dim in uneven_dims(shape, ways)[:1]:
        size, n = shape[dim], ways[dim]
        below = size // n * n
        fits = f'{below} or {below + n}' if below else n
        axes = f'axes {spec[dim]}' if isinstance(spec[dim], tuple) else f'axis {spec[dim]!r}'
        raise ValueError(
            f'dimension {dim} of shape {tuple(shape)}: {size} does not divide by {n}, the size of '
            f'mesh {axes}. Use {fits}, {way_out}'
        )


def uneven_dims(shape: Sequence[int], ways: Sequence[int]) -> list[int]:
    """The dimensions whose sizes do not divide by their ways."""
    return [dim for dim, (size, n) in enumerate(zip(shape, ways, strict=True)) if size % n]


def _lay_out(t: Any, sharding: NamedSharding) -> jax.Array:
    if not isinstance(t, jax.core.Tracer):
        # Within a trace this is an operation of the program, whose result XLA lays out as it likes.
        t = jax.device_put(t, sharding)
        if not isinstance(t, jax.core.Tracer):
            return t
    mesh, context = sharding.mesh, jax.sharding.get_abstract_mesh()
    if AxisType.Manual not in context.axis_types:
        if set(mesh.axis_types) == {AxisType.Auto}:
            return jax.lax.with_sharding_constraint(t, sharding)
        if set(mesh.axis_types) == {AxisType.Explicit}:
            return jax.sharding.reshard(t, sharding)
    # Of axes of several types, only those of the mesh in use can be told apart.
    if context.shape != mesh.shape:
        raise ValueError(
            f'the mesh in use here is {describe_axes(context.shape) or "none"}, not '
            f'{describe_axes(mesh.shape)} with axes of types '
            f'{", ".join(kind.name for kind in mesh.axis_types)}: call the function under '
            'jax.set_mesh(mesh)'
        )
    return with_sharding_constraint(t, sharding.spec)


def _unconstrained(t: jax.Array) -> jax.Array:
    mesh = jax.typeof(t).sharding.mesh
    if mesh.empty:
        return t  # a constraint needs a mesh, and to leave everything to XLA none is needed
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(t, NamedSharding(mesh, PartitionSpec()))
    if AxisType.Manual in mesh.axis_types:
        raise ValueError('an array inside a shard_map is the block of one device, without a layout')
    free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * t.ndim)
    return jax.lax.with_sharding_constraint(t, NamedSharding(mesh, free))
