"""Compares the records of programs, and tells changes of code from changes of versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from meshwright.records.comparing import compare_records
from meshwright.records.difference import Difference, Tolerances
from meshwright.records.record import Record
from meshwright.report.answers import COMPILERS
from meshwright.report.forecasts import Forecast

# 'versions': nothing changed but figures that another version of jax or its compiler moved.
Status = Literal['same', 'changed', 'versions', 'missing', 'error']
# The worst first.
STATUSES: tuple[Status, ...] = ('error', 'missing', 'changed', 'versions', 'same')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """The record of a program, or why there is none.

    Attributes:
      record: the record, or None.
      forecast: its forecast, or None.
      error: why there is none, in one line.
      files: the files of the repository that the program has opened, from its root.
    """

    record: Record | None = None
    forecast: Forecast | None = None
    error: str = ''
    files: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a program.

    Attributes:
      name: its name in pyproject.toml, or the name of the golden file of a test.
      machine: its machine.
      file: its golden file, from the root of the repository.
      status: whether it changed.
      differences: what the code changed.
      by_versions: what other versions moved.
      versions: the packages whose version changed: before and after.
      message: what else a reader must know, in one line: an error, or what is not certain.
      before, after: the records; None if there is none.
      forecast: the present forecast; None after an error.
    """

    name: str
    machine: str
    file: str
    status: Status
    differences: tuple[Difference, ...] = ()
    by_versions: tuple[Difference, ...] = ()
    versions: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    message: str = ''
    before: Record | None = None
    after: Record | None = None
    forecast: Forecast | None = None


def judge(
    name: str,
    machine: str,
    file: Path,
    root: Path,
    before: Record | None,
    now: Recorded,
    other: Recorded | None = None,
    tolerances: Tolerances = Tolerances(),  # noqa: B008  (it is frozen)
) -> Verdict:
    """Compares a program with its golden record.

    Args:
      name, machine: of the program.
      file: its golden file.
      root: the root of the repository.
      before: the golden record; None if there is none.
      now: the present record.
      other: the present program, recorded with the versions of the golden record, if there is an
        environment that has them.
      tolerances: how much figures may differ.
    """
    place = str(file.relative_to(root)) if file.is_relative_to(root) else str(file)
    made = Verdict(name=name, machine=machine, file=place, status='same', before=before)
    if now.record is None:
        return dataclasses.replace(made, status='error', message=now.error)
    made = dataclasses.replace(
        made, after=now.record, forecast=now.forecast, machine=machine or now.record.topology
    )
    if before is None:
        message = 'there is no golden file: commit one'
        return dataclasses.replace(made, status='missing', message=message)
    versions = moved_versions(before, now.record)
    made = dataclasses.replace(made, versions=versions)
    if (message := _not_comparable(before, now.record)) and other is None:
        return dataclasses.replace(made, status='error', message=message)
    if not versions:
        return _with(made, compare_records(before, now.record, tolerances), ())
    if other is not None:
        return _apart(made, before, now.record, other, tolerances)
    return _together(made, before, now.record, tolerances)


def _with(
    made: Verdict,
    differences: Sequence[Difference],
    by_versions: Sequence[Difference],
    message: str = '',
) -> Verdict:
    status: Status = 'changed' if differences else 'versions' if by_versions else 'same'
    return dataclasses.replace(
        made,
        status=status,
        differences=tuple(differences),
        by_versions=tuple(by_versions),
        message=message,
    )


def _apart(
    made: Verdict, before: Record, now: Record, other: Recorded, tolerances: Tolerances
) -> Verdict:
    """The verdict if the present program was compiled with both versions."""
    if other.record is None:
        message = f'with the Python of --python: {other.error}'
        return dataclasses.replace(made, status='error', message=message)
    if left := moved_versions(before, other.record, ours=False):
        message = (
            f'--python has {_listed((k, new) for k, (_, new) in left.items())}, and the golden '
            f'record was made with {_listed((k, old) for k, (old, _) in left.items())}: install '
            'these there'
        )
        return dataclasses.replace(made, status='error', message=message)
    by_code = compare_records(before, other.record, tolerances)
    by_versions = compare_records(other.record, now, tolerances)
    return _with(made, by_code, by_versions, 'compiled with both versions')


def _together(made: Verdict, before: Record, now: Record, tolerances: Tolerances) -> Verdict:
    """The verdict if versions changed and there is only one environment."""
    found = compare_records(before, now, tolerances)
    if before.files and before.files == now.files:
        why = 'the files of the program are the same, so the versions are the reason'
        return _with(made, (), found, why if found else '')
    if any(one.is_of_code for one in found):
        why = (
            'the code and the versions changed; `meshwright check --python=PATH`, with a Python '
            'that has the old versions, tells apart which of them moved the other figures'
        )
        return _with(made, found, (), why)
    why = (
        'the code says the same, so the versions are probably the reason; `meshwright check '
        '--python=PATH`, with a Python that has the old versions, makes it certain'
    )
    return _with(made, (), found, why if found else '')


def moved_versions(
    before: Record, after: Record, *, ours: bool = True
) -> dict[str, tuple[str, str]]:
    """The packages that both records name with another version.

    Args:
      before, after: the records.
      ours: whether the version of this package counts.
    """
    return {
        name: (old, after.versions[name])
        for name, old in before.versions.items()
        if after.versions.get(name, old) != old and (ours or name != 'meshwright')
    }


def _not_comparable(before: Record, after: Record) -> str:
    """Why two records are of different compilers, or ''."""
    known = (*COMPILERS['tpu'], *COMPILERS['gpu'])
    was, now = ({n for n in known if n in record.versions} for record in (before, after))
    if was == now or not was:
        return ''
    missing = ', '.join(f'{name} {before.versions[name]}' for name in sorted(was - now))
    return (
        f'the golden file was compiled with {missing}, which is not installed here: '
        "pip install 'meshwright[aot]' for TPUs, or 'meshwright[aot-gpu]'"
    )


def _listed(pairs: Iterable[tuple[str, str]]) -> str:
    return ', '.join(f'{name} {version}' for name, version in pairs)


def worst(verdicts: Sequence[Verdict]) -> Status:
    """The status of all programs together."""
    found = {verdict.status for verdict in verdicts}
    return next((status for status in STATUSES if status in found), 'same')


def exit_status(verdicts: Sequence[Verdict], *, strict: bool = False) -> int:
    """0 if no code changed, 1 if one did, and 2 if one could not be compared.

    Args:
      verdicts: the verdicts.
      strict: whether figures that versions moved count as a change.
    """
    status = worst(verdicts)
    if status == 'error':
        return 2
    return int(status in ('missing', 'changed') or (strict and status == 'versions'))
