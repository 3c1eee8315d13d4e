"""The golden forecasts that tests own: pytest makes the forecasts, and they are compared here."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.checking.processes import read_answer
from meshwright.checking.settings import CheckSettings
from meshwright.records.files import HOW_TO_UPDATE, NOTE_VARIABLE, UPDATE_VARIABLE, read_golden
from meshwright.records.verdicts import Verdict, judge
from partitioning.temporary import temporary_folder

_WRITTEN = 'golden files written'  # by the plugin of pytest
_LAST = 3  # lines of pytest that say why a test failed


def check_tests(settings: CheckSettings, python: str = sys.executable) -> list[Verdict]:
    """Runs the tests that own golden forecasts, and compares what they forecast.

    Args:
      settings: the settings, with the files of the tests.
      python: the Python that runs pytest.
    """
    with temporary_folder('meshwright-check-') as folder:
        ended = _run_pytest(settings, python, {NOTE_VARIABLE: str(folder)})
        notes = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    root = settings.root.resolve()
    own = [note for note in notes if Path(note['golden']).resolve().is_relative_to(root)]
    verdicts = [_verdict(note, root) for note in sorted(own, key=lambda note: note['golden'])]
    if error := _why_failed(ended):  # a golden of a test that failed may have no forecast
        name = ', '.join(settings.tests)
        failed = Verdict(name=name, machine='', file='', status='error', message=error)
        verdicts.append(failed)
    return verdicts


def update_tests(settings: CheckSettings) -> tuple[list[Path], str]:
    """Lets the tests write their golden forecasts; returns the files, and why that failed or ''."""
    ended = _run_pytest(settings, sys.executable, {UPDATE_VARIABLE: '1'})
    lines = ended.stdout.splitlines()
    after = itertools.dropwhile(lambda line: _WRITTEN not in line, lines)
    named = [line for line in itertools.islice(after, 1, None) if line.endswith('.json')]
    return [settings.root / line for line in named], _why_failed(ended)


def _run_pytest(
    settings: CheckSettings, python: str, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [python, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *settings.tests]
    return subprocess.run(
        command,
        cwd=settings.root,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors='replace',
    )


def _why_failed(ended: subprocess.CompletedProcess[str]) -> str:
    """Why tests failed, in one line; '' if they passed, or if there is none."""
    if ended.returncode in (0, 5):
        return ''
    said = [line for line in ended.stdout.splitlines() if line.strip()][-_LAST:]
    return f'pytest failed: {" / ".join(said) or ended.stderr[-200:]}'


def _verdict(note: Mapping[str, Any], root: Path) -> Verdict:
    file, now = Path(note['golden']).resolve(), read_answer(note)
    before = read_golden(file, HOW_TO_UPDATE)
    return judge(file.stem, '', file, root, before, now)
