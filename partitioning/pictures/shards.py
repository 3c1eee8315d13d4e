"""Which device holds which block of an array, as text, in color with rich, and as an image."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, Sharding

from partitioning.layout.ownership import index_bounds
from partitioning.pictures.figures import png_of
from partitioning.pictures.shard_figures import sharding_figure
from partitioning.pictures.shard_grid import (
    Block,
    Color,
    ShardGrid,
    is_dark,
    place_str,
    range_str,
)
from partitioning.rules import check_spec, sharding_str
from partitioning.state import shape_of
from partitioning.state.boxes import array_of

_TEXT_WIDTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ShardingPicture(ShardGrid):
    """Which device holds which block of an array; `visualize_sharding` makes it.

    `print` shows it as text, `rich.print` in color, and a notebook as an image.
    """

    def figure(self) -> Any:
        """The picture as a matplotlib Figure.

        Raises:
          RuntimeError: if matplotlib is not installed.
        """
        return sharding_figure(self)

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
                drawn.append(text, style=None if color is None else _style(color))
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

    Returns:
      The picture, for `print`, `rich.print`, notebooks and `figure()`.

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
            f'sharding=NamedSharding(mesh, spec), not {sharding!r}'
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


def _style(color: Color) -> str:
    red, green, blue = color
    return f'{"white" if is_dark(color) else "black"} on rgb({red},{green},{blue})'


def _shape(x: Any, array: Any) -> tuple[int, ...]:
    """The shape of an array, or the given shape."""
    if hasattr(x, 'unpadded'):
        raise ValueError(
            f'a {type(x).__name__} has padding: draw its .array with the padding, or .unpadded() '
            'without it'
        )
    given = isinstance(x, tuple | list)
    if not given and not hasattr(array, 'shape'):
        raise ValueError(f'{x!r} must be an array or a shape, such as (8, 4)')
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
