"""The time of a call of a partitioned function, compared with `jax.jit` of the same function.

Run: python benchmarks/dispatch.py [--rounds 4000]

It uses eight virtual CPU devices (mesh data 4 x model 2), states of 10 and 500 leaves, a step
that only reads its state, and a step that donates it. The functions are called in random order.
`jax.jit` is measured as two separate functions: the column `ratio` divides the median time of the
partitioned function by the median of both together, and `noise` divides the medians of the two by
each other. The arrays are tiny, so the time is that of the call alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import statistics
import time

import jax

jax.config.update('jax_num_cpu_devices', 8)

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import PjitPartitioner

WARM_UP = 20


def read(state: dict[str, jax.Array]) -> jax.Array:
    return state['w0'][0, 0]


def update(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: w + 1 for name, w in state.items()}


def compare(leaves: int, donate: bool, rounds: int) -> list[float]:
    """Returns the median seconds of a call: partitioned, both raw functions, and each of them."""
    partitioner = PjitPartitioner(num_partitions=2)
    spec = P('data', 'model')
    fn, out_spec = (update, spec) if donate else (read, P())
    donated = (0,) if donate else ()
    sharding, out_sharding = (NamedSharding(partitioner.mesh, s) for s in (spec, out_spec))
    raw = functools.partial(
        jax.jit, fn, in_shardings=(sharding,), out_shardings=out_sharding, donate_argnums=donated
    )
    fns = [partitioner.partition(fn, (spec,), out_spec, (), donated), raw(), raw()]
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
    partitioned, one, other = (t[WARM_UP:] for t in times)
    return [statistics.median(t) for t in (partitioned, one + other, one, other)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rounds', type=int, default=4000)
    rounds = parser.parse_args().rounds
    gc.disable()
    print(
        f'jax {jax.__version__}, {jax.device_count()} devices, medians of {rounds:,} calls with 10 '
        f'leaves and {rounds // 3:,} calls with 500 leaves'
    )
    print(f'{"leaves":>6}  {"step":<9}  {"partitioned":>12}  {"jax.jit":>10}  ratio  noise')
    for leaves in (10, 500):
        for donate in (False, True):
            ours, raw, one, other = compare(leaves, donate, rounds if leaves == 10 else rounds // 3)
            step = 'donated' if donate else 'read-only'
            print(
                f'{leaves:>6}  {step:<9}  {ours * 1e6:>9.1f} us  {raw * 1e6:>7.1f} us  '
                f'{ours / raw:.3f}  {other / one:.3f}'
            )


if __name__ == '__main__':
    main()
