"""Which keys a query sees by their distance alone: single keys, and whole blocks."""

from __future__ import annotations

import dataclasses
from typing import Any


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
