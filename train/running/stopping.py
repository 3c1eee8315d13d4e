"""Conditions that end a run before its last step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from partitioning.rules import nearest
from train.config import StopCondition
from train.errors import ConfigError, check_counts
from train.processes.together import agree_on


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends a run whose metric no longer improves, by T5X's rule.

    Each value is compared with the one before it. The run ends if none of the last `patience`
    values is better than the one before it by more than `atol + rtol * |value before|`.

    Attributes:
      metric: the metric, such as 'eval/loss' or 'train/loss'.
      mode: 'min' if smaller values are better, 'max' if larger ones are.
      patience: the number of last values that are looked at. The first has nothing before it, so 3
        allows two comparisons, and 1 ends the run at the first value.
      atol: the absolute change that does not count as an improvement.
      rtol: the relative change that does not count as an improvement.
    """

    metric: str = 'eval/loss'
    mode: Literal['min', 'max'] = 'min'
    patience: int = 3
    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"EarlyStopping.metric is {self.metric!r}: write 'eval/loss'")
        if self.mode not in ('min', 'max'):
            raise ConfigError(f"EarlyStopping.mode is {self.mode!r}: use 'min' or 'max'")
        check_counts(**{'EarlyStopping.patience': self.patience})
        for name in ('atol', 'rtol'):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f'EarlyStopping.{name} is {value!r}: it must be a number >= 0')

    def reason(self, values: Sequence[float]) -> str | None:
        last = values[-self.patience :]
        sign = 1.0 if self.mode == 'min' else -1.0
        if len(last) < self.patience or any(
            sign * (before - after) > self.atol + self.rtol * abs(before)
            for before, after in itertools.pairwise(last)
        ):
            return None
        shown = ', '.join(f'{value:.4g}' for value in last)
        return f'{self.metric} has not improved ({shown})'


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopIfNotFinite:
    """Ends a run with an error, before its state is saved, if a metric is NaN or infinite.

    `TrainConfig.not_finite` says what happens if the state or the training loss is.

    Attributes:
      metric: the metric, such as 'eval/loss'.
    """

    metric: str

    def reason(self, values: Sequence[float]) -> None:
        if not math.isfinite(values[-1]):
            raise FloatingPointError(
                f'{self.metric} is {values[-1]}: the state is not saved; lower the learning rate'
            )


class StopConditions:
    """The conditions of a run, with the values of their metrics so far.

    Args:
      conditions: the conditions.
    """

    def __init__(self, conditions: Sequence[StopCondition]):
        self._conditions = conditions
        self._values: list[list[float]] = [[] for _ in conditions]

    def check(self, scalars: Mapping[str, float]) -> str | None:
        """Returns why the run ends after these metrics, or None. Every process must call it.

        Process 0 decides, because metrics that users compute may differ between processes.

        Raises:
          ConfigError: if the evaluator of a metric has run and does not report the metric.
          FloatingPointError: if a metric must be finite and is not.
        """
        reasons = []
        for condition, values in zip(self._conditions, self._values, strict=True):
            if condition.metric in scalars:
                values.append(scalars[condition.metric])
                reasons.append(condition.reason(values))
            else:
                # Its evaluator, if it has just run, must report the metric.
                metric, group = condition.metric, condition.metric.rpartition('/')[0]
                if others := [name for name in scalars if name.rpartition('/')[0] == group]:
                    raise ConfigError(
                        f'TrainConfig.stop_when: {metric!r} is not reported.'
                        f'{nearest(metric, others)} {group}/ has '
                        f'{", ".join(name.rpartition("/")[2] for name in others)}'
                    )
        found = next(filter(None, reasons), None)
        ends = bool(reasons) and agree_on(found is not None)
        return (found or 'process 0 ends the run') if ends else None
