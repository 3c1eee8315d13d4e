"""The order in which devices share the queries of a row, so that all have the same work.

Under a causal mask, late queries see more keys than early ones. The devices that share a row have
contiguous parts of it, so the last one would work longest, and all others would wait. For
attention, the parts are cut into halves, and of n devices, device i takes half i and half
2n - 1 - i of the row, one early and one late: together they see as many keys on every device.

Suffixes of array names: B batch, L length of a device, and any dimensions after these.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Zigzag:
    """Moves halves of the parts of a row between the devices along mesh axes, in a shard_map.

    Attributes:
      axes: the mesh axes that divide the length of the row.
      devices: the number of devices along these axes.
    """

    axes: tuple[str, ...]
    devices: int

    def numbers(self) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of the early and the late half of this device, scalars."""
        device = jax.lax.axis_index(self.axes)
        return device, 2 * self.devices - 1 - device

    def spread(self, x_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the early and the late half of this device, for the contiguous part that it has.

        Raises:
          ValueError: if the length is odd.
        """
        even, odd = (
            jax.lax.ppermute(half, self.axes, self._moves(parity))
            for parity, half in enumerate(jnp.split(x_BL, 2, axis=1))
        )
        # Of half i and half 2n - 1 - i, one has an even number.
        is_even = jax.lax.axis_index(self.axes) % 2 == 0
        return jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)

    def collect(self, early_BL: jax.Array, late_BL: jax.Array) -> jax.Array:
        """Returns the contiguous part of this device: the inverse of `spread`."""
        is_even = jax.lax.axis_index(self.axes) % 2 == 0
        halves = (
            jnp.where(is_even, early_BL, late_BL),
            jnp.where(is_even, late_BL, early_BL),
        )
        moved = (
            jax.lax.ppermute(half, self.axes, [(to, at) for at, to in self._moves(parity)])
            for parity, half in enumerate(halves)
        )
        return jnp.concatenate([*moved], axis=1)

    def _moves(self, parity: int) -> list[tuple[int, int]]:
        """Pairs of devices: the contiguous and the final place of even or odd halves."""
        numbers = range(parity, 2 * self.devices, 2)
        return [(n // 2, min(n, 2 * self.devices - 1 - n)) for n in numbers]
