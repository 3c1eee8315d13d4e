"""Which device holds which block of an array: as data, as text, and in the colours of rich."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding, Sharding

from partitioning.layout.ownership import index_bounds
from partitioning.plan.rows import sharding_str
from partitioning.rules import check_spec
from partitioning.state import shape_of
from partitioning.state.boxes import array_of

Range = tuple[int, int]  # start and stop
Block = tuple[Range, ...]  # one range a dimension
Color = tuple[int, int, int]  # red, green and blue of 255

_LISTED = 16  # characters of device numbers in one block
_TEXT_WIDTH = 100
# Dark to light in steps that look even; the same on a terminal and on paper.
_COLORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


class Panel(NamedTuple):
    """The blocks along two dimensions, at one place along all others.

    Attributes:
      place: the range of each dimension that is sharded and not drawn, by its number.
      rows: the blocks, by row and column.
    """

    place: Mapping[int, Range]
    rows: tuple[tuple[Block, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ShardingPicture:
    """Which device holds which block of an array; made by `visualize_sharding`.

    `print` shows it as text, `rich.print` in colour, a notebook as an image.

    Attributes:
      shape: of the global array.
      title: a line above the blocks.
      devices: for each block the ids of the devices that hold it, rising.
      drawn: the dimensions drawn downwards and to the right; None: no dimension.
    """

    shape: tuple[int, ...]
    title: str
    devices: Mapping[Block, tuple[int, ...]]
    drawn: tuple[int | None, int | None]

    @functools.cached_property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """The ranges of the blocks along each dimension, rising."""
        return tuple(tuple(sorted({*along})) for along in zip(*self.devices, strict=True))

    def ranges_along(self, dim: int | None) -> tuple[Range | None, ...]:
        """The ranges along one dimension; where there is none, one place without a range."""
        return (None,) if dim is None else self.ranges[dim]

    @functools.cached_property
    def panels(self) -> tuple[Panel, ...]:
        """All that is drawn: one panel, or several where other dimensions are sharded too."""
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
        """The devices of a block in few characters: `0-3`, `0,8..56`."""
        return compact_ids(self.devices[block])

    def color(self, block: Block) -> Color:
        """By the first device that holds the block."""
        last = len(self._order) - 1
        step = (self._order[block] / last if last else 0.5) * (len(_COLORS) - 1)
        low = min(int(step), len(_COLORS) - 2)
        red, green, blue = (
            round(a + (step - low) * (b - a))
            for a, b in zip(_COLORS[low], _COLORS[low + 1], strict=True)
        )
        return red, green, blue

    def figure(self) -> Any:
        """The picture as a matplotlib Figure.

        Raises:
          RuntimeError: matplotlib is not installed.
        """
        from partitioning.pictures.memory import sharding_figure

        return sharding_figure(self)

    def __repr__(self) -> str:
        return f'ShardingPicture({self.title!r})'

    def __str__(self) -> str:
        lines = (''.join(text for text, _ in line).rstrip() for line in self._lines(_TEXT_WIDTH))
        return '\n'.join(lines)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text  # rich calls this, so it is there

        for line in self._lines(options.max_width):
            drawn = Text()
            for text, color in line:
                drawn.append(text, style=None if color is None else _style(color))
            yield drawn

    def _repr_png_(self) -> bytes:
        from partitioning.pictures.memory import png_of

        return png_of(self.figure())

    @functools.cached_property
    def _order(self) -> dict[Block, int]:
        ordered = sorted(self.devices, key=lambda block: self.devices[block])
        return {block: place for place, block in enumerate(ordered)}

    def _block(self, at: Mapping[Any, Any]) -> Block:
        return tuple(at[dim] for dim in range(len(self.shape)))

    def _lines(self, width: int) -> Iterator[list[tuple[str, Color | None]]]:
        """Lines of texts, each with its colour, the columns in as many bands as they need."""
        downs, rights = (self.ranges_along(dim) for dim in self.drawn)
        heads, sides = [range_str(right) for right in rights], [range_str(down) for down in downs]
        margin = max(map(len, sides)) + 2
        cell = max(map(len, [*heads, *map(self.label, self.devices)])) + 2
        fit = max((width - margin) // (cell + 1), 1)
        yield [(self.title, None)]
        if len(self.shape) > 2:
            yield [('dimension {} downwards, {} to the right'.format(*self.drawn), None)]
        for panel in self.panels:
            if panel.place:
                yield [(place_str(panel.place), None)]
            for first in range(0, len(heads), fit):
                band = slice(first, first + fit)
                if any(heads):
                    yield [(' ' * margin, None), *((f'{h:^{cell}} ', None) for h in heads[band])]
                for side, blocks in zip(sides, panel.rows, strict=True):
                    line: list[tuple[str, Color | None]] = [(f'{side:>{margin - 2}}  ', None)]
                    for block in blocks[band]:
                        line += [(f'{self.label(block):^{cell}}', self.color(block)), (' ', None)]
                    yield line


def visualize_sharding(
    x: Any,
    sharding: Sharding | None = None,
    *,
    dims: Sequence[int] | None = None,
    title: str | None = None,
    png: str | os.PathLike[str] | None = None,
) -> ShardingPicture:
    """Shows which device holds which block of an array.

    Usage:
      print(visualize_sharding(state.params['embedding']))
      visualize_sharding((1024, 4096), NamedSharding(mesh, P('data', 'model')), png='kernel.png')

    Args:
      x: an array, a ShapeDtypeStruct, either in a box of linen's or a variable of nnx's, or a
        shape.
      sharding: how it is laid out; by default as `x` says itself.
      dims: the two dimensions to draw, downwards and to the right; by default those in the most
        blocks, in their order. Every block of further sharded dimensions has a panel of its own.
      title: the line above; by default shape and sharding.
      png: a file to draw into, with matplotlib.

    Returns:
      The picture, for `print`, `rich.print`, notebooks, and `figure()`.

    Raises:
      ValueError: `x` is no array and no shape, or does not say its sharding; a sharding that the
        array cannot have, or that is over no devices; `dims` that are not two different dimensions.
      RuntimeError: `png` without matplotlib.
    """
    array = array_of(x)
    shape = _shape(x, array)
    sharding = getattr(array, 'sharding', None) if sharding is None else sharding
    if not isinstance(sharding, Sharding):
        raise ValueError(
            f'{type(x).__name__} of shape {shape} has no sharding, but {sharding!r}: give '
            'sharding=NamedSharding(mesh, spec)'
        )
    if isinstance(sharding, NamedSharding):
        if not isinstance(sharding.mesh, Mesh):
            raise ValueError(f'{sharding} is over an abstract mesh, which has no devices to show')
        check_spec(sharding.spec, sharding.mesh, 'the array', shape)
    devices: dict[Block, list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        devices.setdefault(index_bounds(index, shape), []).append(device.id)  # type: ignore[attr-defined]
    picture = ShardingPicture(
        shape=shape,
        title=f'{shape}, {sharding_str(sharding)}' if title is None else title,
        devices={block: tuple(sorted(ids)) for block, ids in sorted(devices.items())},
        drawn=_drawn(shape, list(devices), dims),
    )
    if png is not None:
        picture.figure().savefig(png)
    return picture


def compact_ids(ids: Sequence[int]) -> str:
    """Rising numbers in few characters: `0-3`, `0,2`, `0,8..56`, `0-3 8-11`, `0..90 (12)`."""
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
    return listed if len(listed) <= _LISTED else f'{ids[0]}..{ids[-1]} ({len(ids)})'


def range_str(range_: Range | None) -> str:
    """A range as it is written in an index: `0:256`."""
    return '' if range_ is None else f'{range_[0]}:{range_[1]}'


def place_str(place: Mapping[int, Range]) -> str:
    """Where a panel is: `dimension 0 at 0:4`."""
    return ', '.join(f'dimension {dim} at {range_str(at)}' for dim, at in place.items())


def is_dark(color: Color) -> bool:
    """Whether white is to be read on it better than black."""
    red, green, blue = color
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _style(color: Color) -> str:
    red, green, blue = color
    return f'{"white" if is_dark(color) else "black"} on rgb({red},{green},{blue})'


def _shape(x: Any, array: Any) -> tuple[int, ...]:
    """The shape of an array, or one that is given."""
    if hasattr(x, 'unpadded'):
        raise ValueError(
            f'a {type(x).__name__} is in tiles that end in padding: draw its .array with the '
            'padding, or .unpadded() without'
        )
    given = isinstance(x, tuple | list)
    if not given and not hasattr(array, 'shape'):
        raise ValueError(f'{x!r} is no array and no shape, which is a tuple: (8, 4)')
    shape = tuple(x) if given else shape_of(array)
    # jax keeps what it makes of a shape, and takes 8 for 8.0 from then on.
    if not all(_is_whole(size) and size >= 0 for size in shape):
        raise ValueError(f'shape {shape} must be whole numbers of 0 or more')
    return tuple(map(int, shape))


def _is_whole(x: object) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _drawn(
    shape: tuple[int, ...], blocks: Sequence[Block], dims: Sequence[int] | None
) -> tuple[int | None, int | None]:
    """The dimensions that are drawn downwards and to the right."""
    rank = len(shape)
    if dims is not None:
        if not isinstance(dims, Sequence) or not all(map(_is_whole, dims)):
            raise ValueError(f'dims={dims!r} must be the numbers of two dimensions, such as (0, 1)')
        chosen = [dim + rank if dim < 0 else dim for dim in dims]
        if len(set(chosen)) != 2 or len(chosen) != 2 or not {*chosen} <= {*range(rank)}:
            raise ValueError(
                f'dims={dims!r} must be two different dimensions of {rank}, of {shape}'
            )
        return chosen[0], chosen[1]
    if rank < 2:
        return None, 0 if rank else None
    ways = [len({block[dim] for block in blocks}) for dim in range(rank)]
    # Of equal ones the last: these are the dimensions of a layer, the first those of the stack.
    most = sorted(range(rank), key=lambda dim: (ways[dim], dim))[-2:]
    return min(most), max(most)
