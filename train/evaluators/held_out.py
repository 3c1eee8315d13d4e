"""Scores of a model on held-out rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import jax
import jax.extend
import numpy as np

from partitioning import TrainState
from train.data import EvaluationSet, Feed, FiniteBatches, Task, baselines
from train.data.rows.open_task import describe_features, features
from train.errors import ConfigError, check_counts
from train.runtime.charts import score_chart
from train.runtime.machine import must_wait_for_steps
from train.runtime.reports import format_scores
from train.steps import make_eval_step, mean_metrics

if TYPE_CHECKING:
    from train.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Evaluates the objective on the held-out rows of a task, each of them exactly once.

    The scores are the means of the sums that the objective reports, such as 'loss' and 'accuracy'.
    For a language model, 'bits_per_byte' includes the nats of the separators between documents, but
    divides by text bytes only.

    Attributes:
      task: the task, by default the one that the run trains on.
      every: the number of steps between evaluations. 0 evaluates only at the end.
      limit: the number of held-out tokens (of text) or rows to evaluate. None evaluates all.
    """

    task: Task | None = None
    every: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and not isinstance(self.task, Task):
            raise ConfigError(
                f'HeldOut.task is {self.task!r}: it must be a Task; write @CausalLM()'
            )
        if self.limit is not None:
            check_counts(**{'HeldOut.limit': self.limit})

    def prepare(self, run: Run, name: str) -> PreparedHeldOut:
        """Opens the held-out rows, and compiles the evaluation of a batch."""
        c, partitioner = run.config, run.config.partitioner
        with run.console.phase(f'opening the held-out rows of {name}'):
            held_out = run.evaluated[name].evaluation(self.limit)
            first = next(iter(run.batch.values()))
            weights = jax.ShapeDtypeStruct(first.shape[:1], np.float32, sharding=first.sharding)
            batch = {**run.batch, 'row_weights': weights}
            _check_rows(name, held_out, run, batch)
        row_indices = partitioner.get_data_layout(c.batch_size).row_indices
        batches = FiniteBatches(held_out.rows, c.batch_size, row_indices)
        data_spec, state = partitioner.data_partition_spec, run.plan.abstract_state
        specs = run.plan.specs
        with run.console.phase(f'compiling the evaluation {name}'):
            eval_step = partitioner.compile(
                partitioner.partition(
                    make_eval_step(c.objective),
                    (specs.params, specs.flax_mutables, data_spec),
                    None,
                ),
                *(state.params, state.flax_mutables, batch),
            )
        return PreparedHeldOut(self.every, name, run, held_out, batches, eval_step)


@dataclasses.dataclass(frozen=True)
class PreparedHeldOut:
    """A compiled evaluation and its rows; see `HeldOut`."""

    every: int
    name: str
    owner: Run
    held_out: EvaluationSet
    batches: FiniteBatches
    eval_step: Any

    @functools.cached_property
    def _baselines(self) -> Mapping[str, float]:
        """Bits per byte of simple models on the same text, by name."""
        return baselines.compute(self.held_out.text)

    def run(self, state: TrainState, step: int) -> dict[str, float]:
        config = self.owner.config
        sums: list[Any] = []
        with closing(Feed(self.batches, config.partitioner, prefetch=config.prefetch)) as feed:
            for batch in feed:
                sums.append(self.eval_step(state.params, state.flax_mutables, batch))
                if must_wait_for_steps():
                    jax.block_until_ready(sums[-1])
        # Added in float64 on the host: a sum over many batches needs more digits than float32 has.
        total = {name: sum(np.float64(s[name]) for s in sums) for name in sums[0]}
        scores = {name: float(value) for name, value in mean_metrics(total).items()}
        if self.held_out.num_bytes:
            scores['bits_per_byte'] = float(total['loss']) / math.log(2) / self.held_out.num_bytes
        self._report(scores, step)
        return scores

    def _report(self, scores: Mapping[str, float], step: int) -> None:
        """Prints the scores, and at the end of a run a chart next to the baselines."""
        console, score = self.owner.console, scores.get('bits_per_byte')
        line = format_scores(scores)
        if score is not None:
            others = ', '.join(f'{name} {value:.3f}' for name, value in self._baselines.items())
            line = f'held-out bits per byte {score:.3f} (baselines: {others})'
        console.scores(step, self.name, line)
        if score is not None and step >= self.owner.config.total_steps:
            console.show(score_chart({'this model': score, **self._baselines}))


def _check_rows(
    name: str, held_out: EvaluationSet, run: Run, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    """Checks that held-out rows have the arrays of training rows, and that fillers do not count.

    Raises:
      ConfigError: if arrays differ, or if the objective would count the rows that fill up the last
        batch.
    """
    ours, theirs = features(run.rows[0]), features(held_out.rows[0])
    if ours != theirs:
        raise ConfigError(
            f'the rows of the evaluator {name!r} have {describe_features(theirs)}, but the '
            f'training rows have {describe_features(ours)}: use the same kind of task and packing '
            'for both'
        )
    size, count = run.config.batch_size, len(held_out.rows)
    if count % size == 0 or _uses_weights(run, batch):
        return
    raise ConfigError(
        f'{name}: {count} held-out rows do not fill batches of {size}, and the objective ignores '
        "batch['row_weights'], which is 0 for the rows that fill up the last batch: multiply the "
        f'losses by it, or hold out {count - count % size or size} rows'
    )


def _uses_weights(run: Run, batch: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    """Whether the loss depends on an array of the batch that is 0 for rows of zeros."""
    state = run.plan.abstract_state
    eval_step = make_eval_step(run.config.objective)
    weights = {name: value for name, value in batch.items() if name.endswith('weights')}
    others = {name: value for name, value in batch.items() if name not in weights}

    def loss(weights: Any, params: Any, variables: Any, others: Any) -> Any:
        return eval_step(params, variables, {**others, **weights})['loss']

    jaxpr = jax.make_jaxpr(loss)(weights, state.params, state.flax_mutables, others).jaxpr
    needed = set(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(v for v in equation.invars if isinstance(v, jax.extend.core.Var))
    return not needed.isdisjoint(jaxpr.invars[: len(weights)])
