"""Records the programs of each commit of a range, and compares each with the one before.

All commits are recorded with the same environment, so only what the code says can differ. A commit
that changes none of the files that a program has opened is not recorded again. Records are kept
in the folder of git, so a history that was interrupted resumes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from meshwright.checking.commits import (
    Commit,
    changed_files,
    check_out,
    list_commits,
    pinned_versions,
    run_git,
    work_tree,
)
from meshwright.checking.processes import CheckRun, FilesOfCommit, record_programs
from meshwright.checking.settings import CheckedProgram, CheckSettings
from meshwright.records.files import write_at_once
from meshwright.records.record import Record
from meshwright.records.verdicts import Recorded, Verdict, judge
from meshwright.report.answers import package_versions

_FIRST = 'there is no earlier record'
_ELSEWHERE = (
    'the program opens no file of the commit, so it is installed elsewhere: put its folder on the '
    'path, such as PYTHONPATH=src'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitVerdicts:
    """What a commit changed.

    Attributes:
      commit: the commit.
      verdicts: the verdict of each program.
      recorded: the programs that were recorded; the commit changes no file of the others.
      pinned: the packages of which it requires another version: before and after.
    """

    commit: Commit
    verdicts: tuple[Verdict, ...]
    recorded: tuple[str, ...]
    pinned: Mapping[str, tuple[str, str]]

    @property
    def changed(self) -> bool:
        """Whether a program means something else."""
        return any(verdict.status == 'changed' for verdict in self.verdicts)


class _Recorder:
    """Records programs as they are in a commit, unless that was done before."""

    def __init__(self, settings: CheckSettings, run: CheckRun, folder: Path):
        self._settings = settings
        self._run = run
        self._folder = folder
        root = settings.root
        top = Path(run_git(root, 'rev-parse', '--show-toplevel').strip())
        levels = len(root.resolve().relative_to(top.resolve()).parts)
        self._commit = FilesOfCommit(top=(folder, *folder.parents)[levels], present=top.resolve())
        git = root / run_git(root, 'rev-parse', '--git-common-dir').strip()
        self._kept = git.resolve() / 'meshwright-history'

    def record(self, commit: str, programs: Sequence[CheckedProgram]) -> dict[str, Recorded]:
        """The record of each program in a commit."""
        found = {p.name: one for p in programs if (one := self._read(self._file(commit, p)))}
        left = [p for p in programs if p.name not in found]
        if left:
            check_out(self._folder, commit)
            made = record_programs(
                left,
                self._folder,
                self._run.python or sys.executable,
                self._run.jobs,
                lambda text: self._run.progress(f'{text} in {commit[:9]}'),
                self._commit,
            )
            for program in left:
                one = made[program.name]
                if not one.files and not one.error:
                    one = Recorded(error=_ELSEWHERE)
                found[program.name] = one
                self._keep(self._file(commit, program), one)
        return found

    def _file(self, commit: str, program: CheckedProgram) -> Path:
        settings = dataclasses.asdict(dataclasses.replace(program, name=''))
        made_of = [settings, self._run.python, *package_versions()]
        digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]
        return self._kept / f'{commit}.{program.name}.{digest}.json'

    def _read(self, file: Path) -> Recorded | None:
        if not file.is_file():
            return None
        try:
            held = json.loads(file.read_text(encoding='utf-8'))
            record = Record.from_json(json.dumps(held['record']))
            return Recorded(record=record, files=frozenset(held['files']))
        except (ValueError, KeyError, TypeError):
            return None  # it was made by another version, and is made anew

    def _keep(self, file: Path, one: Recorded) -> None:
        if one.record is not None:
            held = {'record': one.record.as_dict(), 'files': sorted(one.files)}
            write_at_once(file, json.dumps(held))


def check_history(settings: CheckSettings, run: CheckRun, span: str) -> Iterator[CommitVerdicts]:
    """Compares the programs of each commit of a range with the commit before.

    Args:
      settings: the programs, as the present pyproject.toml declares them.
      run: how they are recorded; with `python`, by that Python.
      span: the range of commits, such as 'v1.0..'.

    Raises:
      ValueError: if git does not know the range, or no program is declared.
    """
    if not settings.programs:
        raise ValueError(
            '--history records the programs that pyproject.toml declares, and it declares none: '
            'tests are not run in old commits'
        )
    root, commits = settings.root, list_commits(settings.root, span)
    start = commits[0].parent or commits.pop(0).sha
    with work_tree(root, start) as folder:
        recorder = _Recorder(settings, run, folder)
        last = recorder.record(start, settings.programs)
        records = {name: one.record for name, one in last.items()}
        for commit in commits:
            changed = changed_files(root, commit.parent, commit.sha)
            programs = [p for p in settings.programs if _concerns(changed, last[p.name])]
            now = recorder.record(commit.sha, programs) if programs else {}
            yield CommitVerdicts(
                commit=commit,
                verdicts=tuple(
                    _verdict(p, settings, records[p.name], now.get(p.name) or last[p.name])
                    for p in settings.programs
                ),
                recorded=tuple(now),
                pinned=pinned_versions(root, commit.parent, commit.sha),
            )
            last |= now
            records |= {name: one.record for name, one in now.items() if one.record}


def _concerns(changed: frozenset[str], last: Recorded) -> bool:
    """Whether a program may be another one after some files changed."""
    return bool(changed) if last.error else bool(changed & last.files)


def _verdict(
    program: CheckedProgram, settings: CheckSettings, before: Record | None, now: Recorded
) -> Verdict:
    file = settings.golden_of(program.name)
    tolerances = program.tolerances
    made = judge(
        program.name, program.machine, file, settings.root, before, now, tolerances=tolerances
    )
    return dataclasses.replace(made, message=_FIRST) if made.status == 'missing' else made
