"""Golden files: when they are written, by whom, and which ones were."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Literal

from meshwright.records.record import Record
from meshwright.report.forecasts import Forecast

UPDATE_VARIABLE = 'MESHWRIGHT_UPDATE_FORECASTS'  # `pytest --update-forecasts` sets it

# `meshwright check` sets it to a folder, in which records are then written and not compared.
NOTE_VARIABLE = 'MESHWRIGHT_NOTE_FORECASTS'

OnMissing = Literal['write', 'error']

HOW_TO_UPDATE = f'run pytest --update-forecasts, or set {UPDATE_VARIABLE}=1 and run this again'
# The files that this process has written, for the summary of pytest.
WRITTEN: list[Path] = []


def must_write(file: Path, update: bool | None, on_missing: OnMissing | None) -> bool:
    """Whether a golden file is written in place of comparing with it.

    Args:
      file: the file.
      update: whether to replace files; by default, whether the environment has
        MESHWRIGHT_UPDATE_FORECASTS=1.
      on_missing: 'write' writes a file that is missing; by default, it is an error where the
        environment has CI set, as continuous integration does.
    """
    if update is None:
        update = os.environ.get(UPDATE_VARIABLE) == '1'
    if on_missing is None:
        on_missing = 'error' if os.environ.get('CI', '') not in ('', '0', 'false') else 'write'
    return update or (on_missing == 'write' and not file.exists())


def file_of(
    folder: str | os.PathLike[str], function: str, topology: str, num_slices: int = 1
) -> Path:
    """The golden file of a function on a machine: `folder/step.v5e-16x16.2-slices.json`."""
    slices = f'.{num_slices}-slices' if num_slices > 1 else ''
    parts = (function, f'{topology}{slices}')
    return Path(folder) / ('.'.join(re.sub(r'[^\w.-]+', '-', part) for part in parts) + '.json')


def read_golden(file: Path, advice: str) -> Record | None:
    """The record of a golden file; None if there is no such file.

    Args:
      file: the file.
      advice: what writes it anew.

    Raises:
      ValueError: if the file is malformed.
    """
    if not file.is_file():
        return None
    try:
        return Record.from_json(file.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'{file}: {error}; to write it anew, {advice}') from error


def write_golden(file: Path, text: str) -> None:
    """Writes a golden file."""
    write_at_once(file, text)
    WRITTEN.append(file)


def write_at_once(file: Path, text: str) -> None:
    """Writes a file and its folder; no other process reads a part of it, and no stop leaves one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f'{file.parent} is a file, or below one: name another folder') from None
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f'.{file.name}.')
    try:
        os.close(number)
        Path(name).write_text(text, encoding='utf-8')
        Path(name).chmod(0o644)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def note_record(folder: str, file: Path, record: Record, forecast: Forecast) -> None:
    """Writes a record for `meshwright check`, which compares it with its golden file.

    Args:
      folder: the folder for such notes.
      file: the golden file.
      record: the present record.
      forecast: its forecast.
    """
    golden = str(file.absolute())
    name = f'{hashlib.sha256(golden.encode()).hexdigest()[:16]}.json'
    held = {'golden': golden, 'record': record.as_dict(), 'forecast': forecast.as_dict()}
    (Path(folder) / name).write_text(json.dumps(held), encoding='utf-8')
