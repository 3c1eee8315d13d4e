"""Scores of a model on held-out rows, during training or from a checkpoint."""

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
from train.abstract import abstract_batch, compile_eval_step
from train.checkpoints import RestoreConfig
from train.console import RunConsole
from train.data import (
    Batch,
    EvaluationSet,
    Feed,
    FiniteBatches,
    Prefetch,
    Task,
    baselines,
    record,
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
      output_dir: the folder to write to: the configuration directly, and the scores in
        `<output_dir>/<step>`.
      model: the linen module whose parameters the checkpoint holds.
      partitioner: lays out data and parameters over the mesh. The checkpoint may have been saved
        on another mesh.
      tasks: the tasks whose held-out documents are evaluated, by name. One name may be ''.
      restore: the checkpoint.
      batch_size: the number of rows in the global batch.
      sequence_length: the number of tokens in a row.
      eval_tokens: the number of held-out tokens of each task to evaluate. None evaluates all.
      prefetch: how far ahead batches are read, by default `Prefetch()`.

    Returns:
      The scores by name: `eval/<task>/<score>`, or `eval/<score>` for the task named ''.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured. Nothing has been written then.
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
    evaluator = Evaluator(
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

    # ---- model: the layout of its parameters, and the compiled eval step
    tokens_BL = jnp.zeros((batch_size, sequence_length), jnp.int32)
    plan = partitioner.plan(lambda k: model.init(k, tokens_BL)['params'], jax.random.key(0))
    batch = abstract_batch(next(iter(rows.values())), batch_size, partitioner)
    eval_step = compile_eval_step(partitioner, model, plan.specs, plan.abstract_state, batch)

    # ---- scores
    params = saved.restore_params(step, plan.abstract_state)
    console.say(f'restored step {step} of {saved.directory}', style='bold')
    checks.make_writable('output_dir', directory)
    checks.make_writable('output_dir', directory / str(step))
    with raise_on_all_processes():
        metrics = MetricWriter(directory / str(step), step - 1)
    with closing(metrics) as writer:
        scores = evaluator.evaluate(eval_step, params, step)
        writer.write(step, scores)
        if jax.process_index() == 0:
            (directory / 'config.gin').write_text(gin.operative_config_str())
    console.files({'scores': writer.path, 'configuration': directory / 'config.gin'})
    return scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates parameters on the held-out rows of tasks.

    Attributes:
      sets: the held-out rows, by the name of their task. A single task may be named ''.
      partitioner: lays out the batches over the mesh.
      batch_size: the number of rows in the global batch.
      console: prints the scores.
      prefetch: how far ahead batches are read, by default `Prefetch()`.
    """

    sets: Mapping[str, EvaluationSet]
    partitioner: BasePartitioner
    batch_size: int
    console: RunConsole
    prefetch: Prefetch | None = None

    @functools.cached_property
    def _baselines(self) -> dict[str, Mapping[str, float]]:
        """Bits per byte of simple models on the same text, by the name of the task."""
        return {name: baselines.compute(held_out.text) for name, held_out in self.sets.items()}

    def evaluate(self, eval_step: EvalStep, params: Any, step: int) -> dict[str, float]:
        """Returns the scores of all tasks by name, `eval/<task>/<score>`, and prints them."""
        results: dict[str, float] = {}
        row_indices = self.partitioner.get_data_layout(self.batch_size).row_indices
        for name, held_out in self.sets.items():
            batches = FiniteBatches(held_out.rows, self.batch_size, row_indices)
            with closing(Feed(batches, self.partitioner, prefetch=self.prefetch)) as feed:
                scores = mean_scores(eval_step, params, feed, held_out.num_bytes)
            self.console.evaluation(step, name, scores, self._baselines[name])
            prefix = f'eval/{name}/' if name else 'eval/'
            results |= {prefix + score: value for score, value in scores.items()}
        return results


def mean_scores(
    eval_step: EvalStep, params: Any, batches: Iterable[Batch], num_bytes: int | None
) -> dict[str, float]:
    """Returns the mean scores over held-out rows.

    Args:
      eval_step: the function (params, batch) -> sums over the targets.
      params: the parameters.
      batches: the held-out rows.
      num_bytes: the size of the text in bytes, or None if the rows are not plain text.

    Returns:
      'loss' in nats per target, 'accuracy', and, if `num_bytes` is given, 'bits_per_byte'. The
      latter includes the nats of the separators between documents, but divides by text bytes only.
    """
    total = {'nats': 0.0, 'weight': 0.0, 'correct': 0.0}
    for batch in batches:
        # Each result is read before the next step starts: on CPU, processes whose programs run
        # ahead of each other were observed to wait forever for each other's collectives.
        sums = eval_step(params, batch)
        total = {name: value + float(sums[name]) for name, value in total.items()}
    scores = {
        'loss': total['nats'] / total['weight'],
        'accuracy': total['correct'] / total['weight'],
    }
    if num_bytes:
        scores['bits_per_byte'] = total['nats'] / math.log(2) / num_bytes
    return scores
