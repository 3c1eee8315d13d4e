"""The files of an evaluation: its scores, and examples with their predictions.

Scores and examples are named as seqio's JSONLogger does. A file of many predictions is written in
parts, so that a program which was stopped resumes after the last one.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from partitioning.untrusted_text import parse_json
from train.errors import ConfigError, first_line, os_errors_as
from train.paths import replacing
from train.reporting.writers import is_record


def write_metrics(folder: epath.Path, task: str, step: int, scores: Mapping[str, float]) -> None:
    """Adds a line with the scores of a step to `<task>-metrics.jsonl`.

    Lines of this step and of later steps are replaced: they are from before a run was resumed.
    """
    path = _path(folder, f'{task}-metrics.jsonl')
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line.decode().rstrip('\n') for line in lines if is_record(line, step - 1)]
    _replace(path, [*kept, json.dumps({'step': step, **scores})])


def write_results(
    folder: epath.Path, task: str, step: int, results: Iterable[Mapping[str, Any]]
) -> None:
    """Writes `<task>-<step>.jsonl`, with one example per line."""
    path = _path(folder, f'{task}-{step:06}.jsonl')
    _replace(path, [json.dumps(result, default=str, ensure_ascii=False) for result in results])


def _path(folder: epath.Path, name: str) -> epath.Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name.replace('/', '_')


def _replace(path: epath.Path, lines: Iterable[str]) -> None:
    """Writes a file of lines, which is never half-written."""
    with replacing(path) as unfinished:
        unfinished.write_text(''.join(f'{line}\n' for line in lines))


SETTINGS = 'settings.json'


@dataclasses.dataclass(frozen=True)
class PartFiles:
    """The parts of a file. Only one process may use them. `path` is the whole file."""

    path: epath.Path
    folder: epath.Path

    def begin(self, settings: Mapping[str, Any]) -> int:
        """Creates the folder, or finds the parts in it, and returns the number of finished parts.

        `settings` are the settings that the content of the parts depends on, as JSON. Raises a
        ConfigError if the parts in the folder have other settings, or it cannot be written.
        """
        settings, file = json.loads(json.dumps(dict(settings))), self.folder / SETTINGS
        if file.exists():
            try:
                found = {**parse_json(file.read_text())}
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(
                    f'{file} cannot be read ({first_line(error)}): delete the folder, or write to '
                    'another output_dir'
                ) from error
            changed = [k for k in {**found, **settings} if found.get(k) != settings.get(k)]
            if changed:
                name = changed[0]
                raise ConfigError(
                    f'{self.folder} has parts of another run: {name} was '
                    f'{str(found.get(name))[:60]} and is {str(settings.get(name))[:60]}; delete '
                    'the folder, or write to another output_dir'
                )
        else:
            with os_errors_as(f'{self.folder} cannot be written:'):
                self.folder.mkdir(parents=True, exist_ok=True)
                with replacing(file) as unfinished:
                    unfinished.write_text(json.dumps(settings))
        count = 0
        while self.part(count).exists():
            count += 1
        return count

    def part(self, number: int) -> epath.Path:
        return self.folder / f'{self.path.name}-chunk_{number:05}'

    def write(self, number: int, lines: Iterable[str]) -> None:
        """Writes a part. It is never half-written."""
        _replace(self.part(number), lines)

    def finish(self, count: int, merge: bool) -> Sequence[epath.Path]:
        """Joins the parts into the file, or keeps them, and returns the paths that were written."""
        parts = [self.part(number) for number in range(count)]
        if not merge:
            return parts
        with replacing(self.path) as unfinished, unfinished.open('wb') as whole:
            for part in parts:
                with part.open('rb') as file:
                    shutil.copyfileobj(file, whole)
        self.folder.rmtree()
        return [self.path]
