"""Which steps of a run are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from etils import epath

from train.checkpoints.config import CheckpointConfig
from train.checkpoints.steps.deleting import delete_step
from train.checkpoints.steps.manifest import if_intact
from train.checkpoints.steps.record import read_record


def find_surplus(
    steps: Collection[int], config: CheckpointConfig, scores: Mapping[int, float]
) -> list[int]:
    """Finds the good steps that are no longer to be kept, in ascending order.

    Steps without a score are not among the best.
    """
    if config.keep is None:
        return []
    newest_first = sorted(steps, reverse=True)
    kept = set(newest_first[: config.keep])
    if config.keep_period:
        kept |= {step for step in steps if step % config.keep_period == 0}
    if config.keep_best:
        sign = 1 if config.best_mode == 'min' else -1
        scored = [step for step in newest_first if step in scores]  # of equal ones, the newest
        kept |= set(sorted(scored, key=lambda step: sign * scores[step])[: config.keep_best])
    return sorted(set(steps) - kept)


def delete_surplus(
    directory: epath.Path, prefix: str, steps: Collection[int], config: CheckpointConfig
) -> None:
    """Deletes the steps that the settings do not keep, of those this package has written.

    Raises:
      OSError: if a step cannot be deleted.
    """
    scores = dict[int, float]()
    if (metric := config.best_metric) is not None:
        for step in steps:
            about = if_intact(read_record, directory / f'{prefix}{step}')
            if about is not None and metric in about.scores:
                scores[step] = about.scores[metric]
    for step in find_surplus(steps, config, scores):
        delete_step(directory / f'{prefix}{step}')
