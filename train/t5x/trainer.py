"""T5X's `trainer`: learning rate, microbatches and actions of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optax

from train.config import StopCondition
from train.errors import ConfigError
from train.optimizers import Optimizer
from train.running.stopping import EarlyStopping, StopIfNotFinite
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
    """Ends a run with an error if a metric is not finite. The state is not saved.

    Attributes:
      task: the task whose metric it is; for the mode TRAIN, it has no effect.
      metric: the name of the metric.
    """

    task: Any = 'train'
    metric: str = 'loss'


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStoppingAction:
    """Ends a run whose metric no longer improves; see `train.running.stopping.EarlyStopping`.

    Attributes:
      metric: the task and the name of its metric; for the mode TRAIN, the task is 'train'.
      mode, patience, atol, rtol: see `train.running.stopping.EarlyStopping`.
    """

    metric: tuple[str, str]
    mode: Literal['min', 'max']
    patience: int = 3
    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        pair = self.metric
        key, written = 'trainer.EarlyStoppingAction.metric', "write ('task', 'metric')"
        if not isinstance(pair, tuple | list) or not all(isinstance(x, str) for x in pair):
            raise refusal(key, pair, written)
        if len(pair) != 2:
            raise refusal(key, pair, written)


MODES = ('TRAIN', 'TRAIN_EVAL', 'INFER_EVAL')


def translate_actions(
    key: str, actions: Any, evaluators: Mapping[str, Mapping[str, str]]
) -> tuple[list[StopCondition], bool]:
    """Returns the conditions that end a run, and whether one is that its training loss is finite.

    Args:
      key: the setting that names the actions.
      actions: a list of actions for each mode, or None.
      evaluators: for TRAIN_EVAL and INFER_EVAL, the evaluator of each task, by name.

    Raises:
      ConfigError: if the actions are malformed, or if a task is not evaluated.
    """
    if actions is not None and not isinstance(actions, Mapping):
        raise refusal(key, actions, "write {'TRAIN': [@trainer.TerminateOnNanAction()]}, or None")
    conditions: list[StopCondition] = []
    stops_on_nan = False
    for mode, listed in (actions or {}).items():
        if mode not in MODES:
            raise refusal(f'{key}[{mode!r}]', listed, f'the modes are {", ".join(MODES)}')
        if not isinstance(listed, list | tuple):
            written = f'{{{mode!r}: [@trainer.TerminateOnNanAction()]}}'
            raise refusal(f'{key}[{mode!r}]', listed, f'it must be a list; write {written}')
        for action in listed:
            if isinstance(action, TerminateOnNanAction):
                if mode == 'TRAIN':
                    stops_on_nan = True  # as every run does
                    continue
                metric = _metric(key, mode, (action.task, action.metric), evaluators)
                conditions.append(StopIfNotFinite(metric=metric))
            elif isinstance(action, EarlyStoppingAction):
                names = ('mode', 'patience', 'atol', 'rtol')
                rule: Any = {name: getattr(action, name) for name in names}
                metric = _metric(key, mode, action.metric, evaluators)
                conditions.append(EarlyStopping(metric=metric, **rule))
            else:
                why = 'the actions are @trainer.EarlyStoppingAction() and '
                raise refusal(f'{key}[{mode!r}]', action, why + '@trainer.TerminateOnNanAction()')
    return conditions, stops_on_nan


def _metric(
    key: str, mode: str, metric: Sequence[str], evaluators: Mapping[str, Mapping[str, str]]
) -> str:
    """The name of a metric of a task."""
    known = {'train': 'train'} if mode == 'TRAIN' else evaluators.get(mode, {})
    task, name = metric
    if not isinstance(task, str):  # a task in place of the name of one of seqio
        task = getattr(task, 'name', '')
        task = next(iter(known)) if task not in known and len(known) == 1 else task
    if task not in known:
        tasks = ', '.join(map(repr, known)) or 'none: set its DatasetConfig'
        raise ConfigError(
            f'{key}[{mode!r}]: the task {task!r} of an action has no metrics in this mode; the '
            f'tasks are {tasks}'
        )
    return f'{known[task]}/{name}'
