"""The training loop and everything around it, from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import gin
import jax
import jax.numpy as jnp

from partitioning import BasePartitioner, TrainState
from train import checks
from train.abstract import abstract_batch, compile_eval_step
from train.checkpoints import CheckpointConfig, Checkpoints, RestoreConfig
from train.console import RunConsole, Throughput
from train.data import Feed, LocalBatches, Prefetch, Task, record
from train.evaluation import Evaluator
from train.machine import check_same_step, raise_on_all_processes, stop_on_signal
from train.metrics import MetricWriter
from train.optimizers import Optimizer
from train.sampling import SampleConfig, prompt_tokens, sample_text
from train.steps import LossConfig, make_train_step


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
    restore: RestoreConfig | None = None,
    loss: LossConfig | None = None,
    num_microbatches: int = 1,
    weight_metrics: bool = False,
    log_period: int = 10,
    seed: int = 0,
    sample: SampleConfig | None = None,
    prefetch: Prefetch | None = None,
) -> TrainState:
    """Trains a language model on text, or resumes an earlier run in `model_dir`.

    Args:
      model_dir: the folder for checkpoints, metrics and the configuration.
      model: a linen module like `Transformer`, with logical axes on its parameters.
      partitioner: lays out data, state and steps over the mesh.
      optimizer: an optax transformation with its learning rate.
      task: the training data, and how it becomes rows.
      total_steps: the step at which the run ends.
      batch_size: the number of rows in the global batch.
      sequence_length: the number of tokens in a row.
      eval_period: the number of steps between evaluations. 0 evaluates only at the end.
      checkpoints: when to save checkpoints, and which to keep.
      eval_tasks: the tasks whose held-out documents are evaluated, by name. By default, it is
        `task`.
      eval_tokens: the number of held-out tokens of each task to evaluate. None evaluates all.
      restore: the checkpoint of another run to start from, including its step, if `model_dir` has
        no checkpoint. By default, a run starts from new parameters.
      loss: the loss to minimize, by default `LossConfig()`, the cross-entropy.
      num_microbatches: the number of parts of a batch that are computed one after another.
      weight_metrics: whether to add the metrics of every parameter to the training metrics.
      log_period: the number of steps between records of training metrics.
      seed: the seed of the initial parameters, the order of the data, and dropout.
      sample: the text to generate at the end. By default, no text is generated.
      prefetch: how far ahead of the steps batches are read, by default `Prefetch()`.

    Returns:
      The state after the last step.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured. Nothing has been written then.
      FloatingPointError: if the loss is not finite. The newest checkpoint is kept.
      KeyboardInterrupt: if a signal asks the run to stop. With one process, the current step is
        finished and saved first.
    """
    directory = checks.check_training(locals())
    console = RunConsole()

    # ---- mesh
    data_spec = partitioner.data_partition_spec
    console.mesh(partitioner.mesh)

    # ---- input: rows with random access; each step reads its batch by index
    with console.tokenizing() as progress, raise_on_all_processes():
        for each in (task, *(eval_tasks or {}).values()):
            checks.check_vocabulary(model, each.num_tokens)
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
    console.data(opened, evaluations, total_steps * batch_size / opened.rows_per_epoch)
    evaluator = Evaluator(
        sets=evaluations,
        partitioner=partitioner,
        batch_size=batch_size,
        console=console,
        prefetch=prefetch,
    )
    prompt = None if sample is None else prompt_tokens(sample, opened.tokenizer)
    layout = partitioner.get_data_layout(batch_size)
    batch = abstract_batch(rows[0], batch_size, partitioner)

    # ---- first step: from the run's own checkpoint, another run's checkpoint, or 0
    saved = Checkpoints(directory / 'checkpoints', checkpoints)
    restored, changes = None, list[str]()
    with raise_on_all_processes():
        first_step = saved.latest_step() or 0
        if first_step:
            changes = record.check_same_as_before(directory, data, first_step)
        elif restore is not None:
            restored, first_step = restore.find()
            checks.check_steps_left(restore, first_step, total_steps)
            record.check_restored_tokenizer(restored, {'': opened}, restore.setting)
    check_same_step(first_step)
    source = restore.open(restored) if restore and restored else saved
    for change in changes:
        console.say(change)

    # ---- model and optimizer: the layout of every array, before any of them exists
    tx = optimizer.build()
    key = jax.random.key(seed)

    def init(key: jax.Array) -> TrainState:
        tokens_BL = jnp.zeros((batch_size, sequence_length), jnp.int32)
        return TrainState.create(model.init(key, tokens_BL)['params'], tx)

    plan = partitioner.plan(init, key)
    specs, abstract_state, audit = plan.specs, plan.abstract_state, plan.audit()
    console.parameters([row for row in plan.rows if row.role == 'parameters'])
    console.audit(audit)

    # ---- steps: compiled once, before anything is written
    started = time.perf_counter()
    train_step = partitioner.compile(
        partitioner.partition(
            make_train_step(
                model,
                optimizer,
                seed=seed,
                num_microbatches=num_microbatches,
                data_spec=data_spec,
                loss=loss,
                weight_metrics=weight_metrics,
            ),
            in_axis_resources=(specs, data_spec),
            out_axis_resources=(specs, None),
            donate_argnums=(0,),
        ),
        abstract_state,
        batch,
    )
    eval_step = compile_eval_step(partitioner, model, specs.params, abstract_state.params, batch)
    console.say(f'compiled the train and eval steps in {time.perf_counter() - started:.1f} s')

    # ---- state: restored, or created on its devices
    checks.make_writable('MODEL_DIR', directory)
    if first_step:
        state = source.restore(first_step, abstract_state)
        verb = 'resumed' if source is saved else 'restored'
        console.say(f'{verb} from step {first_step} of {source.directory}', style='bold')
    else:
        state = plan.init(key)
    plan.check(state)
    with raise_on_all_processes():
        if jax.process_index() == 0:
            (directory / 'config.gin').write_text(gin.operative_config_str())
            (directory / 'model-info.txt').write_text(str(audit))
            plan.save(directory / 'plan.json')
            record.write_record(directory, data)
        writer = MetricWriter(directory, first_step)
    if writer.num_dropped:
        console.say(f'dropped {writer.num_dropped} metrics records after step {first_step}')

    # ---- no steps left: only print the scores, which metrics.jsonl already contains
    if first_step >= total_steps:
        console.say(f'already at step {first_step} of {total_steps}; raise TRAIN_STEPS to continue')
        evaluator.evaluate(eval_step, state.params, first_step)

    # ---- loop
    # However the loop ends, a save that has begun is completed.
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
        stop_on_signal() as stop_requested,
        console.training(first_step, total_steps),
    ):
        throughput = Throughput(batch_size * sequence_length, first_step)
        for step in range(first_step + 1, total_steps + 1):
            state, metrics = train_step(state, next(feed))
            last = step == total_steps
            evaluating = last or (eval_period and step % eval_period == 0)
            stopping = stop_requested()
            saving = last or stopping or saved.is_due(step)
            if evaluating or saving or step % log_period == 0:
                scalars = {f'train/{name}': float(value) for name, value in metrics.items()}
                checks.check_finite(scalars, step, saved.latest_step)
                scalars |= throughput.read(step, feed.waited)
                writer.write(step, scalars)
                console.step(step, total_steps, scalars)
            else:
                jax.block_until_ready(metrics)  # Steps must not run ahead: see `mean_scores`.
                console.advance(step)
            paused = time.perf_counter()
            if evaluating:
                writer.write(step, evaluator.evaluate(eval_step, state.params, step))
            if saving:
                saved.save(step, state)
            if stopping:
                raise KeyboardInterrupt
            throughput.skip(time.perf_counter() - paused)

    # ---- results
    if sample is not None and prompt is not None:
        text = sample_text(
            partitioner, model, state.params, specs.params, sample, prompt, opened.tokenizer, seed
        )
        console.sample(sample.prompt, text)
    console.files(
        {
            'checkpoints': saved.directory,
            'metrics': writer.path,
            'TensorBoard': writer.tensorboard_dir,
            'layout of every array': directory / 'model-info.txt',
            'layout as a plan': directory / 'plan.json',
            'data': directory / record.FILE,
            'configuration': directory / 'config.gin',
        }
    )
    return state
