"""Matplotlib figures that need no pyplot and show themselves in notebooks."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TICKS = 16  # an axis with more places than this does not number all of them


def png_of(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format='png')
    return file.getvalue()


def new_figure(inches: tuple[float, float]) -> Figure:
    """An empty figure of a size in inches; a RuntimeError if matplotlib is not installed."""
    return _figure_class()(figsize=inches, dpi=120, layout='constrained')


@functools.cache
def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("drawing needs matplotlib: pip install 'meshwright[plot]'") from None

    class Picture(Figure):
        """A Figure that notebooks show, without pyplot."""

        _repr_png_ = png_of

    return Picture
