"""Files with the scores and the predictions of an evaluation, named as seqio's JSONLogger does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath


def write_metrics(
    folder: epath.Path, task: str, step: int, scores: Mapping[str, float]
) -> epath.Path:
    """Adds a line with the scores of a step to `<task>-metrics.jsonl`.

    Lines of this step and of later ones are replaced: a run that was resumed has written them.
    """
    path = _path(folder, f'{task}-metrics.jsonl')
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)['step'] < step]
    _replace(path, [*kept, json.dumps({'step': step, **scores})])
    return path


def write_results(
    folder: epath.Path, task: str, step: int, results: Iterable[Mapping[str, Any]]
) -> epath.Path:
    """Writes `<task>-<step>.jsonl`, with one example per line."""
    path = _path(folder, f'{task}-{step:06}.jsonl')
    _replace(path, [json.dumps(result, default=str, ensure_ascii=False) for result in results])
    return path


def _path(folder: epath.Path, name: str) -> epath.Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name.replace('/', '_')


def _replace(path: epath.Path, lines: list[str]) -> None:
    """Writes a file in one step, so that it is never half-written."""
    unfinished = path.with_name(f'{path.name}.unfinished')
    unfinished.write_text(''.join(f'{line}\n' for line in lines))
    unfinished.replace(path)
