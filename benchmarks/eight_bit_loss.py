"""What matrix products in 8 bits cost in loss: the quickstart's model with four types of products.

Each run trains the model of the quickstart for 100 steps of AdamW on 8 rows of 64 bytes of Python's
standard library, on one CPU thread, and evaluates it on 32,768 other bytes. With int8 and float8,
everything but the products of layers is in bfloat16. The runs of a seed begin with the same
parameters and read the same rows, so that their difference from bfloat16 is a paired one.

Results are added to a file. Runs that it has are not repeated, so a campaign can be resumed.

Usage:
  python benchmarks/eight_bit_loss.py [--results=build/eight_bit_loss.jsonl] [--seeds=5]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import statistics
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_cpu_multi_thread_eigen=false'

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.campaigns import run_trials
from train import NextToken, QuantizedProducts
from train.gin.load import find_config, load_config
from train.models.transformer import Transformer, TransformerConfig

KINDS = ('bfloat16', 'float32', 'int8', 'float8')
STEPS, ROWS, LENGTH, EVALUATED = 100, 8, 64, 512
PEAK = 0.01  # of the learning rate


def make_batch(text: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of bytes that begin at `starts`, of any shape, as `NextToken` reads them."""
    bytes_ = text[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)
    return {
        'decoder_input_tokens': bytes_[..., :-1],
        'decoder_target_tokens': bytes_[..., 1:],
        'decoder_loss_weights': np.ones((*starts.shape, LENGTH), np.float32),
    }


@functools.cache
def read_text() -> np.ndarray:
    """The files at the top of Python's standard library, one after another, as bytes."""
    files = sorted(Path(sysconfig.get_path('stdlib')).glob('*.py'))
    return np.frombuffer(b''.join(file.read_bytes() for file in files), np.uint8)


@functools.cache
def read_settings() -> TransformerConfig:
    """The settings of the quickstart's model."""
    load_config(['configs/runs/quickstart.gin'], ["MODEL_DIR = 'unused'", 'NUM_PARTITIONS = 1'])
    return find_config().objective.model.config


@functools.cache
def make_run(kind: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Compiles the run (key, batches, held-out batch) -> (losses of the steps, held-out loss)."""
    settings = dataclasses.replace(
        read_settings(),
        dtype='float32' if kind == 'float32' else 'bfloat16',
        products=QuantizedProducts(dtype=kind) if kind in ('int8', 'float8') else None,
    )
    objective = NextToken(model=Transformer(settings))
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, PEAK, 10, STEPS))

    def loss(params: Any, batch: Any) -> jax.Array:
        found = objective.loss(params, batch, None, {})
        return found.total / found.sums['weight']

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    def run(key: jax.Array, batches: Any, held_out: Any) -> tuple[jax.Array, jax.Array]:
        first = jax.tree.map(lambda x: x[0], batches)
        params = objective.init(key, first)['params']
        (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), batches)
        return losses, loss(params, held_out)

    return jax.jit(run)


def train_once(kind: str, seed: int) -> dict[str, Any]:
    """Trains one run, and returns its losses in nats per byte."""
    text, rng = read_text(), np.random.default_rng(seed)
    end = len(text) - EVALUATED * LENGTH - 1  # what is behind is held out
    batches = make_batch(text, rng.integers(0, end - LENGTH, (STEPS, ROWS)))
    held_out = make_batch(text, end + LENGTH * np.arange(EVALUATED))
    losses, evaluated = make_run(kind)(jax.random.key(seed), batches, held_out)
    last = float(jnp.mean(losses[-20:]))
    return {'kind': kind, 'seed': seed, 'held_out': float(evaluated), 'last_20_steps': last}


def print_table(trials: Sequence[Mapping[str, Any]]) -> None:
    """Prints the mean loss of each type, and its difference from bfloat16 over the seeds."""
    found = {(one['kind'], one['seed']): one['held_out'] for one in trials}
    print('| products | seeds | nats per byte | difference from bfloat16 | standard error |')
    print('|---|---|---|---|---|')
    for kind in KINDS:
        seeds = [seed for k, seed in found if k == kind and ('bfloat16', seed) in found]
        if not seeds:
            continue
        mean = statistics.mean(found[kind, seed] for seed in seeds)
        changes = [found[kind, seed] - found['bfloat16', seed] for seed in seeds]
        noise = statistics.stdev(changes) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
        change = statistics.mean(changes)
        print(f'| {kind} | {len(seeds)} | {mean:.4f} | {change:+.4f} | {noise:.4f} |')
    losses = [loss for (kind, _), loss in found.items() if kind == 'bfloat16']
    if len(losses) > 1:
        print(f'\nStandard deviation of bfloat16 over the seeds: {statistics.stdev(losses):.4f}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--results', type=Path, default=Path('build/eight_bit_loss.jsonl'))
    parser.add_argument('--seeds', type=int, default=5)
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    trials = [
        (f'{kind} {seed}', functools.partial(train_once, kind, seed))
        for seed in range(options.seeds)
        for kind in KINDS
    ]
    print_table(run_trials(options.results, trials))


if __name__ == '__main__':
    main()
