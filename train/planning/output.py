"""Prints and writes a forecast, and shows progress while it is computed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from etils import epath
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from meshwright import Forecast
from meshwright.report.page import write_page
from train.errors import ConfigError, writing
from train.paths import as_path
from train.reporting.console import SafeConsole
from train.reporting.reports import format_seconds

JSON, PAGE = 'forecast.json', 'forecast.html'


def to_json(forecasts: Sequence[Forecast]) -> str:
    """Returns forecasts as JSON: {"fits": ..., "forecasts": [...]}, in their order.

    "fits" is whether all of them fit, or null if that is not known.
    """
    fits = [one.fits for one in forecasts]
    everywhere = None if None in fits and False not in fits else all(fits)
    return json.dumps({'fits': everywhere, 'forecasts': [one.as_dict() for one in forecasts]})


def prepare_folder(path: str) -> epath.Path:
    """Creates the folder of `--out`, before anything takes long.

    Raises:
      ConfigError: if that is not possible.
    """
    folder = as_path('--out', path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--out={path} cannot be created: {error.strerror or error}') from error
    return folder


def write_files(
    forecasts: Sequence[Forecast], programs: Mapping[str, str], folder: epath.Path
) -> None:
    """Writes `forecast.json`, `forecast.html`, and the compiled programs as `*.hlo.txt`.

    Args:
      forecasts: the forecasts.
      programs: the text of the compiled program for each machine.
      folder: the folder, which exists.

    Raises:
      ConfigError: if the folder cannot be written.
    """
    with writing(str(folder)):
        (folder / JSON).write_text(to_json(forecasts) + '\n')
        write_page(forecasts, folder / PAGE)
        for machine, text in programs.items():
            (folder / f'{machine.replace(":", "-")}.hlo.txt').write_text(text)


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
