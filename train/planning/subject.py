"""What a forecast is of: the run, its settings, its batch, its parameters and the commit."""

from __future__ import annotations

import dataclasses
import math
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.running.run import PlannedRun

_SECONDS_FOR_GIT = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What a forecast is of.

    Attributes:
      run: the runs and gin files, as they were given.
      batch_size: the number of rows in a batch.
      sequence_length: the number of tokens in a row, or None for other data. Rows of inputs and
        targets have both numbers.
      commit: the commit of the current folder, or None if it belongs to no repository of git.
      modified: whether files of the commit have changes.
    """

    run: tuple[str, ...]
    settings: tuple[str, ...]
    batch_size: int
    sequence_length: Any
    num_parameters: int
    commit: str | None
    modified: bool

    def lines(self) -> list[tuple[str, str]]:
        """The names and texts of what it is, for people."""
        length = self.sequence_length
        batch = f'{self.batch_size:,} rows'
        if isinstance(length, int):
            batch += f' of {length:,} tokens, {self.batch_size * length:,} tokens in all'
        elif length is not None:
            batch += f' of {", ".join(f"{n:,} {name}" for name, n in dict(length).items())}'
        found = [
            ('run', shlex.join(self.run)),
            ('settings', shlex.join(f'--gin.{one}' for one in self.settings)),
            ('batch', batch),
            ('parameters', _count(self.num_parameters)),
        ]
        if self.commit is not None:
            found.append(('commit', self.commit[:12] + (', with changes' if self.modified else '')))
        return [(name, text) for name, text in found if text]

    def to_json(self) -> dict[str, Any]:
        """Its fields as JSON."""
        about = dataclasses.asdict(self)
        return {'run': list(about.pop('run')), 'settings': list(about.pop('settings')), **about}


def describe_subject(
    run: PlannedRun, names: Sequence[str], settings: Sequence[str], folder: str = '.'
) -> Subject:
    """Describes a planned run.

    `names` and `settings` are runs and flags as they were given; `folder` has the commit.
    """
    config: TrainConfig = run.config
    parameters = [row for row in run.plan.rows if row.role == 'parameters']
    commit = _git(folder, 'rev-parse', 'HEAD')
    return Subject(
        run=tuple(names),
        settings=tuple(settings),
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        num_parameters=sum(math.prod(row.shape) for row in parameters),
        commit=commit or None,
        modified=bool(commit and _git(folder, 'status', '--porcelain', '--untracked-files=no')),
    )


def _count(number: int) -> str:
    """A number of parameters for people, such as '8.03 B (8,030,261,248)'."""
    for unit, size in (('B', 10**9), ('M', 10**6)):
        if number >= size:
            return f'{number / size:,.2f} {unit} ({number:,})'
    return f'{number:,}'


def _git(folder: str, *arguments: str) -> str:
    """What git answers about a folder, or '' if it does not."""
    command = ['git', '-C', str(Path(folder)), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_FOR_GIT)
    except (OSError, subprocess.SubprocessError):
        return ''
    return done.stdout.strip() if done.returncode == 0 else ''
