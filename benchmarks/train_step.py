"""The built-in transformer in the trainer's loop next to the same in plain JAX, by hand.

Both train the same model with the same loss and optimizer on the same rows, with data parallelism
over 8 virtual CPU devices, or over the GPUs if JAX finds any. Each measurement is a process of its
own. The two take turns, and the medians are compared:

- the tokens per second after the first steps, with a loss read every 10 steps, and their share of
  the peak of the chips where that is known,
- the time from the start of the process to the end of the first step.

Usage:
  python benchmarks/train_step.py [--repetitions=5] [--steps=100]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

jax.config.update('jax_num_cpu_devices', 8)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from plain_transformer import Sizes, compute_logits, init_params, make_step

from benchmarks.campaigns import call_command

WARM_UP, LOG_EVERY, NUM_ROWS = 20, 10, 4096


def choose_sizes() -> tuple[Any, int, int]:
    """Returns the sizes of the model, the rows per step and their length, for this machine."""
    if jax.default_backend() == 'cpu':
        layers = {'num_layers': 4, 'embed_dim': 128, 'num_heads': 4, 'mlp_dim': 384}
        return Sizes(vocab_size=384, **layers, dtype='float32'), 16, 128
    layers = {'num_layers': 12, 'embed_dim': 768, 'num_heads': 12, 'mlp_dim': 2048}
    return Sizes(vocab_size=32_768, **layers, dtype='bfloat16'), 16 * jax.device_count(), 1024


class Clock:
    """Notes when the first step ends, and how long the steps after the warm-up take."""

    def __init__(self, steps: int, started: float):
        self._steps, self._started = steps, started
        self.results: dict[str, float] = {}

    def tick(self, step: int, value) -> None:
        if step in (1, WARM_UP, WARM_UP + self._steps):
            jax.block_until_ready(value)
        if step == 1:
            self.results['first_step'] = time.time() - self._started
        elif step == WARM_UP:
            self._begun = time.perf_counter()
        elif step == WARM_UP + self._steps:
            elapsed = time.perf_counter() - self._begun
            self.results['steps_per_second'] = self._steps / elapsed


def make_rows(vocab_size: int, length: int) -> dict[str, Any]:
    shape = (NUM_ROWS, length + 1)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
    return {
        'decoder_input_tokens': tokens[:, :-1],
        'decoder_target_tokens': tokens[:, 1:],
        'decoder_loss_weights': np.ones((NUM_ROWS, length), np.float32),
    }


def run_trainer(steps: int, started: float) -> dict[str, float]:
    """Trains with the trainer, and returns the results of the clock."""
    from partitioning import PjitPartitioner
    from train import NextToken, TrainConfig, train
    from train.checkpoints import CheckpointConfig
    from train.data import Examples
    from train.models.transformer import Transformer, TransformerConfig

    clock = Clock(steps, started)
    sizes, batch_size, length = choose_sizes()
    config = TransformerConfig(
        **dataclasses.asdict(sizes), num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim
    )
    with tempfile.TemporaryDirectory() as directory:
        train(
            TrainConfig(
                model_dir=directory,
                objective=NextToken(model=Transformer(config)),
                partitioner=PjitPartitioner(layout='data_parallel'),
                optimizer=optax.adamw(1e-3),
                task=Examples(training=make_rows(sizes.vocab_size, length)),
                total_steps=WARM_UP + steps,
                batch_size=batch_size,
                checkpoints=CheckpointConfig(period=0),
                log_every=LOG_EVERY,
                compilation_cache=None,  # both loops compile
                hooks=[lambda state, step, metrics: clock.tick(step, metrics)],
            )
        )
    return clock.results


def run_plain(steps: int, started: float) -> dict[str, float]:
    """Trains with a loop by hand, and returns the results of the clock."""
    clock = Clock(steps, started)
    sizes, batch_size, length = choose_sizes()
    mesh = Mesh(jax.devices(), ('data',))
    replicated = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec('data'))
    tx, rows = optax.adamw(1e-3), make_rows(sizes.vocab_size, length)

    def init(key):
        params = init_params(sizes, key)
        return params, tx.init(params)

    state = jax.jit(init, out_shardings=replicated)(jax.random.key(0))
    step_of = jax.jit(
        make_step(sizes, tx),
        in_shardings=(replicated, by_row),
        out_shardings=(replicated, replicated),
        donate_argnums=0,
    )
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    for step in range(1, WARM_UP + steps + 1):
        chosen = np.take(order, range((step - 1) * batch_size, step * batch_size), mode='wrap')
        batch = {name: jax.device_put(x[chosen], by_row) for name, x in rows.items()}
        state, metrics = step_of(state, batch)
        if step % LOG_EVERY == 0:
            print(step, *map(float, metrics))
        clock.tick(step, metrics)
    return clock.results


def describe_work() -> dict[str, float | None]:
    """Returns the tokens of a step, and its FLOPs as a share of a second at the peak, or None."""
    from partitioning.products.flops import count_flops
    from train.reporting.meter import peak_flops

    sizes, batch_size, length = choose_sizes()
    params = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    forward = count_flops(
        lambda params, tokens: compute_logits(sizes, params, tokens), params, tokens
    )
    peak = peak_flops(jax.devices())
    return {'tokens': batch_size * length, 'seconds_at_peak': 3 * forward / peak if peak else None}


def measure(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Calls a function in a new process, and returns its results."""
    command = call_command(function, *arguments)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def compare(repetitions: int, steps: int) -> None:
    """Lets the loops take turns, and prints the ratios of their medians."""
    work = measure(describe_work)
    loops = {'trainer': run_trainer, 'plain': run_plain}
    results: dict[str, list[dict[str, float]]] = {role: [] for role in loops}
    for repetition in range(repetitions):
        for role in sorted(loops, reverse=bool(repetition % 2)):
            results[role].append(measure(loops[role], steps, time.time()))

    def median(role: str, name: str) -> float:
        return statistics.median(result[name] for result in results[role])

    rates = {role: median(role, 'steps_per_second') for role in results}
    shares = ''
    if work['seconds_at_peak'] is not None:
        listed = (f'{rate * work["seconds_at_peak"]:.1%}' for rate in rates.values())
        shares = f'; {" and ".join(listed)} of the peak'
    trainer, plain = (rate * work['tokens'] for rate in rates.values())
    print(f'{plain / trainer:.3f} times the time of a step: ', end='')
    print(f'trainer {trainer:,.0f}, plain JAX {plain:,.0f} tokens/s{shares}')
    trainer, plain = (median(role, 'first_step') for role in results)
    print(f'{trainer / plain:.3f} times the time to the first step: ', end='')
    print(f'trainer {trainer:.2f}, plain JAX {plain:.2f} s')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--repetitions', type=int, default=5)
    parser.add_argument('--steps', type=int, default=100)
    arguments = parser.parse_args()
    compare(arguments.repetitions, arguments.steps)


if __name__ == '__main__':
    main()
