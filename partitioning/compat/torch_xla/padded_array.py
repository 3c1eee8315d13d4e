"""Arrays whose sizes their mesh axes do not divide, padded so that they can be sharded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


@functools.partial(jax.tree_util.register_dataclass, data_fields=['array'], meta_fields=['shape'])
@dataclasses.dataclass(frozen=True)
class PaddedArray:
    """An array in equal tiles, the last of them filled up with zeros.

    jax lays out no array whose size its mesh axes do not divide; torch_xla pads it, and so does
    this, where it can be seen. A pytree, so it passes jit's door as it is. Its one leaf is `array`:
    jax.tree.map changes the padding too, and reductions over `array` see it.

    Attributes:
      array: the padded jax.Array.
      shape: the shape of the array without its padding.
    """

    array: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """The type of the array."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """How many dimensions the array has."""
        return len(self.shape)

    def unpadded(self) -> jax.Array:
        """The array of `shape`, no longer sharded along the dimensions that were padded.

        Raises:
          ValueError: `array` is smaller than `shape`, or of another rank.
        """
        held = np.shape(self.array)
        if len(held) != len(self.shape) or any(
            h < n for h, n in zip(held, self.shape, strict=True)
        ):
            raise ValueError(f'an array of shape {held} cannot be {self.shape} with padding')
        dims = [dim for dim, size in enumerate(self.shape) if size < held[dim]]
        if not dims:
            return self.array
        return whole_along(self.array, dims)[tuple(slice(size) for size in self.shape)]


def pad_to_multiple(array: Any, ways: Sequence[int]) -> Any:
    """An array with zeros at the end of each dimension, up to the next multiple of its ways."""
    widths = [(0, -size % n) for size, n in zip(np.shape(array), ways, strict=True)]
    if not any(after for _, after in widths):
        return array
    if not isinstance(array, jax.Array):
        return np.pad(array, widths)
    return jnp.pad(whole_along(array, [d for d, (_, after) in enumerate(widths) if after]), widths)


def whole_along(array: Any, dims: Sequence[int]) -> Any:
    """An array that is not sharded along some dimensions, so that their sizes may change."""
    traced = isinstance(array, jax.core.Tracer)
    sharding = jax.typeof(array).sharding if traced else getattr(array, 'sharding', None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return array
    entries = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    if all(entries[dim] is None for dim in dims):
        return array
    kept = PartitionSpec(*(None if d in dims else entry for d, entry in enumerate(entries)))
    whole = NamedSharding(sharding.mesh, kept)
    if not traced:
        return jax.device_put(array, whole)
    # Over Auto axes XLA itself sees to sizes that do not divide inside a program.
    return jax.sharding.reshard(array, whole) if _is_explicit(sharding) else array


def _is_explicit(sharding: NamedSharding) -> bool:
    return AxisType.Explicit in sharding.mesh.axis_types
