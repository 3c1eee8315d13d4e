"""The built-in transformer in the trainer's loop next to the same in plain JAX, by hand.

All train the same model with the same loss and optimizer on the same rows, with data parallelism
over 8 virtual CPU devices, or over the GPUs if JAX finds any. (`trainer_steps.py` has other
trainers.) Each measurement is a process of its own. The loops take turns, and the medians are
compared:

- the tokens per second after the first steps, with a loss read every 10 steps, and their share of
  the peak of the chips where that is known,
- the time from the start of the process to the end of the first step,
- the peak memory, of the device on a GPU and else of the process.

`--loops` chooses them: trainer, plain, and torch, which needs PyTorch and one GPU. `--forecast`
prints what is forecast for the steps of the trainer and of plain JAX on a machine that need not be
here, such as h100:1x1.

Usage:
  python benchmarks/train_step.py [--model=125m] [--loops=trainer,plain] [--repetitions=5]
      [--steps=100] [--forecast=MACHINE]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from plain_transformer import Sizes, compute_logits, init_params, make_step

from benchmarks.campaigns import call_in_new_process, parse_names, peak_memory

if TYPE_CHECKING:  # plain JAX does not wait for the imports of the trainer
    from meshwright import Forecast
    from train import TrainConfig
    from train.planning.machines import Machine

WARM_UP, LOG_EVERY, NUM_ROWS, LEARNING_RATE = 10, 10, 4096, 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the rows that a GPU or all CPU devices have in a step, and their length."""

    sizes: Sizes
    rows: int
    length: int

    @property
    def batch_size(self) -> int:
        """The rows of a step on the devices that JAX finds."""
        return self.rows if jax.default_backend() == 'cpu' else self.rows * jax.device_count()


def _sizes(layers: int, embed: int, heads: int, mlp: int, remat: str = 'none') -> Sizes:
    return Sizes(
        vocab_size=32_768,
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        mlp_dim=mlp,
        dtype='bfloat16',
        remat=remat,
    )


CASES = {
    'tiny': Case(
        dataclasses.replace(_sizes(4, 128, 4, 384), vocab_size=384, dtype='float32'), 16, 128
    ),
    '125m': Case(_sizes(12, 768, 12, 2048), 16, 1024),
    '1b': Case(_sizes(16, 2048, 16, 8192, 'full'), 8, 2048),
    '3b': Case(_sizes(28, 3072, 24, 8192, 'full'), 8, 2048),
}


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
            self._begun = time.perf_counter(), time.process_time()
        elif step == WARM_UP + self._steps:
            elapsed = time.perf_counter() - self._begun[0]
            self.results['steps_per_second'] = self._steps / elapsed
            self.results['processor'] = (time.process_time() - self._begun[1]) / self._steps
            device = jax.local_devices()[0].memory_stats() or {}
            self.results['peak'] = device.get('peak_bytes_in_use') or peak_memory()


def make_rows(vocab_size: int, length: int) -> dict[str, Any]:
    shape = (NUM_ROWS, length + 1)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
    return {
        'decoder_input_tokens': tokens[:, :-1],
        'decoder_target_tokens': tokens[:, 1:],
        'decoder_loss_weights': np.ones((NUM_ROWS, length), np.float32),
    }


def trainer_config(
    model: str, directory: str, steps: int, batch_size: int, **settings: Any
) -> TrainConfig:
    """Returns the settings of the trainer."""
    from partitioning import PjitPartitioner
    from train import NextToken, TrainConfig
    from train.checkpoints import CheckpointConfig
    from train.data import Examples
    from train.models.transformer import Transformer, TransformerConfig

    case = CASES[model]
    sizes = case.sizes
    config = TransformerConfig(
        **dataclasses.asdict(sizes), num_kv_heads=sizes.num_heads, head_dim=sizes.head_dim
    )
    return TrainConfig(
        model_dir=directory,
        objective=NextToken(model=Transformer(config)),
        partitioner=PjitPartitioner(layout='data_parallel'),
        optimizer=optax.adamw(LEARNING_RATE),
        task=Examples(training=make_rows(sizes.vocab_size, case.length)),
        total_steps=WARM_UP + steps,
        batch_size=batch_size,
        checkpoints=CheckpointConfig(period=0),
        log_every=LOG_EVERY,
        compilation_cache=os.environ.get('JAX_COMPILATION_CACHE_DIR'),  # all loops compile without
        **settings,
    )


def run_trainer(model: str, steps: int, started: float) -> dict[str, float]:
    """Trains with the trainer, and returns the results of the clock."""
    from train import train

    clock = Clock(steps, started)
    with tempfile.TemporaryDirectory() as directory:
        hook = lambda state, step, metrics: clock.tick(step, metrics)  # noqa: E731
        train(trainer_config(model, directory, steps, CASES[model].batch_size, hooks=[hook]))
    return clock.results


def plain_step(
    case: Case, devices: Any, kernel: Any
) -> tuple[Callable[..., Any], Callable[..., Any], NamedSharding, NamedSharding]:
    """Returns the jitted step, the init function of its state, and the layouts of state and rows.

    `kernel` computes attention: 'cudnn' on GPUs.
    """
    mesh, tx = Mesh(devices, ('data',)), optax.adamw(LEARNING_RATE)
    replicated = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec('data'))

    def init(key):
        params = init_params(case.sizes, key)
        return params, tx.init(params)

    step = jax.jit(
        make_step(case.sizes, tx, kernel),
        in_shardings=(replicated, by_row),
        out_shardings=(replicated, replicated),
        donate_argnums=0,
    )
    return step, init, replicated, by_row


def run_plain(model: str, steps: int, started: float) -> dict[str, float]:
    """Trains with a loop by hand, and returns the results of the clock."""
    clock, case = Clock(steps, started), CASES[model]
    kernel = 'cudnn' if jax.default_backend() == 'gpu' else None
    step_of, init, replicated, by_row = plain_step(case, jax.devices(), kernel)
    state = jax.jit(init, out_shardings=replicated)(jax.random.key(0))
    for step, rows in enumerate(batches(case, steps), 1):
        batch = {name: jax.device_put(x, by_row) for name, x in rows.items()}
        state, metrics = step_of(state, batch)
        if step % LOG_EVERY == 0:
            print(step, *map(float, metrics))
        clock.tick(step, metrics)
    return clock.results


def run_torch(model: str, steps: int, started: float) -> dict[str, float]:
    """Trains in PyTorch, and returns the results of the clock and PyTorch's peak memory."""
    import torch
    from plain_torch import make_torch_step

    clock, case = Clock(steps, started), CASES[model]
    step_of = make_torch_step(case.sizes, 'cuda')
    for step, rows in enumerate(batches(case, steps), 1):
        loss = step_of(rows)
        if step % LOG_EVERY == 0:
            print(step, float(loss))
        if step in (1, WARM_UP, WARM_UP + steps):
            torch.cuda.synchronize()
        clock.tick(step, None)
    return {**clock.results, 'peak': torch.cuda.max_memory_allocated()}


def batches(case: Case, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the rows of each step, in an order drawn once."""
    rows = make_rows(case.sizes.vocab_size, case.length)
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    size = case.batch_size
    for step in range(WARM_UP + steps):
        chosen = np.take(order, range(step * size, (step + 1) * size), mode='wrap')
        yield {name: x[chosen] for name, x in rows.items()}


def describe_work(model: str) -> dict[str, float | None]:
    """Returns the tokens of a step, and its FLOPs as a share of a second at the peak, or None."""
    from partitioning.products.flops import count_flops
    from train.reporting.meter import peak_flops

    case = CASES[model]
    batch_size = case.batch_size
    params = jax.eval_shape(lambda: init_params(case.sizes, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((batch_size, case.length), jnp.int32)
    forward = count_flops(
        lambda params, tokens: compute_logits(case.sizes, params, tokens), params, tokens
    )
    peak = peak_flops(jax.devices())
    return {'tokens': batch_size * case.length, 'seconds_at_peak': peak and 3 * forward / peak}


LOOPS = {'trainer': run_trainer, 'plain': run_plain, 'torch': run_torch}


def compare(model: str, loops: list[str], repetitions: int, steps: int) -> None:
    """Lets the loops take turns, and prints their medians, and their ratios to the first."""
    work = call_in_new_process(describe_work, model)
    results: dict[str, list[dict[str, float]]] = {loop: [] for loop in loops}
    for repetition in range(repetitions):
        for loop in loops[:: -1 if repetition % 2 else 1]:
            found = call_in_new_process(LOOPS[loop], model, steps, time.time())
            results[loop].append(found)
    first = _medians(results[loops[0]])
    for loop in loops:
        found = _medians(results[loop])
        rate, start = found['steps_per_second'], found['first_step']
        parts = [
            f'{rate * work["tokens"]:,.0f} tokens/s ({rate / first["steps_per_second"]:.3f})',
            f'first step after {start:.2f} s ({start / first["first_step"]:.3f})',
        ]
        if work['seconds_at_peak'] is not None:
            parts.append(f'{rate * work["seconds_at_peak"]:.1%} of the peak')
        parts.append(f'{found["peak"] / 1e9:.2f} GB')
        print(f'{model} {loop:>7}: {1e3 / rate:,.1f} ms, ' + ', '.join(parts), flush=True)


def _medians(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in results) for name in results[0]}


def forecast_loops(model: str, topology: str) -> None:
    """Prints the forecasts of the steps of the trainer and of plain JAX."""
    from train.planning.forecasts import forecast_run
    from train.planning.machines import parse_machine

    machine, case = parse_machine(topology), CASES[model]
    batch_size = case.rows * machine.num_devices
    found = {
        'trainer': forecast_run(trainer_config(model, 'unused', 0, batch_size), machine),
        'plain': forecast_plain(case, machine),
    }
    for loop, forecast in found.items():
        seconds = forecast.time.seconds if forecast.time else math.nan
        peak = forecast.memory.peak / 1e9
        print(f'{model} {loop:>7}: {1e3 * seconds:,.1f} ms and {peak:.2f} GB forecast', flush=True)


def forecast_plain(case: Case, machine: Machine) -> Forecast:
    """Forecasts the step of plain JAX on a machine."""
    import meshwright as mw

    kernel = 'cudnn' if machine.chip.platform == 'gpu' else None
    step, init, replicated, by_row = plain_step(case, jax.devices()[:1], kernel)
    shape = (case.rows * machine.num_devices, case.length)

    def struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.eval_shape(init, jax.random.key(0))
    rows = {name: np.empty(shape, x.dtype) for name, x in make_rows(8, 1).items()}
    return mw.forecast(
        step,
        jax.tree.map(lambda x: struct(x, replicated), state),
        jax.tree.map(lambda x: struct(x, by_row), rows),
        topology=str(machine),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', choices=CASES)
    parser.add_argument('--loops', default='trainer,plain')
    parser.add_argument('--forecast', metavar='MACHINE')
    parser.add_argument('--repetitions', type=int, default=5)
    parser.add_argument('--steps', type=int, default=100)
    arguments = parser.parse_args()
    model = arguments.model or ('tiny' if jax.default_backend() == 'cpu' else '125m')
    if arguments.forecast:
        forecast_loops(model, arguments.forecast)
    else:
        loops = parse_names(arguments.loops, LOOPS, 'loop')
        compare(model, loops, arguments.repetitions, arguments.steps)


if __name__ == '__main__':
    main()
