"""T5X's `trainer` and `contrib.moe.trainer`: learning rate, microbatches and actions of a run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import optax

from partitioning.state import path_str
from train.config import StopCondition
from train.errors import ConfigError, check_counts
from train.optimizers import LogicalAxes, Optimizer
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


MOE_KEY = 'moe_trainer.MoeTrainer'
_EXPERTS = re.compile('.*expert.*')


def is_of_experts(path: str) -> bool:
    """Whether the path of a parameter, such as 'decoder/layers_1/mlp/expert/wi/kernel', has one."""
    return _EXPERTS.match(path) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeTrainer(Trainer):
    """How parameters are updated, with the gradients of experts multiplied as T5X multiplies them.

    Every mesh computes the gradients of the loss, so nothing has to be corrected. The factor is
    kept because it is part of T5X's training: it matters to optimizers without their own scale,
    such as SGD, and to clipping by the global norm. 1 leaves the gradients unchanged.

    Attributes:
      num_expert_partitions: what the gradients of experts are multiplied by.
      sharded_match_fn: whether the path of a parameter, such as
        'decoder/layers_1/mlp/expert/wi/kernel', is one of experts. None selects no parameter.

    `trainer.Trainer` describes the other attributes.
    """

    num_expert_partitions: int
    sharded_match_fn: Callable[[str], bool] | None = is_of_experts

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(**{f'{MOE_KEY}.num_expert_partitions': self.num_expert_partitions})
        if self.sharded_match_fn is not None and not callable(self.sharded_match_fn):
            why = 'it must be a function of the path of a parameter, or None'
            raise refusal(f'{MOE_KEY}.sharded_match_fn', self.sharded_match_fn, why)

    def optimizer(self, model: Any) -> Optimizer | optax.GradientTransformation:
        """The model's optimizer, which gets the gradients of experts multiplied."""
        inner, selects = super().optimizer(model), self.sharded_match_fn
        if selects is None or self.num_expert_partitions == 1:
            return inner
        if not isinstance(inner, Optimizer):
            return scale_gradients(inner, selects, self.num_expert_partitions)
        factor, given = self.num_expert_partitions, inner

        def transform(
            learning_rate: Any, logical_axes: LogicalAxes | None = None
        ) -> optax.GradientTransformation:
            tx = dataclasses.replace(given, learning_rate=learning_rate).build(logical_axes)
            return scale_gradients(tx, selects, factor)

        # The inner optimizer clips the multiplied gradients.
        return Optimizer(transform=transform, learning_rate=inner.learning_rate, clip_norm=None)


def scale_gradients(
    tx: optax.GradientTransformation, selects: Callable[[str], bool], factor: float
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation with the state of `tx`, whose selected gradients are multiplied.

    Raises a ConfigError in the first update, if a function other than the default selects nothing.
    """
    inner = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
        # As in T5X, a network without experts may be trained too.
        if selects is not is_of_experts and not any(map(selects, paths)):
            raise ConfigError(
                f'{MOE_KEY}.sharded_match_fn selects none of the {len(paths)} parameters, such as '
                f'{paths[0]!r}: use a network with experts, or trainer.Trainer'
            )
        scaled = jax.tree_util.tree_map_with_path(
            lambda path, g: g * factor if selects(path_str(path)) else g, grads
        )
        return inner.update(scaled, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


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
        is_listed = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_listed or not all(isinstance(x, str) for x in pair):
            raise refusal(key, pair, written)


MODES = ('TRAIN', 'TRAIN_EVAL', 'INFER_EVAL')


def translate_actions(
    key: str, actions: Any, evaluators: Mapping[str, Mapping[str, str]]
) -> tuple[list[StopCondition], bool]:
    """Returns the conditions that end a run, and whether one is that its training loss is finite.

    Raises a ConfigError if the actions are malformed, or if a task is not evaluated.

    Args:
      actions: a list of actions for each mode, or None.
      evaluators: for TRAIN_EVAL and INFER_EVAL, the evaluator of each task, by name.
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
