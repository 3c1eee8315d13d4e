"""Runs `meshwright check`: records the programs of a repository, and compares them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.checking.document import check_document
from meshwright.checking.markdown import check_markdown
from meshwright.checking.owned_by_tests import check_tests, update_tests
from meshwright.checking.processes import CheckRun, record_programs
from meshwright.checking.settings import CheckedProgram, CheckSettings
from meshwright.records.comparing import compare_records
from meshwright.records.files import read_golden, write_golden
from meshwright.records.record import Record
from meshwright.records.verdicts import Recorded, Verdict, judge, moved_versions
from meshwright.report.page import write_page

_ADVICE = 'meshwright check --update'


def check_programs(settings: CheckSettings, run: CheckRun) -> list[Verdict]:
    """Records the programs that a repository declares, and compares them with its golden records.

    Raises:
      ValueError: if a golden record is malformed.
    """
    before = {p.name: read_golden(settings.golden_of(p.name), _ADVICE) for p in settings.programs}
    now = record_programs(settings.programs, settings.root, sys.executable, run.jobs, run.progress)
    others = _with_old_versions(settings, run, before, now)
    verdicts = [
        judge(
            program.name,
            program.machine,
            settings.golden_of(program.name),
            settings.root,
            before[program.name],
            now[program.name],
            others.get(program.name),
            program.tolerances,
        )
        for program in settings.programs
    ]
    if settings.tests:
        run.progress(f'the tests {", ".join(settings.tests)}')
        verdicts += check_tests(settings)
    return verdicts


def _with_old_versions(
    settings: CheckSettings,
    run: CheckRun,
    before: Mapping[str, Record | None],
    now: Mapping[str, Recorded],
) -> dict[str, Recorded]:
    """The programs whose versions changed, recorded once more with the old versions."""
    if not run.python:
        return {}
    moved = [p for p in settings.programs if _has_moved(before[p.name], now[p.name], p)]
    return record_programs(
        moved, settings.root, run.python, run.jobs, lambda text: run.progress(f'{text}, as before')
    )


def _has_moved(before: Record | None, now: Recorded, program: CheckedProgram) -> bool:
    if before is None or now.record is None:
        return False
    return bool(moved_versions(before, now.record, ours=False))


def update_goldens(settings: CheckSettings, run: CheckRun) -> tuple[list[Path], list[str]]:
    """Writes the golden records that are missing or whose program changed.

    A record whose program means the same stays as it is, with the lines that it had, unless the
    versions changed.

    Returns:
      The files that were written, and a line for each program that could not be recorded.
    """
    found = record_programs(
        settings.programs, settings.root, sys.executable, run.jobs, run.progress
    )
    written, errors = [], []
    for program in settings.programs:
        file, now = settings.golden_of(program.name), found[program.name].record
        if now is None:
            errors.append(f'{program.name}: {found[program.name].error}')
        elif _must_write(file, now, program):
            write_golden(file, now.to_json())
            written.append(file)
    if settings.tests:
        run.progress(f'the tests {", ".join(settings.tests)}')
        by_tests, error = update_tests(settings)
        written += by_tests
        errors += [error] if error else []
    return written, errors


def _must_write(file: Path, now: Record, program: CheckedProgram) -> bool:
    try:
        before = read_golden(file, _ADVICE)
    except ValueError:  # a malformed file is what --update is for
        return True
    if before is None or before.versions != now.versions:
        return True
    return bool(compare_records(before, now, program.tolerances))


def write_check(verdicts: Sequence[Verdict], folder: Path) -> str | None:
    """Writes check.json, check.md and the page of the forecasts; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    forecasts = [v.forecast for v in verdicts if v.forecast is not None]
    page = None
    if forecasts:
        write_page(forecasts, folder / 'forecast.html')
        page = str(folder / 'forecast.html')
    document = json.dumps(check_document(verdicts, page)) + '\n'
    (folder / 'check.json').write_text(document, encoding='utf-8')
    address = os.environ.get('MESHWRIGHT_PAGE') or page or ''
    (folder / 'check.md').write_text(check_markdown(verdicts, address), encoding='utf-8')
    return page
