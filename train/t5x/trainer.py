"""T5X's `trainer`: how the updates are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from train.errors import ConfigError
from train.schedules import Schedule
from train.t5x.refusals import expect, refusal


@dataclasses.dataclass(frozen=True)
class WeightMetricsComputer:
    """The root mean squares of every weight, its gradient and its update, and the largest weight.

    They are metrics of the training: `train/weight_rms/<path>`, `train/weight_gradient_rms/...`,
    `train/weight_update_rms/...` and `train/weight_max/...`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """How the updates are made.

    Attributes:
      learning_rate_fn: the schedule, step -> rate.
      num_microbatches: parts of a batch that are computed one after another; None: one.
      weight_metrics_computer: metrics of every parameter; None: none.
    """

    learning_rate_fn: Schedule
    num_microbatches: int | None = None
    weight_metrics_computer: WeightMetricsComputer | None = None

    def __post_init__(self) -> None:
        if not callable(self.learning_rate_fn):
            raise ConfigError(
                f'trainer.Trainer.learning_rate_fn is {self.learning_rate_fn!r}: it must be a '
                'schedule, @utils.create_learning_rate_scheduler()'
            )
        computer, kind = self.weight_metrics_computer, WeightMetricsComputer
        if computer is not None:
            key, written = 'trainer.Trainer.weight_metrics_computer', f'@trainer.{kind.__name__}()'
            expect(key, computer, kind, written)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TerminateOnNanAction:
    """Stops where the loss is not finite, as every run does."""

    task: str = 'train'
    metric: str = 'loss'


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStoppingAction:
    """Stops where a metric gets no better; refused: runs end at their last step."""

    metric: Sequence[str] = ()
    mode: str = 'min'
    patience: int = 3
    atol: float = 0.0
    rtol: float = 0.0


def check_actions(key: str, actions: Any) -> None:
    """Runs stop at a loss that is not finite, whatever is said; no other action is there.

    Raises:
      ConfigError: another action.
    """
    if not actions:
        return
    if not isinstance(actions, Mapping):
        raise refusal(key, actions, "write {'TRAIN': [@trainer.TerminateOnNanAction()]}, or None")
    for mode, listed in actions.items():
        if not isinstance(listed, list | tuple):
            written = f'{{{mode!r}: [@trainer.TerminateOnNanAction()]}}'
            raise refusal(f'{key}[{mode!r}]', listed, f'it must be a list; write {written}')
        for action in listed:
            if not isinstance(action, TerminateOnNanAction):
                why = 'only @trainer.TerminateOnNanAction() can be asked for: runs end at their '
                raise refusal(f'{key}[{mode!r}]', action, why + 'last step or at a lost loss')
