"""Which steps of a run are kept, and how one of them is deleted.

Only what this package wrote is ever deleted. The manifest of a step goes first and its record last,
so whatever an interrupted deletion leaves can be told from a good step, and from a foreign folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from typing import Literal

from etils import epath

from train.checkpoints import manifest, record
from train.checkpoints.steps import TEMPORARY, examine, find_steps, is_copy
from train.paths import is_remote

# What a save writes into the folder of a step, besides the manifest and the record.
WRITTEN = ('state', 'dataset', '_CHECKPOINT_METADATA', 'commit_success.txt')


def find_surplus(
    steps: Collection[int],
    *,
    keep: int | None,
    keep_period: int | None = None,
    keep_best: int | None = None,
    mode: Literal['min', 'max'] = 'min',
    scores: Mapping[int, float] | None = None,
) -> list[int]:
    """Finds the steps that are no longer to be kept, in ascending order.

    Args:
      steps: the good steps.
      keep: the number of newest steps to keep. None keeps all.
      keep_period: steps that it divides are kept, too.
      keep_best: the number of steps with the best scores to keep, too.
      mode: whether small or large scores are good.
      scores: the scores of steps. Those without one are not among the best.
    """
    if keep is None:
        return []
    newest_first = sorted(steps, reverse=True)
    kept = set(newest_first[:keep])
    if keep_period:
        kept |= {step for step in steps if step % keep_period == 0}
    if keep_best and scores:
        sign = 1 if mode == 'min' else -1
        scored = [step for step in newest_first if step in scores]  # of equal ones, the newest
        kept |= set(sorted(scored, key=lambda step: sign * scores[step])[:keep_best])
    return sorted(set(steps) - kept)


def delete_step(folder: epath.Path) -> None:
    """Deletes what a save has written into the folder of a step. Other files stay, in the folder.

    Args:
      folder: the folder of a step, finished or not, with a record or a manifest of this package.

    Raises:
      OSError: if it cannot be deleted.
    """
    (folder / manifest.FILE).unlink(missing_ok=True)
    parts = [path.name for path in folder.iterdir() if path.name.startswith(manifest.PART)]
    for name in (*parts, *WRITTEN, record.ITEM):
        path = folder / name
        if path.is_dir():
            path.rmtree() if is_remote(path) else shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if not is_remote(folder) and not any(folder.iterdir()):
        folder.rmdir()


def delete_unfinished(directory: epath.Path, prefix: str, below: int) -> None:
    """Deletes what saves and deletions of this package before a good step have left unfinished.

    Args:
      directory: the folder of checkpoints.
      prefix: the beginning of the names of steps.
      below: the good step.

    Raises:
      OSError: if something cannot be deleted.
    """
    steps, others = find_steps(directory, prefix)
    unfinished = [
        path
        for step, path in steps.items()
        if step < below and examine(path, step).status == 'unfinished' and not is_copy(path, step)
    ]
    for name in others:
        step_name, path = name.removeprefix(prefix).removesuffix(TEMPORARY), directory / name
        if not name.endswith(TEMPORARY) or not step_name.isdecimal() or int(step_name) >= below:
            continue
        if record.has_record(path) and not is_copy(path, int(step_name)):
            unfinished.append(path)
    for path in unfinished:
        delete_step(path)
