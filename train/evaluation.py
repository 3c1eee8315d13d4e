"""Evaluation: the scores of a model on held-out rows, while it trains or of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

import gin
import jax
import jax.numpy as jnp

from partitioning import BasePartitioner
from train import checks
from train.abstract import abstract_arrays, abstract_batch, compile_eval_step
from train.checkpoints import RestoreConfig
from train.console import RunConsole
from train.data import (
    Batch,
    EvaluationSet,
    Feed,
    FiniteBatches,
    Prefetch,
    Task,
    record,
    yardsticks,
)
from train.machine import check_same_step, raise_on_all_processes
from train.metrics import MetricWriter

EvalStep = Callable[[Any, Batch], dict[str, jax.Array]]


@gin.configurable
def evaluate_checkpoint(
    *,
    output_dir: str,
    model: Any,
    partitioner: BasePartitioner,
    tasks: Mapping[str, Task],
    restore: RestoreConfig,
    batch_size: int,
    sequence_length: int,
    eval_tokens: int | None = None,
    prefetch: Prefetch | None = None,
) -> dict[str, float]:
    """Evaluates the parameters of a checkpoint, without training.

    Args:
      output_dir: the scores go to `<output_dir>/<step>`, the configuration to `output_dir`.
      model: the linen module that the checkpoint is of.
      partitioner: lays out data and parameters over the mesh, of which a checkpoint knows nothing.
      tasks: whose held-out parts are evaluated, by name; one may be named ''.
      restore: which checkpoint.
      batch_size: rows that are evaluated at once.
      sequence_length: tokens of a row.
      eval_tokens: evaluate on the first so many held-out tokens of each task; None: on all.
      prefetch: how far ahead batches are read; None: `Prefetch()`.

    Returns:
      The scores, `eval/<name>/<score>` or, of the task named '', `eval/<score>`.

    Raises:
      ConfigError, ValueError: settings that cannot be honoured, before anything is written.
    """
    directory, console = checks.check_evaluation(locals()), RunConsole()
    console.mesh(partitioner.mesh)

    # ---- input
    with console.tokenizing() as progress, raise_on_all_processes():
        for task in tasks.values():
            checks.check_vocabulary(model, task.num_tokens)
        opened = {name: task.open(sequence_length, progress) for name, task in tasks.items()}
        evaluations = {name: task.evaluation(eval_tokens) for name, task in opened.items()}
        rows = {name: held_out.rows[0] for name, held_out in evaluations.items()}
        checks.check_rows(next(iter(rows.values())), rows)
    held_out = HeldOut(
        sets=evaluations,
        partitioner=partitioner,
        batch_size=batch_size,
        console=console,
        prefetch=prefetch,
    )
    with raise_on_all_processes():
        folder, step = restore.find()
        record.check_restored_tokenizer(folder, opened, restore.setting)
    check_same_step(step)
    saved = restore.open(folder)

    # ---- model, abstract, and its step
    tokens_BL = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)
    named = jax.eval_shape(model.init, jax.random.key(0), tokens_BL)['params']
    resolved = partitioner.resolve(named)
    abstract_params = abstract_arrays(named, resolved)
    batch = abstract_batch(next(iter(rows.values())), batch_size, partitioner)
    eval_step = compile_eval_step(partitioner, model, resolved.mesh_axes, abstract_params, batch)

    # ---- the checkpoint, and its scores
    params = saved.restore_params(step, abstract_params)
    console.say(f'restored step {step} of {saved.directory}', style='bold')
    checks.make_writable('output_dir', directory)
    checks.make_writable('output_dir', directory / str(step))
    with raise_on_all_processes():
        metrics = MetricWriter(directory / str(step), step - 1)
    with closing(metrics) as writer:
        scores = held_out.evaluate(eval_step, params, step)
        writer.write(step, scores)
        if jax.process_index() == 0:
            (directory / 'config.gin').write_text(gin.operative_config_str())
    console.files({'scores': writer.path, 'configuration': directory / 'config.gin'})
    return scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out rows of tasks, ready to evaluate any parameters on.

    Attributes:
      sets: the rows, by the task's name; '' where there is one task.
      partitioner: lays out their batches.
      batch_size: rows of a batch.
      console: says the scores.
      prefetch: how far ahead batches are read.
    """

    sets: Mapping[str, EvaluationSet]
    partitioner: BasePartitioner
    batch_size: int
    console: RunConsole
    prefetch: Prefetch | None = None

    @functools.cached_property
    def _beside(self) -> dict[str, Mapping[str, float]]:
        """What simple models of the same bytes reach."""
        return {name: yardsticks.of(held_out.text) for name, held_out in self.sets.items()}

    def evaluate(self, eval_step: EvalStep, params: Any, step: int) -> dict[str, float]:
        """The scores of all tasks, `eval/<name>/<score>`."""
        results: dict[str, float] = {}
        row_indices = self.partitioner.get_data_layout(self.batch_size).row_indices
        for name, held_out in self.sets.items():
            batches = FiniteBatches(held_out.rows, self.batch_size, row_indices)
            with closing(Feed(batches, self.partitioner, prefetch=self.prefetch)) as feed:
                scores = mean_scores(eval_step, params, feed, held_out.num_bytes)
            self.console.evaluation(step, name, scores, self._beside[name])
            prefix = f'eval/{name}/' if name else 'eval/'
            results |= {prefix + score: value for score, value in scores.items()}
        return results


def mean_scores(
    eval_step: EvalStep, params: Any, batches: Iterable[Batch], num_bytes: int | None
) -> dict[str, float]:
    """Means over held-out rows: `loss` in nats, `accuracy`, and `bits_per_byte` of text.

    Every nat counts, those of the separators between documents too, but only bytes divide them.
    """
    total = {'nats': 0.0, 'weight': 0.0, 'correct': 0.0}
    for batch in batches:
        # Read one by one: processes whose programs run ahead of each other can wait for ever for
        # their peers' collectives (measured on CPU).
        sums = eval_step(params, batch)
        total = {name: value + float(sums[name]) for name, value in total.items()}
    scores = {
        'loss': total['nats'] / total['weight'],
        'accuracy': total['correct'] / total['weight'],
    }
    if num_bytes:
        scores['bits_per_byte'] = total['nats'] / math.log(2) / num_bytes
    return scores
