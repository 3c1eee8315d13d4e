"""Which keys each query may see: a mask by distance and by segment.

Suffixes of array names: B batch, L length (queries), S slots (keys and values).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """The distances between a query and the keys that it sees: `least` <= distance < `most`.

    A distance is the place of the query less the place of the key. The methods take integers and
    arrays.

    Attributes:
      least: the least distance, or None if there is none.
      most: the first distance that is too far, or None if there is none.
    """

    least: int | None
    most: int | None

    def sees(self, distance: Any) -> Any:
        """Returns whether keys at this distance are seen."""
        return self.sees_any(distance, distance)

    def sees_any(self, nearest: Any, farthest: Any) -> Any:
        """Returns whether a key at any distance from `nearest` to `farthest` is seen."""
        seen = nearest <= farthest
        if self.least is not None:
            seen = seen & (farthest >= self.least)
        if self.most is not None:
            seen = seen & (nearest < self.most)
        return seen

    def sees_all(self, nearest: Any, farthest: Any) -> Any:
        """Returns whether all keys at distances from `nearest` to `farthest` are seen."""
        return self.sees(nearest) & self.sees(farthest)


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

    @property
    def band(self) -> Band:
        """The distances that a query can see, whatever the arrays are."""
        local = isinstance(self.local, bool) and self.local
        return Band(least=0 if self.causal else None, most=self.window if local else None)

    @property
    def local_band(self) -> Band:
        """The distances that a query sees if the window applies."""
        return Band(least=0 if self.causal else None, most=self.window)

    @property
    def chooses(self) -> bool:
        """Whether an array decides if the window applies."""
        return self.window is not None and not isinstance(self.local, bool)

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the fields that are arrays."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {n: x for n, x in fields.items() if not isinstance(x, bool | int | None)}

    def without_arrays(self) -> Sight:
        """Returns the fields that are not arrays, and None for those that are; it can be hashed."""
        nothing: dict[str, Any] = dict.fromkeys(self.arrays())
        return dataclasses.replace(self, **nothing)

    def with_arrays(self, arrays: Mapping[str, Any]) -> Sight:
        """Returns this sight with `arrays` as its fields."""
        return dataclasses.replace(self, **arrays)

    def mask(self, length: int, slots: int) -> jax.Array:
        """Returns whether each query sees each key: bool [batch or 1, 1, length, slots]."""
        distance_LS = self.first + jnp.arange(length)[:, None] - jnp.arange(slots)
        mask = self.sees(distance_LS)[None, None]
        if self.segments_BL is not None and self.segments_BS is not None:
            mask &= (self.segments_BL[:, :, None] == self.segments_BS[:, None, :])[:, None]
        return mask

    def sees(self, distance: Any) -> Any:
        """Returns whether a query sees keys of its segment at this distance."""
        return self.sees_any(distance, distance)

    def sees_any(self, nearest: Any, farthest: Any) -> Any:
        """Returns whether a query sees keys of its segment from `nearest` to `farthest`."""
        seen = self.band.sees_any(nearest, farthest)
        if self.chooses:
            seen &= self.local_band.sees_any(nearest, farthest) | jnp.logical_not(self.local)
        return seen
