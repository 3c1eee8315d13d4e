"""Training, from top to bottom."""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from partitioning import BasePartitioner, array_layouts, layout_table, unbox
from train.checkpoints import CheckpointConfig, Checkpoints
from train.config import save_operative_config
from train.config.errors import ConfigError
from train.console import RunConsole, Throughput
from train.data import corpus as corpora
from train.data.batches import EvaluationBatches, TrainingBatches
from train.metrics import MetricWriter
from train.models.decoding import decode
from train.optimizers import Optimizer
from train.steps import make_eval_step, make_train_step
from train.train_state import TrainState


@gin.configurable
def train(
    *,
    model_dir: str,
    model: Any,
    partitioner: BasePartitioner,
    optimizer: Optimizer,
    corpus: corpora.TextFiles,
    total_steps: int,
    batch_size: int,
    sequence_length: int,
    eval_period: int,
    checkpoints: CheckpointConfig,
    eval_tokens: int | None = None,
    num_microbatches: int = 1,
    log_period: int = 10,
    seed: int = 0,
    sample_prompt: str = '',
    sample_length: int = 0,
    sample_temperature: float = 0.8,
) -> TrainState:
    """Trains a language model on text, or goes on where an earlier run in `model_dir` stopped.

    Args:
      model_dir: where checkpoints, metrics and the configuration go.
      model: a linen module like `Transformer`, with logical axes on its parameters.
      partitioner: lays out data, state and steps over the mesh.
      optimizer: any optax transformation with its schedule.
      corpus: the text, read as bytes.
      total_steps: the run ends at this step.
      batch_size: rows of the global batch.
      sequence_length: tokens of a row.
      eval_period: steps between evaluations; 0: only at the end.
      checkpoints: when to save and what to keep.
      eval_tokens: evaluate on the first so many held-out tokens; None: on all.
      num_microbatches: parts of a batch that are computed one after another.
      log_period: steps between records of training metrics.
      seed: of the initial parameters, the order of the data, and dropout.
      sample_prompt: the model continues this text at the end.
      sample_length: bytes of the sample, prompt included; 0: no sample.
      sample_temperature: of the sampling; 0 is greedy.

    Returns:
      The state after the last step.

    Raises:
      ConfigError, ValueError: settings that cannot be honoured, before anything is written.
      FloatingPointError: the loss is not finite; the last checkpoint stays.
    """
    check_counts(
        total_steps=total_steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        log_period=log_period,
        num_microbatches=num_microbatches,
    )
    prompt = (sample_prompt or '\n').encode()
    if 0 < sample_length <= len(prompt):
        raise ConfigError(
            f'sample_length {sample_length} leaves no room after the {len(prompt)} bytes of '
            'sample_prompt'
        )
    console = RunConsole()
    directory = Path(os.path.expanduser(model_dir))
    check_writable(directory)

    # ---- mesh
    mesh = partitioner.mesh
    console.mesh(mesh)

    # ---- input
    check_batch(partitioner, batch_size, num_microbatches)
    batch_sharding = NamedSharding(mesh, partitioner.data_partition_spec)
    training_text, held_out = corpus.load()
    if eval_tokens is not None:
        held_out = held_out.head(eval_tokens + 1)
    batches = TrainingBatches(
        training_text,
        batch_size=batch_size,
        length=sequence_length,
        seed=seed,
        sharding=batch_sharding,
    )
    evaluation = EvaluationBatches(
        held_out, batch_size=batch_size, length=sequence_length, sharding=batch_sharding
    )
    yardsticks = {
        'order-0 entropy': corpora.order0_bits_per_byte(held_out.text()),
        'zlib -9': corpora.zlib_bits_per_byte(held_out.text()),
    }
    tokens_per_epoch = batches.rows_per_epoch * sequence_length
    tokens_per_step = batch_size * sequence_length
    console.say(
        f'{training_text.num_files} files, {training_text.num_bytes / 1e6:.1f} MB to train on '
        f'({total_steps * tokens_per_step / tokens_per_epoch:.2f} epochs); {held_out.num_files} '
        f'files held out, of which {held_out.num_bytes / 1e3:,.0f} kB are evaluated'
    )

    # ---- model and optimizer, abstract: which arrays there are and where they go
    check_vocabulary(model)
    tx = optimizer.build()
    tokens = jnp.zeros((batch_size, sequence_length), jnp.int32)

    def init(key: jax.Array) -> TrainState:
        return TrainState.create(model.init(key, tokens)['params'], tx)

    key = jax.random.key(seed)
    named_state = jax.eval_shape(init, key)
    state_axes = partitioner.get_mesh_axes(named_state)
    layouts = array_layouts(
        named_state, partitioner.get_logical_axes(named_state), state_axes, mesh
    )
    console.layouts([row for row in layouts if row.path.startswith('params/')])
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        state_axes,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    abstract_state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        unbox(named_state),
        shardings,
    )

    # ---- steps, compiled once, before anything is written
    example = batches.at(0)
    train_step = partitioner.partition(
        make_train_step(
            model,
            optimizer,
            seed=seed,
            num_microbatches=num_microbatches,
            data_spec=partitioner.data_partition_spec,
        ),
        in_axis_resources=(state_axes, partitioner.data_partition_spec),
        out_axis_resources=(state_axes, None),
        donate_argnums=(0,),
    )
    eval_step = partitioner.partition(
        make_eval_step(model),
        in_axis_resources=(state_axes.params, partitioner.data_partition_spec),
        out_axis_resources=None,
    )
    started = time.perf_counter()
    compiled_train_step = partitioner.compile(train_step, abstract_state, example)
    compiled_eval_step = partitioner.compile(eval_step, abstract_state.params, example)
    console.say(f'compiled train and eval steps in {time.perf_counter() - started:.1f} s')

    # ---- state: the newest checkpoint, or parameters born on their devices
    make_writable(directory)
    saved = Checkpoints(directory, checkpoints)
    first_step = saved.latest_step() or 0
    if first_step:
        state = saved.restore(first_step, abstract_state)
        console.say(f'resumed from step {first_step} of {saved.directory}', style='bold')
    else:
        sharded_init = partitioner.partition(lambda k: unbox(init(k)), (None,), state_axes)
        state = sharded_init(key)
    if jax.process_index() == 0:
        save_operative_config(directory / 'config.gin')
        (directory / 'model-info.txt').write_text(layout_table(layouts, mesh))
    writer = MetricWriter(directory, first_step)

    def evaluate(step: int) -> dict[str, float]:
        total = {'nats': 0.0, 'weight': 0.0, 'correct': 0.0}
        for batch in evaluation:
            # Read one by one: CPU processes that run ahead of each other deadlock in collectives.
            sums = compiled_eval_step(state.params, batch)
            total = {name: value + float(sums[name]) for name, value in total.items()}
        results = {
            'eval/loss': total['nats'] / total['weight'],
            'eval/accuracy': total['correct'] / total['weight'],
            # Every nat counts, those of the separators between files too, but only bytes divide.
            'eval/bits_per_byte': total['nats'] / math.log(2) / held_out.num_bytes,
        }
        console.evaluation(step, results, yardsticks)
        return results

    # ---- loop: the loss of a step is read while the next one runs
    if first_step >= total_steps:
        console.say(f'step {first_step} of {total_steps}: nothing left to train')
        evaluate(first_step)
    else:
        with console.training(first_step, total_steps):
            throughput = Throughput(tokens_per_step, first_step)
            for step in range(first_step + 1, total_steps + 1):
                state, metrics = compiled_train_step(state, batches.at(step - 1))
                evaluating = step == total_steps or bool(eval_period) and step % eval_period == 0
                saving = saved.is_due(step, total_steps)
                if step % log_period == 0 or step == total_steps or evaluating or saving:
                    scalars = {f'train/{k}': float(v) for k, v in metrics.items()}
                    check_finite(scalars['train/loss'], step, saved.latest_step())
                    rate = throughput.read(step)
                    scalars |= {
                        'train/tokens_per_second': rate,
                        'train/seconds_per_step': tokens_per_step / rate,
                    }
                    writer.write(step, scalars)
                    console.step(step, total_steps, scalars['train/loss'], rate)
                else:
                    jax.block_until_ready(metrics)
                paused = time.perf_counter()
                if evaluating:
                    writer.write(step, evaluate(step))
                if saving:
                    saved.save(step, state)
                throughput.skip(time.perf_counter() - paused)

    # ---- what came of it
    if sample_length:
        text = sample(
            partitioner,
            model,
            state,
            state_axes,
            prompt,
            sample_length,
            sample_temperature,
            seed,
        )
        console.sample(prompt.decode(), text[len(prompt) :].decode(errors='replace'))
    saved.close()
    writer.close()
    console.heading('files')
    for what, path in (
        ('checkpoints', saved.directory),
        ('metrics', writer.path),
        ('TensorBoard', writer.tensorboard_dir),
        ('layout of every array', directory / 'model-info.txt'),
        ('configuration', directory / 'config.gin'),
    ):
        console.say(f'{what}: {path}')
    return state


def sample(
    partitioner: BasePartitioner,
    model: Any,
    state: TrainState,
    state_axes: TrainState,
    prompt: bytes,
    length: int,
    temperature: float,
    seed: int,
) -> bytes:
    """Continues a prompt to `length` bytes; every row of the batch axis does, the first is kept."""
    spec = partitioner.data_partition_spec
    rows = np.tile(np.frombuffer(prompt, np.uint8), (partitioner.data_mesh_size, 1))
    sharding = NamedSharding(partitioner.mesh, spec)
    tokens = jax.make_array_from_callback(
        rows.shape, sharding, lambda index: rows[index].astype(np.int32)
    )

    def continue_prompt(params: Any, prompt_BL: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), 1)
        return decode(
            model,
            params,
            prompt_BL,
            key,
            length=length,
            temperature=temperature,
            num_tokens=corpora.SEPARATOR,
        )

    sampler = partitioner.partition(continue_prompt, (state_axes.params, spec), None)
    return bytes(np.asarray(sampler(state.params, tokens))[0].astype(np.uint8))


def check_counts(**counts: int) -> None:
    """Each setting is a whole number above 0."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f'{name} {count!r} must be a whole number above 0')


def check_batch(partitioner: BasePartitioner, batch_size: int, num_microbatches: int) -> None:
    """The data axis divides the batch, and each microbatch."""
    partitioner.get_data_layout(batch_size)
    parts = partitioner.data_mesh_size * num_microbatches
    if batch_size % parts:
        raise ConfigError(
            f'batch_size {batch_size} does not divide into {num_microbatches} microbatches over a '
            f'data axis of {partitioner.data_mesh_size}: use a multiple of {parts}'
        )


def check_vocabulary(model: Any) -> None:
    """The model knows every token of the text."""
    vocab_size = model.config.vocab_size
    if vocab_size < corpora.NUM_TOKENS:
        raise ConfigError(
            f'vocab_size {vocab_size} is smaller than the {corpora.NUM_TOKENS} tokens of the text '
            f'(256 bytes and a separator): use {corpora.NUM_TOKENS} or more'
        )


def check_finite(loss: float, step: int, last_checkpoint: int | None) -> None:
    """Stops a run whose loss is lost, before it is saved."""
    if not math.isfinite(loss):
        kept = (
            f'the checkpoint of step {last_checkpoint} stays' if last_checkpoint else 'none saved'
        )
        raise FloatingPointError(
            f'the loss is {loss} at step {step} ({kept}): lower the learning rate or clip_norm'
        )


def check_writable(directory: Path) -> None:
    """Finds an unusable model_dir without creating it."""
    existing = next(p for p in [directory, *directory.resolve().parents] if p.exists())
    if not existing.is_dir():
        raise ConfigError(f'MODEL_DIR {directory}: {existing} is a file, not a folder')
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f'MODEL_DIR {directory}: no permission to write in {existing}')


def make_writable(directory: Path) -> None:
    """Creates model_dir and proves that files can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f'MODEL_DIR {directory} cannot be written: {error.strerror}') from error
