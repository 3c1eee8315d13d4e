"""T5X's `trainer`: learning rate, microbatches and actions of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from train.errors import ConfigError
from train.optimizers import Optimizer
from train.t5x.refusals import expect, refusal


@dataclasses.dataclass(frozen=True)
class WeightMetricsComputer:
    """Turns on the metrics of every parameter.

    They are the root mean squares of the parameter, its gradient and its update, and its largest
    absolute value: `train/weight_rms/<path>`, `train/weight_gradient_rms/<path>`,
    `train/weight_update_rms/<path>` and `train/weight_max/<path>`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """How parameters are updated.

    Attributes:
      learning_rate_fn: the schedule, a function from steps to learning rates.
      num_microbatches: the number of parts of a batch that are computed one after another. None
        means 1.
      weight_metrics_computer: turns on the metrics of every parameter. By default they are off.
    """

    learning_rate_fn: optax.Schedule
    num_microbatches: int | None = None
    weight_metrics_computer: WeightMetricsComputer | None = None

    def __post_init__(self) -> None:
        if not callable(self.learning_rate_fn):
            raise ConfigError(
                f'trainer.Trainer.learning_rate_fn is {self.learning_rate_fn!r}: it must be a '
                'schedule, such as @utils.create_learning_rate_scheduler()'
            )
        computer, kind = self.weight_metrics_computer, WeightMetricsComputer
        if computer is not None:
            key, written = 'trainer.Trainer.weight_metrics_computer', f'@trainer.{kind.__name__}()'
            expect(key, computer, kind, written)

    def optimizer(self, model: Any) -> Optimizer | optax.GradientTransformation:
        """The optimizer of a model, with this trainer's learning rate."""
        return model.optimizer(self.learning_rate_fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TerminateOnNanAction:
    """Stops a run if its loss is not finite. Every run does so, even without this action."""

    task: str = 'train'
    metric: str = 'loss'


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStoppingAction:
    """T5X's early stopping. A gin file can name it, but a run refuses it with an error."""

    metric: Sequence[str] = ()
    mode: str = 'min'
    patience: int = 3
    atol: float = 0.0
    rtol: float = 0.0


def check_actions(key: str, actions: Any) -> None:
    """Checks that all actions are `TerminateOnNanAction`.

    Raises:
      ConfigError: if there is another action, or if `actions` is malformed.
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
                why = 'a run ends only at its last step or if its loss is not finite; '
                raise refusal(
                    f'{key}[{mode!r}]', action, why + 'write @trainer.TerminateOnNanAction()'
                )
