"""What `meshwright check --json` prints, for programs.

    {
     "format": "meshwright check 1",
     "versions": {"meshwright": "0.2.0", "jax": "0.10.2", "libtpu": "0.0.52"},
     "status": "changed",
     "programs": [
      {"name": "step", "machine": "v5e:4x4", "status": "changed", "differences": [...], ...}
     ],
     "page": "check/forecast.html"
    }

`check.schema.json` describes every entry. The number in "format" changes when an entry changes its
meaning or disappears, and not when entries are added.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.checking.history import CommitVerdicts
from meshwright.records.difference import Difference, Kind, Unit
from meshwright.records.record import Record
from meshwright.records.verdicts import Status, Verdict, worst
from meshwright.report.answers import package_versions
from meshwright.report.plain_values import to_plain

FORMAT = 'meshwright check 1'
HISTORY_FORMAT = 'meshwright history 1'


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerDifference:
    """Something that means another thing now.

    Attributes:
      kind: what it is about.
      of_code: whether the code says it, whatever a compiler makes of it.
      subject: the array, the kind of exchange, or the figure.
      others: what else changed in the same way.
      before: what it was, for people; '' if it was not there.
      after: what it is; '' if it is gone.
      was: the figure before; null for what is not a figure.
      now: the figure now.
      unit: the unit of both figures.
      line: the 'file:line' that explains it, or ''; of the old code for what is gone.
      text: what this line says.
      rule: the rule that explains it, or ''.
      why: a sentence that says why, or ''.
    """

    kind: Kind
    of_code: bool
    subject: str
    others: tuple[str, ...]
    before: str
    after: str
    was: float | None
    now: float | None
    unit: Unit
    line: str
    text: str
    rule: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerFigures:
    """The figures of a program, per device and call.

    Attributes:
      peak: the peak of the memory, in bytes.
      sent: the bytes that a device sends.
      seconds: the forecast time, or null if there is no model of the chip.
    """

    peak: int
    sent: int
    seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerVersion:
    """The version of a package that changed.

    Attributes:
      package: its name.
      before: the version that made the golden record.
      after: the version that is installed.
    """

    package: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerProgram:
    """What became of one program.

    Attributes:
      name: its name in pyproject.toml, or the name of the golden file of a test.
      machine: its machine; '' if it is not known.
      file: its golden file.
      status: 'same', 'changed', 'versions' if only other versions moved figures, 'missing' without
        a golden file, or 'error'.
      differences: what changed.
      by_versions: what other versions moved.
      versions: the packages whose version changed.
      message: an error, or what is not certain; '' if there is nothing to say.
      before: the figures of the golden record, or null.
      after: the present figures, or null after an error.
    """

    name: str
    machine: str
    file: str
    status: Status
    differences: tuple[AnswerDifference, ...]
    by_versions: tuple[AnswerDifference, ...]
    versions: tuple[AnswerVersion, ...]
    message: str
    before: AnswerFigures | None
    after: AnswerFigures | None


def check_document(verdicts: Sequence[Verdict], page: str | None = None) -> dict[str, Any]:
    """The verdicts as values that JSON can hold.

    Args:
      verdicts: the verdicts.
      page: the path of the page of the forecasts, if there is one.
    """
    return {
        'format': FORMAT,
        'versions': dict(package_versions()),
        'status': worst(verdicts),
        'programs': [to_plain(_answer(verdict)) for verdict in verdicts],
        'page': page,
    }


def history_document(history: Sequence[CommitVerdicts]) -> dict[str, Any]:
    """What each commit changed as values that JSON can hold.

    `check_document` describes the entries of a program. "recorded" names the programs that were
    recorded, and "required" has the packages of which a commit requires another version.

    Args:
      history: the verdicts of the commits, the oldest first.
    """
    return {
        'format': HISTORY_FORMAT,
        'versions': dict(package_versions()),
        'commits': [
            {
                'commit': made.commit.sha,
                'date': made.commit.date,
                'subject': made.commit.subject,
                'recorded': list(made.recorded),
                'required': list(map(to_plain, _versions(made.pinned))),
                'programs': [to_plain(_answer(verdict)) for verdict in made.verdicts],
            }
            for made in history
        ],
    }


@functools.cache
def check_schema() -> Mapping[str, Any]:
    """The JSON Schema of what `meshwright check --json` prints."""
    held: dict[str, Any] = json.loads(Path(__file__).with_name('check.schema.json').read_text())
    return held


def _answer(verdict: Verdict) -> AnswerProgram:
    return AnswerProgram(
        name=verdict.name,
        machine=verdict.machine,
        file=verdict.file,
        status=verdict.status,
        differences=tuple(map(plain_difference, verdict.differences)),
        by_versions=tuple(map(plain_difference, verdict.by_versions)),
        versions=_versions(verdict.versions),
        message=verdict.message,
        before=figures_of(verdict.before),
        after=figures_of(verdict.after),
    )


def _versions(held: Mapping[str, tuple[str, str]]) -> tuple[AnswerVersion, ...]:
    return tuple(
        AnswerVersion(package=name, before=old, after=new) for name, (old, new) in held.items()
    )


def plain_difference(one: Difference) -> AnswerDifference:
    """A difference as the answer has it."""
    return AnswerDifference(
        kind=one.kind,
        of_code=one.is_of_code,
        subject=one.subject,
        others=one.others,
        before=one.before,
        after=one.after,
        was=one.was,
        now=one.now,
        unit=one.unit,
        line=one.at.line,
        text=one.at.text,
        rule=one.at.rule,
        why=one.at.why,
    )


def figures_of(record: Record | None) -> AnswerFigures | None:
    """The figures of a record."""
    if record is None:
        return None
    return AnswerFigures(peak=record.peak, sent=record.sent, seconds=record.seconds)
