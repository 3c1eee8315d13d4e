"""The progress of forecasts on a terminal: what is done at the moment, and for how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from train.reporting.console import SafeConsole
from train.reporting.reports import format_seconds


@contextlib.contextmanager
def show_progress(name: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is done for a machine, with the seconds that it takes.

    A file or a pipe gets one line, at the end.

    Args:
      name: the machine.

    Yields:
      The function to call with a text when a stage begins.
    """
    console, started = SafeConsole(stderr=True), time.monotonic()
    bar = Progress(
        SpinnerColumn(),
        TextColumn('{task.description}', markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(name)
    with bar:
        yield lambda text: bar.update(task, description=f'{name}: {text}')
    seconds = format_seconds(time.monotonic() - started)
    console.print(f'{name}: {seconds}', style='dim', soft_wrap=True)
