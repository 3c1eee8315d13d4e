"""Which device holds which block of an array, as text, in color with rich, and as an image."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from partitioning.layout.ownership import index_bounds
from partitioning.pictures.figures import TICKS, new_figure, png_of
from partitioning.rules import check_spec, sharding_str
from partitioning.state import shape_of
from partitioning.state.boxes import array_of
from partitioning.values import value_str

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Range = tuple[int, int]  # start and stop
Block = tuple[Range, ...]  # one range per dimension
Color = tuple[int, int, int]  # red, green and blue, each at most 255

_PANELS_ACROSS = 4
_POINTS = 72  # per inch
_SMALLEST_TEXT = 4.0  # points; smaller text cannot be read
_TEXT_WIDTH = 100
_MAX_LABEL = 16  # the most characters of device numbers in one block
# Dark to light in steps of equal visual distance; the same on a terminal and on paper.
_COLORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


class Panel(NamedTuple):
    """The blocks along two dimensions, by row and column, at one place along all others.

    The place has the range of each dimension that is sharded but not drawn, by its number.
    """

    place: Mapping[int, Range]
    rows: tuple[tuple[Block, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ShardingPicture:
    """Which device holds which block of an array; `visualize_sharding` makes it.

    `print` shows it as text, `rich.print` in color, and a notebook as an image.

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
        """The ranges of the blocks along a dimension; `(None,)` if `dim` is None."""
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

    def figure(self) -> Figure:
        """The picture as a matplotlib Figure. All blocks are drawn in one size.

        Each has the color and the numbers of its devices. The numbers at the edges count elements.

        Raises:
          RuntimeError: if matplotlib is not installed.
        """
        downs, rights = (self.ranges_along(dim) for dim in self.drawn)
        across = min(len(self.panels), _PANELS_ACROSS)
        down = math.ceil(len(self.panels) / across)
        # Blocks get the space that their numbers need, as long as the picture fits a page.
        longest = max(map(len, map(self.label, self.devices)))
        width = min(max(len(rights) * max(0.45, 0.085 * longest + 0.1), 2.2), 9.0 / across)
        height = min(max(len(downs) * 0.36, 0.8), 8.0 / down)
        least = 0.075 * len(self.title)
        figure = new_figure(
            (max(across * (width + 0.5) + 0.3, least), down * (height + 0.5) + 0.35)
        )
        for number, panel in enumerate(self.panels, start=1):
            plot = figure.add_subplot(down, across, number)
            _draw_blocks(plot, self, panel, width / len(rights), height / len(downs))
            plot.set_title(place_str(panel.place), fontsize=8)
            plot.invert_yaxis()
            _number_blocks(plot.xaxis, rights, self.drawn[1])
            _number_blocks(plot.yaxis, downs, self.drawn[0])
            plot.spines[:].set_visible(False)
        figure.suptitle(self.title, fontsize=9)
        return figure

    def __repr__(self) -> str:
        return f'ShardingPicture({self.title!r})'

    def __str__(self) -> str:
        lines = (''.join(text for text, _ in line).rstrip() for line in self._lines(_TEXT_WIDTH))
        return '\n'.join(lines)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text  # only rich calls this, so it is installed

        for line in self._lines(options.max_width):
            drawn = Text()
            for text, color in line:
                style = None
                if color is not None:
                    ink = 'white' if is_dark(color) else 'black'
                    style = f'{ink} on rgb({",".join(map(str, color))})'
                drawn.append(text, style=style)
            yield drawn

    def _repr_png_(self) -> bytes:
        return png_of(self.figure())

    def _lines(self, width: int) -> Iterator[list[tuple[str, Color | None]]]:
        """The lines as pieces of text with their colors; wide grids are split into bands."""
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
    runs = np.split(np.array(ids), np.flatnonzero(np.diff(ids) != 1) + 1)
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


def _draw_blocks(
    plot: Any, picture: ShardingPicture, panel: Panel, width: float, height: float
) -> None:
    """Draws the blocks of a panel in the given size, in inches, with numbers if they fit."""
    colors = [[picture.color(block) for block in row] for row in panel.rows]
    plot.pcolormesh(
        np.arange(len(colors[0]) + 1),
        np.arange(len(colors) + 1),
        np.array(colors, np.uint8),
        edgecolor='white',
        linewidth=1.2 if min(width, height) > 0.1 else 0,
    )
    labels = [[picture.label(block) for block in row] for row in panel.rows]
    # The largest font size that fits all blocks, whose size is in inches.
    longest = max(len(label) for row in labels for label in row)
    size = min(9.0, 0.55 * height * _POINTS, 0.9 * width * _POINTS / (0.62 * longest))
    if size < _SMALLEST_TEXT:
        return
    for y, row in enumerate(labels):
        for x, label in enumerate(row):
            ink = 'white' if is_dark(colors[y][x]) else 'black'
            at = (x + 0.5, y + 0.5)
            plot.text(*at, label, size=size, color=ink, ha='center', va='center')


def _number_blocks(axis: Any, ranges: Sequence[Range | None], dim: int | None) -> None:
    """Labels the edges of blocks with their first elements, and with the dimension."""
    if dim is None:
        axis.set_ticks([])
        return
    known = [range_ for range_ in ranges if range_ is not None]
    edges = [*(start for start, _ in known), known[-1][1]]
    step = -(-len(ranges) // TICKS)
    places = sorted({*range(0, len(ranges), step), len(ranges)})
    axis.set_ticks(places, [str(edges[place]) for place in places], fontsize=7)
    axis.set_label_text(f'dimension {dim}', fontsize=8)
    axis.set_tick_params(length=0)


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
      x: an array or a ShapeDtypeStruct, also in a linen box or an nnx variable; or a shape.
      sharding: the sharding of the array; by default the sharding of `x`.
      dims: the two dimensions to draw, downwards and to the right; by default the two with the most
        blocks. Each block of other sharded dimensions gets a separate panel.
      title: the line above; by default the shape and the sharding.
      png: a file to draw into with matplotlib.

    Raises:
      ValueError: if `x` is neither an array nor a shape, or has no sharding; if the array cannot
        have the sharding, or it has no devices; if `dims` are not two different dimensions.
      RuntimeError: if `png` is given and matplotlib is not installed.
    """
    array = array_of(x)
    shape = _shape(x, array)
    sharding = getattr(array, 'sharding', None) if sharding is None else sharding
    if not isinstance(sharding, Sharding):
        raise ValueError(
            f'the {type(x).__name__} of shape {shape} has no sharding: pass '
            f'sharding=NamedSharding(mesh, spec), not {value_str(sharding)}'
        )
    if isinstance(sharding, NamedSharding):
        if not isinstance(sharding.mesh, Mesh):
            raise ValueError(f'{sharding} has an abstract mesh, which has no devices to show')
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


def _shape(x: Any, array: Any) -> tuple[int, ...]:
    """The shape of an array, or the given shape."""
    if hasattr(x, 'unpadded'):
        raise ValueError(
            f'a {type(x).__name__} has padding: draw its .array with the padding, or .unpadded() '
            'without it'
        )
    given = isinstance(x, tuple | list)
    if not given and not hasattr(array, 'shape'):
        raise ValueError(f'{value_str(x)} must be an array or a shape, such as (8, 4)')
    shape = tuple(x) if given else shape_of(array)
    # jax caches what it derives from a shape, and would then return 8.0 for 8.
    if not all(_is_whole(size) and size >= 0 for size in shape):
        raise ValueError(f'shape {shape} must consist of integers >= 0')
    return tuple(map(int, shape))


def _is_whole(x: object) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _drawn(
    shape: tuple[int, ...], blocks: Sequence[Block], dims: Sequence[int] | None
) -> tuple[int | None, int | None]:
    """The dimensions to draw downwards and to the right."""
    rank = len(shape)
    if dims is not None:
        if not isinstance(dims, Sequence) or not all(map(_is_whole, dims)):
            raise ValueError(f'dims={dims!r} must be the numbers of two dimensions, such as (0, 1)')
        chosen = [dim + rank if dim < 0 else dim for dim in dims]
        if len(set(chosen)) != 2 or len(chosen) != 2 or not {*chosen} <= {*range(rank)}:
            raise ValueError(f'dims={dims!r} must be two different dimensions of the shape {shape}')
        return chosen[0], chosen[1]
    if rank < 2:
        return None, 0 if rank else None
    num_shards = [len({block[dim] for block in blocks}) for dim in range(rank)]
    # Among equals the last win: the first dimensions often stack layers.
    most = sorted(range(rank), key=lambda dim: (num_shards[dim], dim))[-2:]
    return min(most), max(most)
