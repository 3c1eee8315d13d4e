"""The time of a call of a partitioned function, compared with `jax.jit` of the same function.

Run: python benchmarks/dispatch.py [--rounds 3000]

It uses eight virtual CPU devices (mesh data 4 x model 2), states of 10 and 500 leaves, a step
that only reads its state, and a step that donates it. Each step is partitioned three times, jitted
three times, and jitted three times inside the least that Python can add, `lambda *args:
jitted(*args)`. Every copy is a function of its own, because jax would share one program among
copies of the same function, and a program that is called more often is faster. The copies are
called in random order. The column `ratio` divides the median time of the partitioned copies by the
median of the jitted ones, `least` does so for the copies inside a lambda, and `noise` divides the
slowest jitted copy by the fastest. The arrays are tiny, so the time is spent in the call alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

jax.config.update('jax_num_cpu_devices', 8)

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import PjitPartitioner

WARM_UP = 20
COPIES = 3

State = dict[str, jax.Array]


def make_read() -> Callable[[State], jax.Array]:
    def read(state: State) -> jax.Array:
        return state['w0'][0, 0]

    return read


def make_update() -> Callable[[State], State]:
    def update(state: State) -> State:
        return {name: w + 1 for name, w in state.items()}

    return update


def compare(leaves: int, donate: bool, rounds: int) -> list[float]:
    """Returns the median seconds of a call.

    They are of the partitioned copies, the jitted ones, those inside a lambda, and the fastest and
    the slowest jitted one.
    """
    partitioner = PjitPartitioner(num_partitions=2)
    spec = P('data', 'model')
    make, out_spec = (make_update, spec) if donate else (make_read, P())
    donated = (0,) if donate else ()
    sharding, out_sharding = (NamedSharding(partitioner.mesh, s) for s in (spec, out_spec))
    raw = functools.partial(
        jax.jit, in_shardings=(sharding,), out_shardings=out_sharding, donate_argnums=donated
    )
    fns = [
        *(partitioner.partition(make(), (spec,), out_spec, (), donated) for _ in range(COPIES)),
        *(raw(make()) for _ in range(COPIES)),
        *(_in_lambda(raw(make())) for _ in range(COPIES)),
    ]
    states = [
        {f'w{i}': jax.device_put(jnp.ones((8, 8)), sharding) for i in range(leaves)} for _ in fns
    ]
    times: list[list[float]] = [[] for _ in fns]
    order = random.Random(0)
    for _ in range(rounds + WARM_UP):
        for i in order.sample(range(len(fns)), len(fns)):
            start = time.perf_counter()
            result = fns[i](states[i])
            times[i].append(time.perf_counter() - start)
            jax.block_until_ready(result)
            if donate:
                states[i] = result
    times = [t[WARM_UP:] for t in times]
    ours, jitted, in_lambda = (times[i : i + COPIES] for i in range(0, 3 * COPIES, COPIES))
    medians = [statistics.median(itertools.chain(*t)) for t in (ours, jitted, in_lambda)]
    copies = sorted(map(statistics.median, jitted))
    return [*medians, copies[0], copies[-1]]


def _in_lambda(jitted: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jitted(*args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rounds', type=int, default=3000)
    rounds = parser.parse_args().rounds
    gc.disable()
    print(
        f'jax {jax.__version__}, {jax.device_count()} devices, medians of {rounds:,} calls with 10 '
        f'leaves and {rounds // 3:,} calls with 500 leaves'
    )
    print(f'{"leaves":>6}  {"step":<9}  {"partitioned":>12}  {"jax.jit":>10}  ratio  least  noise')
    for leaves in (10, 500):
        for donate in (False, True):
            repeats = rounds if leaves == 10 else rounds // 3
            ours, raw, least, fastest, slowest = compare(leaves, donate, repeats)
            step = 'donated' if donate else 'read-only'
            print(
                f'{leaves:>6}  {step:<9}  {ours * 1e6:>9.1f} us  {raw * 1e6:>7.1f} us  '
                f'{ours / raw:.3f}  {least / raw:.3f}  {slowest / fastest:.3f}'
            )


if __name__ == '__main__':
    main()
