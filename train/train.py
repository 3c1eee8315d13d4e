"""Training, from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from partitioning import BasePartitioner, TrainState, check_fixed_point, unbox
from partitioning.audit import audit_state
from train import checks
from train.checkpoints import CheckpointConfig, Checkpoints
from train.console import RunConsole, Throughput
from train.data import Batch, Feed, FiniteBatches, LocalBatches, Prefetch, Task, record, yardsticks
from train.data.rows.open_task import features
from train.errors import check_counts
from train.machine import asked_to_stop, failing_together
from train.metrics import MetricWriter
from train.optimizers import Optimizer
from train.sampling import SampleConfig, prompt_tokens, sample_text
from train.steps import make_eval_step, make_train_step


@gin.configurable
def train(
    *,
    model_dir: str,
    model: Any,
    partitioner: BasePartitioner,
    optimizer: Optimizer,
    task: Task,
    total_steps: int,
    batch_size: int,
    sequence_length: int,
    eval_period: int,
    checkpoints: CheckpointConfig,
    eval_tasks: Mapping[str, Task] | None = None,
    eval_tokens: int | None = None,
    num_microbatches: int = 1,
    log_period: int = 10,
    seed: int = 0,
    sample: SampleConfig | None = None,
    prefetch: Prefetch | None = None,
) -> TrainState:
    """Trains a language model on text, or goes on where an earlier run in `model_dir` stopped.

    Args:
      model_dir: where checkpoints, metrics and the configuration go.
      model: a linen module like `Transformer`, with logical axes on its parameters.
      partitioner: lays out data, state and steps over the mesh.
      optimizer: any optax transformation with its schedule.
      task: what it learns from, and how rows are made of it.
      total_steps: the run ends at this step.
      batch_size: rows of the global batch.
      sequence_length: tokens of a row.
      eval_period: steps between evaluations; 0: only at the end.
      checkpoints: when to save and what to keep.
      eval_tasks: tasks whose held-out parts are evaluated, by name; None: that of `task`.
      eval_tokens: evaluate on the first so many held-out tokens of each; None: on all.
      num_microbatches: parts of a batch that are computed one after another.
      log_period: steps between records of training metrics.
      seed: of the initial parameters, the order of the data, and dropout.
      sample: text to write at the end; None: none.
      prefetch: how far ahead of the steps batches are read; None: `Prefetch()`.

    Returns:
      The state after the last step.

    Raises:
      ConfigError, ValueError: settings that cannot be honoured, before anything is written.
      FloatingPointError: the loss is not finite; the last checkpoint stays.
      KeyboardInterrupt: a signal asked the run to stop; the step at hand is done and, where there
        is one process, saved.
    """
    check_counts(
        total_steps=total_steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        num_microbatches=num_microbatches,
        log_period=log_period,
    )
    check_counts(least=0, eval_period=eval_period)
    if eval_tokens is not None:
        check_counts(eval_tokens=eval_tokens)
    check_counts(least=0, seed=seed)
    checks.check_objects(
        model=(model, nn.Module),
        partitioner=(partitioner, BasePartitioner),
        optimizer=(optimizer, Optimizer),
        task=(task, Task),
        checkpoints=(checkpoints, CheckpointConfig),
    )
    if sample is not None:
        checks.check_objects(sample=(sample, SampleConfig))
    if prefetch is not None:
        checks.check_objects(prefetch=(prefetch, Prefetch))
    if eval_tasks is not None:
        checks.check_tasks(eval_tasks)
    directory = checks.check_writable(model_dir)
    console = RunConsole()

    # ---- mesh
    mesh, data_spec = partitioner.mesh, partitioner.data_partition_spec
    checks.check_mesh(mesh)
    checks.check_batch(partitioner, batch_size, num_microbatches)
    console.mesh(mesh)

    # ---- input: rows at any place, of which each step reads its own
    for one in (task, *(eval_tasks or {}).values()):
        checks.check_vocabulary(model, one.num_tokens)
    with console.tokenizing() as progress, failing_together():
        opened = task.open(sequence_length, progress)
        evaluated = {'': opened}
        if eval_tasks:
            evaluated = {name: t.open(sequence_length, progress) for name, t in eval_tasks.items()}
        rows = opened.training(seed)
        evaluations = {name: t.evaluation(eval_tokens) for name, t in evaluated.items()}
        checks.check_evaluated(opened, evaluated)
        checks.check_rows(rows[0], {name: e.rows[0] for name, e in evaluations.items()})
    data = record.data_record(
        opened, evaluated, batch_size=batch_size, sequence_length=sequence_length, seed=seed
    )
    record.check_same_everywhere(data | {'eval_tokens': eval_tokens})
    saved = Checkpoints(directory, checkpoints)
    first_step = saved.latest_step() or 0
    if first_step:
        for change in record.check_same_as_before(directory, data, first_step):
            console.say(f'since this run began, {change}: the rows of its steps are others')
    console.data(opened, evaluations, total_steps * batch_size / opened.rows_per_epoch)
    beside = {name: yardsticks.of(e.text) for name, e in evaluations.items()}
    prompt = None if sample is None else prompt_tokens(sample, opened.tokenizer)

    layout = partitioner.get_data_layout(batch_size)
    abstract_batch = {
        name: jax.ShapeDtypeStruct(
            (batch_size, *shape), dtype, sharding=NamedSharding(mesh, data_spec)
        )
        for name, (shape, dtype) in features(rows[0]).items()
    }

    # ---- model and optimizer, abstract: which arrays there are, and where each of them goes
    tx = optimizer.build()
    key = jax.random.key(seed)

    def init(key: jax.Array) -> TrainState:
        tokens_BL = jnp.zeros((batch_size, sequence_length), jnp.int32)
        return TrainState.create(model.init(key, tokens_BL)['params'], tx)

    named = jax.eval_shape(init, key)
    resolved = partitioner.resolve(named)
    axes = resolved.mesh_axes
    audit = audit_state(named, resolved)
    console.layouts([row for row in audit.arrays if row.category == 'parameters'])
    console.audit(audit)
    abstract_state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        unbox(named),
        resolved.shardings,
    )

    # ---- steps, compiled before anything is written, and once
    started = time.perf_counter()
    train_step = partitioner.compile(
        partitioner.partition(
            make_train_step(
                model,
                optimizer,
                seed=seed,
                num_microbatches=num_microbatches,
                data_spec=data_spec,
            ),
            in_axis_resources=(axes, data_spec),
            out_axis_resources=(axes, None),
            donate_argnums=(0,),
        ),
        abstract_state,
        abstract_batch,
    )
    eval_step = partitioner.compile(
        partitioner.partition(make_eval_step(model), (axes.params, data_spec), None),
        abstract_state.params,
        abstract_batch,
    )
    console.say(f'compiled train and eval steps in {time.perf_counter() - started:.1f} s')

    # ---- state: the newest checkpoint, or parameters born on their devices
    checks.make_writable(directory)
    if first_step:
        state = saved.restore(first_step, abstract_state)
        console.say(f'resumed from step {first_step} of {saved.directory}', style='bold')
    else:
        state = partitioner.partition(lambda k: unbox(init(k)), (None,), axes)(key)
    check_fixed_point(state, axes, mesh)
    if jax.process_index() == 0:
        (directory / 'config.gin').write_text(gin.operative_config_str())
        (directory / 'model-info.txt').write_text(str(audit))
        record.write_record(directory, data)
    writer = MetricWriter(directory, first_step)
    if writer.num_dropped:
        console.say(f'dropped {writer.num_dropped} records of metrics after step {first_step}')

    # ---- loop
    def evaluate_all(step: int) -> dict[str, float]:
        results: dict[str, float] = {}
        for name, held_out in evaluations.items():
            batches = FiniteBatches(held_out.rows, batch_size, layout.row_indices)
            with closing(Feed(batches, partitioner, prefetch=prefetch)) as feed:
                scores = evaluate(eval_step, state.params, feed, held_out.num_bytes)
            console.evaluation(step, name, scores, beside[name])
            prefix = f'eval/{name}/' if name else 'eval/'
            results |= {prefix + metric: value for metric, value in scores.items()}
        return results

    if first_step >= total_steps:
        console.say(f'nothing left to train: total_steps is {total_steps}; a larger one goes on')
        evaluate_all(first_step)
    # Whatever ends the loop, a save that has begun is finished.
    with (
        closing(saved),
        closing(writer),
        closing(
            Feed(
                LocalBatches(rows, batch_size, layout.row_indices),
                partitioner,
                first_step=first_step,
                prefetch=prefetch,
            )
        ) as feed,
        asked_to_stop() as stopping,
        console.training(first_step, total_steps),
    ):
        throughput = Throughput(batch_size * sequence_length, first_step)
        for step in range(first_step + 1, total_steps + 1):
            state, metrics = train_step(state, next(feed))
            last = step == total_steps
            evaluating = last or (eval_period and step % eval_period == 0)
            stopped = stopping()
            saving = last or stopped or saved.is_due(step)
            if evaluating or saving or step % log_period == 0:
                scalars = {f'train/{name}': float(value) for name, value in metrics.items()}
                checks.check_finite(scalars, step, saved.latest_step)
                scalars |= throughput.read(step, feed.waited)
                writer.write(step, scalars)
                console.step(step, total_steps, scalars)
            else:
                jax.block_until_ready(metrics)  # no step runs ahead: see `evaluate`
                console.advance(step)
            paused = time.perf_counter()
            if evaluating:
                writer.write(step, evaluate_all(step))
            if saving:
                saved.save(step, state)
            if stopped:
                raise KeyboardInterrupt
            throughput.skip(time.perf_counter() - paused)

    # ---- what came of it
    if sample is not None and prompt is not None:
        text = sample_text(
            partitioner, model, state.params, axes.params, sample, prompt, opened.tokenizer, seed
        )
        console.sample(sample.prompt, text)
    console.files(
        {
            'checkpoints': saved.directory,
            'metrics': writer.path,
            'TensorBoard': writer.tensorboard_dir,
            'layout of every array': directory / 'model-info.txt',
            'data': directory / record.FILE,
            'configuration': directory / 'config.gin',
        }
    )
    return state


def evaluate(
    eval_step: Callable[[Any, Batch], dict[str, jax.Array]],
    params: Any,
    batches: Iterable[Batch],
    num_bytes: int | None,
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
