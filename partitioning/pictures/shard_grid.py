"""The blocks of an array and the devices that hold them, as a grid to draw."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Range = tuple[int, int]  # start and stop
Block = tuple[Range, ...]  # one range per dimension
Color = tuple[int, int, int]  # red, green and blue, each at most 255

_MAX_LABEL = 16  # the most characters of device numbers in one block
# Dark to light in steps of equal visual distance; the same on a terminal and on paper.
_COLORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


class Panel(NamedTuple):
    """The blocks along two dimensions, at one place along all others.

    Attributes:
      place: the range of each dimension that is sharded but not drawn, by the number of the
        dimension.
      rows: the blocks, by row and column.
    """

    place: Mapping[int, Range]
    rows: tuple[tuple[Block, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ShardGrid:
    """The blocks of an array, arranged along two of its dimensions.

    Attributes:
      shape: the global shape of the array.
      title: a line above the blocks.
      devices: for each block the ids of the devices that hold it, in ascending order.
      drawn: the dimensions drawn downwards and to the right, each None if there is none.
    """

    shape: tuple[int, ...]
    title: str
    devices: Mapping[Block, tuple[int, ...]]
    drawn: tuple[int | None, int | None]

    @functools.cached_property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """The ranges of the blocks along each dimension, in ascending order."""
        return tuple(tuple(sorted({*along})) for along in zip(*self.devices, strict=True))

    def ranges_along(self, dim: int | None) -> tuple[Range | None, ...]:
        """The ranges along one dimension, or a single None if there is no dimension."""
        return (None,) if dim is None else self.ranges[dim]

    @functools.cached_property
    def panels(self) -> tuple[Panel, ...]:
        """The panels to draw: one, or several if dimensions that are not drawn are sharded."""
        row, column = self.drawn
        others = [dim for dim in range(len(self.shape)) if dim not in self.drawn]
        panels = []
        for place in itertools.product(*(self.ranges[dim] for dim in others)):
            at: dict[Any, Any] = dict(zip(others, place, strict=True))
            rows = tuple(
                tuple(
                    self._block({**at, row: down, column: right})
                    for right in self.ranges_along(column)
                )
                for down in self.ranges_along(row)
            )
            split = {dim: at[dim] for dim in others if len(self.ranges[dim]) > 1}
            panels.append(Panel(split, rows))
        return tuple(panels)

    def label(self, block: Block) -> str:
        """The devices of a block in few characters: `0-3` or `0,8..56`."""
        return compact_ids(self.devices[block])

    def color(self, block: Block) -> Color:
        """The color of a block, given by the first device that holds it."""
        return shade(self._order[block], len(self._order))

    @functools.cached_property
    def _order(self) -> dict[Block, int]:
        ordered = sorted(self.devices, key=lambda block: self.devices[block])
        return {block: place for place, block in enumerate(ordered)}

    def _block(self, at: Mapping[Any, Any]) -> Block:
        return tuple(at[dim] for dim in range(len(self.shape)))


def shade(number: int, count: int) -> Color:
    """The color of one of `count` things, from dark to light."""
    step = (number / (count - 1) if count > 1 else 0.5) * (len(_COLORS) - 1)
    low = min(int(step), len(_COLORS) - 2)
    red, green, blue = (
        round(a + (step - low) * (b - a))
        for a, b in zip(_COLORS[low], _COLORS[low + 1], strict=True)
    )
    return red, green, blue


def compact_ids(ids: Sequence[int]) -> str:
    """Ascending numbers in few characters: `0-3`, `0,2`, `0,8..56`, `0-3 8-11`, `0..90 (12)`."""
    if len(ids) > 2:
        step = ids[1] - ids[0]
        if all(b - a == step for a, b in itertools.pairwise(ids)):
            return f'{ids[0]}-{ids[-1]}' if step == 1 else f'{ids[0]},{ids[1]}..{ids[-1]}'
    runs: list[list[int]] = []
    for number in ids:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    listed = ','.join(f'{r[0]}-{r[-1]}' if len(r) > 2 else ','.join(map(str, r)) for r in runs)
    return listed if len(listed) <= _MAX_LABEL else f'{ids[0]}..{ids[-1]} ({len(ids)})'


def range_str(range_: Range | None) -> str:
    """A range as an index writes it: `0:256`."""
    return '' if range_ is None else f'{range_[0]}:{range_[1]}'


def place_str(place: Mapping[int, Range]) -> str:
    """The place of a panel: `dimension 0 at 0:4`."""
    return ', '.join(f'dimension {dim} at {range_str(at)}' for dim, at in place.items())


def is_dark(color: Color) -> bool:
    """Whether white text is easier to read on a color than black text."""
    red, green, blue = color
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140
