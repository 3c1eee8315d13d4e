"""What a forecast prints and writes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence

from etils import epath

from meshwright import Forecast, forecast_table
from meshwright.report.page import write_page
from train.errors import ConfigError
from train.paths import as_path

JSON, PAGE = 'forecast.json', 'forecast.html'
_PIPE = 160  # the characters of a line where there is no terminal


def to_text(forecasts: Sequence[Forecast]) -> str:
    """Returns forecasts as a table, as wide as the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE
    return forecast_table(forecasts, width=width)


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
    try:
        (folder / JSON).write_text(to_json(forecasts) + '\n')
        write_page(forecasts, folder / PAGE)
        for machine, text in programs.items():
            (folder / f'{machine.replace(":", "-")}.hlo.txt').write_text(text)
    except OSError as error:
        raise ConfigError(f'{folder} cannot be written: {error.strerror or error}') from error
