"""Which steps of a run are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from etils import epath

from train.checkpoints.config import CheckpointConfig
from train.checkpoints.steps.deleting import delete_step
from train.checkpoints.steps.manifest import DamagedCheckpoint
from train.checkpoints.steps.record import read_record


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


def delete_surplus(
    directory: epath.Path, prefix: str, steps: Collection[int], config: CheckpointConfig
) -> None:
    """Deletes the good steps of a folder that the settings do not keep.

    Args:
      directory: the folder of checkpoints.
      prefix: the beginning of the names of steps.
      steps: the good steps that this package has written.
      config: the settings.

    Raises:
      OSError: if a step cannot be deleted.
    """
    surplus = find_surplus(
        steps,
        keep=config.keep,
        keep_period=config.keep_period,
        keep_best=config.keep_best,
        mode=config.best_mode,
        scores=_scores(directory, prefix, steps, config.best_metric),
    )
    for step in surplus:
        delete_step(directory / f'{prefix}{step}')


def _scores(
    directory: epath.Path, prefix: str, steps: Collection[int], metric: str | None
) -> dict[int, float]:
    """The scores of the steps that have one."""
    scores = dict[int, float]()
    if metric is None:
        return scores
    for step in steps:
        try:
            about = read_record(directory / f'{prefix}{step}')
        except DamagedCheckpoint:
            continue
        if about is not None and metric in about.scores:
            scores[step] = about.scores[metric]
    return scores
