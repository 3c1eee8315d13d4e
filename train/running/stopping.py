"""When a run ends before its last step, or goes back: by a metric, or if it is not finite.

A step checks on the devices whether it is finite: its metric `NOT_FINITE` says which parts are
NaN or infinite. The host reads it only when it waits for the devices anyway, which is before it
writes, evaluates or saves anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from partitioning.rules import nearest
from train.config import NotFinitePolicy, StopCondition
from train.errors import ConfigError, check_counts
from train.processes.activity import wait_for_devices
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
    """The conditions of a run, with the values of their metrics so far."""

    def __init__(self, conditions: Sequence[StopCondition]):
        self._conditions = conditions
        self._values: list[list[float]] = [[] for _ in conditions]

    def check(self, scalars: Mapping[str, float]) -> str | None:
        """Returns why the run ends after these metrics, or None. Every process must call it.

        Process 0 decides, because metrics that users compute may differ between processes. Raises a
        ConfigError if the evaluator of a metric has run and does not report the metric, and a
        FloatingPointError if a metric must be finite and is not.
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


# ---- states that are not finite

# The metric that says which parts of a step are not finite: bit i of the int32 is for PARTS[i].
NOT_FINITE = 'not_finite'
PARTS = ('the loss', 'the gradients', 'the parameters', 'the variables', 'the optimizer state')


def describe_not_finite(
    loss: jax.Array, gradient_norm: jax.Array, parameter_norm: jax.Array, state: Any
) -> jax.Array:
    """Returns which parts of a step are not finite, an int32 scalar; see `NOT_FINITE`.

    Only the norms of trees are looked at, because a step computes them anyway. A norm that
    overflows counts as infinite.
    """
    parts = (
        loss,
        gradient_norm,
        parameter_norm,
        _zero_if_finite(state.flax_mutables),
        _zero_if_finite(state.opt_state),
    )
    flags = ~jnp.isfinite(jnp.stack([part.astype(jnp.float32) for part in parts]))
    return jnp.sum(jnp.where(flags, 2 ** jnp.arange(len(PARTS)), 0), dtype=jnp.int32)


def _zero_if_finite(tree: Any) -> jax.Array:
    """Returns 0 if all floating-point values of a tree are finite, and NaN otherwise."""
    # The products are 0 or NaN. The compiler merges their sums and the sums of the norms into one
    # collective, which it could not do with a logical operation.
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.sum(x * 0, dtype=jnp.float32) for x in leaves), jnp.float32(0))


class NotFinite(NamedTuple):
    """A step after which something is not finite.

    `parts` are the parts that are not, as 'the loss', and `inputs` the arrays of its batch that are
    not.
    """

    step: int
    parts: tuple[str, ...]
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        *others, last = self.parts
        verb = 'is' if not others and last in ('the loss', 'the optimizer state') else 'are'
        listed = f'{", ".join(others)} and {last}' if others else last
        given = f', whose batch has NaN or infinite values in {", ".join(self.inputs)}'
        return f'{listed} {verb} not finite at step {self.step}' + (given if self.inputs else '')


class Found(NamedTuple):
    """What the host finds in the steps since it last looked.

    Attributes:
      bad: the first step that must not be kept, or None.
      skipped: the steps whose update was not applied.
    """

    bad: NotFinite | None
    skipped: list[NotFinite]


class Health:
    """The steps that the host has not looked at, and what a run does if one is not finite.

    `TrainConfig` describes the policy and its limits.
    """

    def __init__(
        self, policy: NotFinitePolicy, *, max_skips: int, max_roll_backs: int, first_step: int
    ):
        self._policy, self._max_skips, self._max_roll_backs = policy, max_skips, max_roll_backs
        self._first_step = first_step
        self._steps: list[tuple[int, jax.Array]] = []
        self._skips_in_a_row = 0
        self._gone_back_to: list[int] = []

    def note(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes `NOT_FINITE` out of the metrics of a step, without waiting for its value."""
        if NOT_FINITE in metrics:
            self._steps.append((step, metrics.pop(NOT_FINITE)))

    def look(self) -> Found:
        """Waits for the steps since the last call, and returns what is not finite in them.

        All processes find the same, because they see the same metrics of a step.
        """
        steps, self._steps = self._steps, []
        skipped = list[NotFinite]()
        flags = jax.device_get(wait_for_devices([x for _, x in steps]))
        for (step, _), bits in zip(steps, flags, strict=True):
            if not bits:
                self._skips_in_a_row = 0
                continue
            found = NotFinite(step, tuple(p for i, p in enumerate(PARTS) if bits >> i & 1))
            if self._policy != 'skip' or self._skips_in_a_row == self._max_skips:
                return Found(found, skipped)
            self._skips_in_a_row += 1
            skipped.append(found)
        return Found(None, skipped)

    def go_back(self, bad: NotFinite, newest: int | None, last_step: int) -> str:
        """Notes that a run goes back to its newest checkpoint, and returns the line that says so.

        Raises a FloatingPointError if the policy does not go back, or if the run cannot. Its
        message says what is not finite, and what to do.
        """
        times = self._gone_back_to.count(newest) if newest is not None else 0
        if (
            self._policy != 'roll_back'
            or newest is None
            or bad.step == last_step
            or times == self._max_roll_backs
        ):
            raise FloatingPointError(self._explain(bad, newest, last_step, times))
        self._gone_back_to = [newest] * (times + 1)
        return (
            f'{bad}: going back to step {newest}, and on with the batch of step {bad.step + 1}; '
            f'the batches of steps {newest + 1} to {bad.step} are left out '
            f'(roll-back {times + 1} of at most {self._max_roll_backs} to this checkpoint)'
        )

    def _explain(self, bad: NotFinite, newest: int | None, last_step: int, times: int) -> str:
        """Why a run stops, the step from which it resumes, and what to try."""
        what = str(bad)
        if self._policy == 'skip':
            what += f', after {self._max_skips} skipped steps in a row'
        elif self._policy == 'roll_back' and newest is None:
            what += ', and there is no checkpoint to go back to'
        elif self._policy == 'roll_back' and times == self._max_roll_backs:
            what += f', after {times} roll-backs to step {newest}'
        elif self._policy == 'roll_back':
            what += f', after which no step is left (total_steps is {last_step})'
        kept = 'no checkpoint is saved yet'
        if newest is not None:
            kept = f'the same command resumes from the checkpoint of step {newest}'
        tries = 'mend the data' if bad.inputs else 'lower the learning rate or clip_norm'
        if self._policy == 'stop':
            tries += ", or set TrainConfig.not_finite to 'skip' or 'roll_back'"
        if bad.step == self._first_step + 1 > 1:
            tries += f'; perhaps the state of step {self._first_step} is already not finite'
        return f'{what}; {kept}: {tries}'
