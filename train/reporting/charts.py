"""Charts of a run's results."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.progress_bar import ProgressBar
from rich.table import Table

# The length of the longest bar, in characters. With names and figures, a chart fits 80 columns.
BAR_WIDTH = 48


def score_chart(scores: Mapping[str, float]) -> Table:
    """Returns a bar chart of the bits per byte of a model and of baselines, the best first.

    Args:
      scores: bits per byte, by name. The first is the model's, which a terminal highlights. Scores
        that are not finite are left out.
    """
    model = next(iter(scores))
    finite = {name: score for name, score in scores.items() if math.isfinite(score)}
    longest = max(finite.values())
    chart = Table.grid(padding=(0, 2))
    chart.title, chart.title_justify = 'bits per byte of held-out text (lower is better)', 'left'
    for name, score in sorted(finite.items(), key=lambda item: item[1]):
        colour = 'green' if name == model else 'cyan'
        half_characters = round(2 * BAR_WIDTH * score / longest)
        width = math.ceil(half_characters / 2)
        # The bars of rich end with half a character, and are plain dashes where output is ASCII.
        bar = ProgressBar(
            total=2 * width,
            completed=half_characters,
            width=width,
            complete_style=colour,
            finished_style=colour,
        )
        chart.add_row(name, f'{score:.3f}', bar, style='bold' if name == model else None)
    return chart
