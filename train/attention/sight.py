"""What each query of an attention sees.

Suffixes of array names: B batch, L length (queries), S slots (keys and values).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """What each query sees: keys at its own place and before it, in its window and its segment.

    The place of a key is its slot 0, 1, 2, ..., and the place of query number n is `first` + n.

    Attributes:
      causal: whether a query sees only keys at its own place and before it.
      first: the place of the first query, an integer or a scalar array.
      window: the number of keys that a query sees if `local`: its own and those before it. None is
        no window.
      local: whether the window applies, a bool or a scalar array.
      segments_BL: the int segment of each query, or None if a row is one segment. A query sees only
        keys of its own segment.
      key_segments_BS: the same of each key. By default, `segments_BL`.
    """

    causal: bool = True
    first: int | jax.Array = 0
    window: int | None = None
    local: bool | jax.Array = True
    segments_BL: jax.Array | None = None
    key_segments_BS: jax.Array | None = None

    @property
    def segments_BS(self) -> jax.Array | None:
        """The segment of each key, or None if a row is one segment."""
        if self.segments_BL is None or self.key_segments_BS is None:
            return self.segments_BL
        return self.key_segments_BS

    def mask(self, length: int, slots: int) -> jax.Array | None:
        """Returns whether each query sees each key: bool [batch or 1, 1, length, slots], or None.

        None means that every query sees every key.
        """
        mask = None
        distance_LS = self.first + jnp.arange(length)[:, None] - jnp.arange(slots)
        if self.causal:
            mask = (distance_LS >= 0)[None, None]
        if self.window is not None and self.local is not False:
            near = (distance_LS < self.window) | jnp.logical_not(self.local)
            mask = _both(mask, near[None, None])
        if self.segments_BL is not None and self.segments_BS is not None:
            same = self.segments_BL[:, :, None] == self.segments_BS[:, None, :]
            mask = _both(mask, same[:, None])
        return mask


def _both(one: jax.Array | None, other: jax.Array) -> jax.Array:
    return other if one is None else one & other
