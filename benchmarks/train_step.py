"""The trainer's loop next to a hand-written loop in plain JAX, on 8 virtual CPU devices.

Both train the same transformer with the same loss and optimizer on the same rows, with data
parallelism.
Each measurement is a process of its own. The two take turns, and the medians are compared:

- the steps per second after the first steps, with a loss read every 10 steps,
- the time from the start of the process to the end of the first step.

Usage:
  python benchmarks/train_step.py [--repetitions=5] [--steps=100]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ['JAX_PLATFORMS'] = 'cpu'

BATCH, LENGTH, VOCAB, WARM_UP, LOG_EVERY = 16, 128, 384, 20, 10


def make_model():
    """Returns a small transformer from Flax's own layers, which both loops train."""
    import flax.linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            normed = nn.RMSNorm()(x)
            x += nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(normed, mask=mask)
            normed = nn.RMSNorm()(x)
            gated = nn.silu(nn.Dense(384, use_bias=False)(normed))
            return x + nn.Dense(128, use_bias=False)(gated * nn.Dense(384, use_bias=False)(normed))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(VOCAB, 128)
            x, mask = embed(tokens), nn.make_causal_mask(tokens)
            for _ in range(4):
                x = Layer()(x, mask)
            return embed.attend(nn.RMSNorm()(x))

    return Model()


class Clock:
    """Notes when the first step ends, and how long the steps after the warm-up take."""

    def __init__(self, started: float, steps: int):
        self._started, self._steps = started, steps
        self.results: dict[str, float] = {}

    def tick(self, step: int, value) -> None:
        import jax

        if step in (1, WARM_UP, WARM_UP + self._steps):
            jax.block_until_ready(value)
        if step == 1:
            self.results['first_step'] = time.time() - self._started
        elif step == WARM_UP:
            self._begun = time.perf_counter()
        elif step == WARM_UP + self._steps:
            elapsed = time.perf_counter() - self._begun
            self.results['steps_per_second'] = self._steps / elapsed


def make_rows():
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, VOCAB, (4096, LENGTH + 1), dtype=np.int32)
    return {'inputs': tokens[:, :-1], 'targets': tokens[:, 1:]}


def run_trainer(clock: Clock, steps: int, directory: str) -> None:
    import jax

    jax.config.update('jax_num_cpu_devices', 8)
    import optax

    from partitioning import PjitPartitioner
    from train import Supervised, TrainConfig, train
    from train.checkpoints import CheckpointConfig
    from train.data import Examples

    train(
        TrainConfig(
            model_dir=directory,
            objective=Supervised(
                model=make_model(),
                inputs='inputs',
                targets='targets',
                row_loss=optax.softmax_cross_entropy_with_integer_labels,
                row_metrics={'accuracy': lambda logits, targets: logits.argmax(-1) == targets},
            ),
            partitioner=PjitPartitioner(layout='data_parallel'),
            optimizer=optax.adamw(1e-3),
            task=Examples(training=make_rows()),
            total_steps=WARM_UP + steps,
            batch_size=BATCH,
            checkpoints=CheckpointConfig(period=0),
            log_every=LOG_EVERY,
            compilation_cache=None,  # both loops compile
            hooks=[lambda state, step, metrics: clock.tick(step, metrics)],
        )
    )


def run_plain(clock: Clock, steps: int) -> None:
    import jax

    jax.config.update('jax_num_cpu_devices', 8)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ('data',))
    replicated = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec('data'))
    model, tx = make_model(), optax.adamw(1e-3)
    rows = make_rows()

    def init(key):
        params = model.init(key, jnp.zeros((BATCH, LENGTH), jnp.int32))['params']
        return params, tx.init(params)

    def loss_of(params, batch):
        logits = model.apply({'params': params}, batch['inputs'])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch['targets'])
        return jnp.mean(nats), jnp.mean(logits.argmax(-1) == batch['targets'])

    def step_of(state, batch):
        params, opt_state = state
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        norms = optax.tree.norm(grads), optax.tree.norm(params)
        return (params, opt_state), (loss, accuracy, *norms)

    state = jax.jit(init, out_shardings=replicated)(jax.random.key(0))
    step_of = jax.jit(
        step_of,
        in_shardings=(replicated, by_row),
        out_shardings=(replicated, replicated),
        donate_argnums=0,
    )
    order = np.random.default_rng(0).permutation(4096)
    for step in range(1, WARM_UP + steps + 1):
        chosen = np.take(order, range((step - 1) * BATCH, step * BATCH), mode='wrap')
        batch = {name: jax.device_put(x[chosen], by_row) for name, x in rows.items()}
        state, metrics = step_of(state, batch)
        if step % LOG_EVERY == 0:
            print(step, *map(float, metrics))
        clock.tick(step, metrics)


def measure(role: str, steps: int) -> dict[str, float]:
    """Runs one loop in a new process, and returns its results."""
    command = [sys.executable, __file__, f'--role={role}', f'--steps={steps}']
    output = subprocess.run(
        [*command, f'--started={time.time()}'], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def compare(repetitions: int, steps: int) -> None:
    """Lets the loops take turns, and prints the ratios of their medians."""
    results: dict[str, list[dict[str, float]]] = {'trainer': [], 'plain': []}
    for repetition in range(repetitions):
        for role in sorted(results, reverse=bool(repetition % 2)):
            results[role].append(measure(role, steps))
    for name, unit in (('steps_per_second', 'steps/s'), ('first_step', 's to the first step')):
        trainer, plain = (
            statistics.median(r[name] for r in results[role]) for role in ('trainer', 'plain')
        )
        print(f'{trainer / plain:.3f}  trainer {trainer:.2f}, plain JAX {plain:.2f} {unit}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--repetitions', type=int, default=5)
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--role', choices=('trainer', 'plain'), help=argparse.SUPPRESS)
    parser.add_argument('--started', type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is None:
        compare(arguments.repetitions, arguments.steps)
        return
    clock = Clock(arguments.started, arguments.steps)
    if arguments.role == 'plain':
        run_plain(clock, arguments.steps)
    else:
        with tempfile.TemporaryDirectory() as directory:
            run_trainer(clock, arguments.steps, directory)
    print(json.dumps(clock.results))


if __name__ == '__main__':
    main()
