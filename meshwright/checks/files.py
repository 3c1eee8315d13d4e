"""Golden files: when they are written, by whom, and which ones were."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

UPDATE_VARIABLE = 'MESHWRIGHT_UPDATE_FORECASTS'  # `pytest --update-forecasts` sets it

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


def write_golden(file: Path, text: str) -> None:
    """Writes a golden file at once, as other processes of a test run may read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f'.{file.name}.')
    try:
        os.close(number)
        Path(name).write_text(text, encoding='utf-8')
        Path(name).chmod(0o644)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    WRITTEN.append(file)


def describe_changes(what: str, total: int, sections: Sequence[str]) -> str:
    """What a failed comparison says: how many changed, how to agree, and what differs.

    Args:
      what: what is compared, such as 'forecast'.
      total: how many were compared.
      sections: a heading with lines for each that differs.
    """
    count = f'{len(sections)} of {total} {what}{"s" * (total > 1)}'
    return (
        f'{count} changed. If that is intended, {HOW_TO_UPDATE}, and commit the files.\n\n'
        + '\n\n'.join(sections)
    )
