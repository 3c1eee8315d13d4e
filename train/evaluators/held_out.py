"""Scores of a model on held-out rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import lzma
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend
import numpy as np

from partitioning import TrainState
from train.data import EvaluationSet, FiniteBatches, Lengths, Task
from train.data.feed import abstract_batch
from train.data.rows.open_task import check_same_arrays
from train.data.rows.packing import check_lengths
from train.errors import ConfigError, check_counts
from train.evaluators.evaluator import (
    EvaluatedRun,
    compile_scoring,
    feeding,
    finite_batches,
    partition_scoring,
)
from train.machine.devices import must_wait_for_steps
from train.objectives.objective import Objective, Ratio, compute_loss, divide
from train.processes.activity import wait_for_devices
from train.reporting.reports import format_scores, score_chart


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
      num_batches: the number of batches to evaluate. None evaluates all.
      batch_size: the number of rows in a batch, by default as in the training.
      sequence_length: the number of tokens in a row, by default as in the training. With it, rows
        may also be packed differently from the training rows.
    """

    task: Task | None = None
    every: int = 0
    limit: int | None = None
    num_batches: int | None = None
    batch_size: int | None = None
    sequence_length: Lengths = None

    def __post_init__(self) -> None:
        if self.task is not None and not isinstance(self.task, Task):
            raise ConfigError(
                f'HeldOut.task is {self.task!r}: it must be a Task; write @CausalLM()'
            )
        for name in ('limit', 'num_batches', 'batch_size'):
            if getattr(self, name) is not None:
                check_counts(**{f'HeldOut.{name}': getattr(self, name)})
        check_lengths('HeldOut.sequence_length', self.sequence_length)

    def prepare(self, run: EvaluatedRun, name: str) -> PreparedHeldOut:
        """Opens the held-out rows, and compiles the evaluation of a batch."""
        size = self.batch_size or run.config.batch_size
        with run.console.phase(f'opening the held-out rows of {name}'):
            held_out = run.evaluated[name].evaluation(self.limit)
            if self.num_batches and self.num_batches * size < len(held_out.rows):
                rows = held_out.rows[: self.num_batches * size]
                held_out = dataclasses.replace(held_out, rows=rows, num_bytes=None)
            if self.sequence_length is None:
                check_same_arrays(
                    f'the rows of the evaluator {name!r}',
                    held_out.rows[0],
                    'the training rows',
                    run.rows[0],
                    'use the same kind of task and packing for both',
                )
            batch = abstract_batch(held_out.rows[0], size, run.config.partitioner)
            sharding = next(iter(batch.values())).sharding
            batch['row_weights'] = jax.ShapeDtypeStruct((size,), np.float32, sharding=sharding)
        batches = finite_batches(run, held_out.rows, size)
        with run.console.phase(f'compiling the evaluation {name}'):
            partitioned = partition_scoring(run, _make_score_step(run.config.objective))
            _check_fillers(name, held_out, run, batch, partitioned)
            eval_step = compile_scoring(run, partitioned, batch)
        return PreparedHeldOut(self.every, name, run, held_out, batches, eval_step)


@dataclasses.dataclass(frozen=True)
class PreparedHeldOut:
    """A compiled evaluation and its rows; see `HeldOut`."""

    every: int
    name: str
    owner: EvaluatedRun
    held_out: EvaluationSet
    batches: FiniteBatches
    eval_step: Any

    @functools.cached_property
    def _baselines(self) -> Mapping[str, float]:
        """Bits per byte of simple models on the same text, by name."""
        return compute_baselines(self.held_out.text)

    def run(self, state: TrainState, step: int) -> dict[str, float]:
        sums: list[Any] = []
        with feeding(self.owner, self.batches) as numbered:
            for _, batch in numbered:
                sums.append(self.eval_step(state.params, state.flax_mutables, batch))
                if must_wait_for_steps():
                    wait_for_devices(sums[-1])
        wait_for_devices(sums)
        # Added in float64 on the host: a sum over many batches needs more digits than float32 has.
        total, ratios = jax.tree.map(lambda *x: sum(map(np.float64, x)), *sums)
        metrics = ratios or self.owner.config.objective.metrics(total, {})
        scores = {k: divide(x) if isinstance(x, Ratio) else float(x) for k, x in metrics.items()}
        if self.held_out.num_bytes:
            scores['bits_per_byte'] = float(total['loss']) / math.log(2) / self.held_out.num_bytes
        self._report(scores, step)
        return scores

    def _report(self, scores: Mapping[str, float], step: int) -> None:
        """Prints the scores, and at the end of a run a chart next to the baselines."""
        console, score = self.owner.console, scores.get('bits_per_byte')
        shown = scores
        if self.owner.config.objective.averages:  # with many variants, which only the files have
            shown = {k: x for k, x in scores.items() if '/' not in k and '_per_' not in k}
        line = format_scores(shown)
        if score is not None:
            others = ', '.join(f'{name} {value:.3f}' for name, value in self._baselines.items())
            line = f'held-out bits per byte {score:.3f} (baselines: {others})'
        console.scores(step, self.name, line)
        if score is not None and step >= self.owner.config.total_steps:
            console.show(score_chart({'this model': score, **self._baselines}))


def _make_score_step(objective: Objective) -> Any:
    """The function (params, variables, batch) -> (sums, ratios) of a batch.

    There are ratios only if the objective averages its metrics over batches.
    """

    def eval_step(params: Any, variables: Any, batch: Any) -> tuple[Any, dict[str, Ratio]]:
        sums = dict(compute_loss(objective, params, batch, None, variables or {}).sums)
        return sums, objective.metrics(sums, batch) if objective.averages else {}

    return eval_step


def _check_fillers(
    name: str,
    held_out: EvaluationSet,
    run: EvaluatedRun,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    score_step: Any,
) -> None:
    """Checks that the rows that fill up the last batch do not count."""
    size, count = batch['row_weights'].shape[0], len(held_out.rows)
    if count % size == 0 or _uses_weights(run, batch, score_step):
        return
    raise ConfigError(
        f'{name}: {count} held-out rows do not fill batches of {size}, and the objective ignores '
        "batch['row_weights'], which is 0 for the rows that fill up the last batch: multiply the "
        f'losses by it, or hold out {count - count % size or size} rows'
    )


def _uses_weights(
    run: EvaluatedRun, batch: Mapping[str, jax.ShapeDtypeStruct], score_step: Any
) -> bool:
    """Whether the loss depends on an array of the batch that is 0 for rows of zeros.

    `score_step` is partitioned, and jax keeps this trace for its compilation.
    """
    state = run.plan.abstract_state
    traced = score_step.trace(state.params, state.flax_mutables, batch)
    jaxpr, (sums, ratios) = traced.jaxpr.jaxpr, traced.out_info
    others = jax.tree.map(lambda _: False, (state.params, state.flax_mutables))
    of_weights = jax.tree.leaves((others, {name: name.endswith('weights') for name in batch}))
    of_loss = jax.tree.leaves(({name: name == 'loss' for name in sums}, [False] * len(ratios)))
    needed = set(itertools.compress(jaxpr.outvars, of_loss))
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(v for v in equation.invars if isinstance(v, jax.extend.core.Var))
    return not needed.isdisjoint(itertools.compress(jaxpr.invars, of_weights))


def compute_baselines(text: bytes) -> dict[str, float]:
    """Returns the bits per byte of every baseline, by name. 4 MB of text take about 3 seconds."""
    compressed = {
        'zlib': zlib.compress(text, 9),
        'xz': lzma.compress(text, preset=9 | lzma.PRESET_EXTREME),  # as `xz -9e` writes it
    }
    bits_per_byte = {name: 8 * len(file) / len(text) for name, file in compressed.items()}
    return {'order-0 entropy': order0_bits_per_byte(text), **bits_per_byte}


def order0_bits_per_byte(text: bytes) -> float:
    """The entropy of the byte frequencies, in bits: the lower bound for a model without context."""
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    p = counts[counts > 0] / len(text)
    return float(-np.sum(p * np.log2(p)))
