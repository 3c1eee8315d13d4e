"""The interface of evaluators, the parts of a run that they read, and when they run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

import jax
from etils import epath

from partitioning import BasePartitioner, Plan, TrainState
from partitioning.hardware import OptionValue
from train.data import Feed, FiniteBatches, OpenTask, Prefetch
from train.errors import ConfigError
from train.objectives import Objective
from train.processes.activity import calling_compiler
from train.processes.signals import interruptible
from train.reporting.console import RunConsole
from train.reporting.reports import format_scores


class EvaluatedSettings(Protocol):
    """The settings of a run that evaluators read; `TrainConfig` describes them."""

    @property
    def objective(self) -> Objective: ...
    @property
    def partitioner(self) -> BasePartitioner: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def prefetch(self) -> Prefetch: ...
    @property
    def seed(self) -> int | None: ...


class EvaluatedRun(Protocol):
    """A run as evaluators see it; `train.running.run.Run` describes the attributes."""

    @property
    def config(self) -> EvaluatedSettings: ...
    @property
    def batch(self) -> Mapping[str, jax.ShapeDtypeStruct]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def compiler_options(self) -> dict[str, OptionValue]: ...
    @property
    def key(self) -> jax.Array: ...
    @property
    def console(self) -> RunConsole: ...
    @property
    def directory(self) -> epath.Path: ...
    @property
    def data(self) -> OpenTask: ...
    @property
    def evaluators(self) -> Mapping[str, Any]: ...
    @property
    def evaluated(self) -> Mapping[str, OpenTask]: ...
    @property
    def rows(self) -> Any: ...


class Evaluator(Protocol):
    """Scores a state during training, or from a checkpoint.

    An evaluator that needs to compile or to read something first has a method
    `prepare(run, name) -> Evaluator` as well, which is called once, before the first step. The
    result prints its scores itself, with `run.console.say`. If the evaluator has an attribute
    `task`, the trainer opens this task, or its own if `task` is None, and `run.evaluated[name]` is
    the opened task.

    Usage:
      @dataclasses.dataclass(frozen=True)
      class Sparsity:
        every: int = 100

        def run(self, state, step):
          zeros = [jnp.mean(jnp.abs(w) < 1e-3) for w in jax.tree.leaves(state.params)]
          return {'small_weights': float(sum(zeros) / len(zeros))}

    Attributes:
      every: the number of steps between evaluations. 0 evaluates only at the end.
    """

    every: int

    def run(self, state: TrainState, step: int) -> Mapping[str, float]:
        """Returns the scores of a state by name. Every process calls it."""


def prepare_evaluators(run: EvaluatedRun) -> dict[str, Any]:
    """Prepares the evaluators of a run, by name."""
    prepared = dict[str, Any]()
    for name, evaluator in run.evaluators.items():
        is_simple = not hasattr(evaluator, 'prepare')
        made = evaluator if is_simple else evaluator.prepare(run, name)
        prepared[name] = _Prepared(made, name, run.console, is_simple)
    return prepared


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A prepared evaluator, whose name the watchdog of the run knows while it runs.

    `is_simple` says whether it only returns scores, which are then checked and printed here.
    """

    evaluator: Evaluator
    name: str
    console: RunConsole
    is_simple: bool

    @property
    def every(self) -> int:
        return self.evaluator.every

    def run(self, state: TrainState, step: int) -> Mapping[str, float]:
        with self.console.activity.doing(f'the evaluation {self.name} at step {step}'):
            found = self.evaluator.run(state, step)
        if not self.is_simple:
            return found
        try:
            scores = {score: float(value) for score, value in found.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f'the evaluator {self.name!r} returns {str(found)[:60]}: run(state, step) must '
                "return a dict of numbers, such as {'accuracy': 0.5}"
            ) from error
        self.console.scores(step, self.name, format_scores(scores))
        return scores


def partition_scoring(run: EvaluatedRun, function: Callable[..., Any], *others: Any) -> Any:
    """Partitions a function (parameters, variables, batch, ...) over the devices of a run.

    `others` are the specs of its other arguments.
    """
    partitioner, specs = run.config.partitioner, run.plan.specs
    resources = (specs.params, specs.flax_mutables, partitioner.data_partition_spec, *others)
    return partitioner.partition(function, resources, None, compiler_options=run.compiler_options)


def compile_scoring(run: EvaluatedRun, partitioned: Any, *arguments: Any) -> Any:
    """Compiles what `partition_scoring` returns for a state of the run and other arguments."""
    state = run.plan.abstract_state
    with calling_compiler():
        return run.config.partitioner.compile(
            partitioned, state.params, state.flax_mutables, *arguments
        )


def finite_batches(run: EvaluatedRun, rows: Any, size: int | None) -> FiniteBatches:
    """Returns the batches of some rows, by default with as many rows as a training batch."""
    size = size or run.config.batch_size
    return FiniteBatches(rows, size, run.config.partitioner.get_data_layout(size).row_indices)


@contextlib.contextmanager
def feeding(run: EvaluatedRun, batches: FiniteBatches, first: int = 0) -> Iterator[Any]:
    """Reads batches ahead of their use. Yields an iterator of numbered batches from the first."""
    partitioner, prefetch = run.config.partitioner, run.config.prefetch
    with closing(Feed(batches, partitioner, first_step=first, prefetch=prefetch)) as feed:
        yield enumerate(feed, first)


def is_due(evaluator: Any, step: int, last_step: int) -> bool:
    """Whether an evaluator runs after this step."""
    return step == last_step or bool(evaluator.every and step % evaluator.every == 0)


def run_evaluators(evaluators: Mapping[str, Any], state: TrainState, step: int) -> dict[str, float]:
    """Returns the scores of all evaluators: the score x of the evaluator y is 'y/x'.

    Raises an Interrupted if a signal ends one of them.
    """
    with interruptible():
        return {
            f'{name}/{score}': float(value)
            for name, evaluator in evaluators.items()
            for score, value in evaluator.run(state, step).items()
        }
