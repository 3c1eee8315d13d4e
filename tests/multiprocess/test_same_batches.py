"""The same global batches, byte for byte, for 1, 2, 4 and 8 real processes, from any step on."""

import functools
import hashlib
import sys
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import say, what_they_say

from partitioning import PjitPartitioner
from train.data import CausalLM, Feed, LocalBatches, Mixture, SpanCorruption
from train.data.text.sources import Records

BATCH, LENGTH, SEED = 16, 32, 11
MODEL_WAYS = (1, 2, 4)  # meshes of 8 devices: 8x1, 4x2, 2x4
# (first step, steps): the run from its beginning, and others that take it up.
RUNS = ((0, 6), (1, 1), (3, 2), (5, 1), (100_000, 1))
COUNTS = (1, 2, 4, 8)

# Each process is this file once more.
PROGRAM = 'import test_same_batches; test_same_batches.main()'


def tasks(cache):
    """Tasks whose token indices the processes share: the first that comes builds them."""

    def source(name):
        rng = np.random.default_rng(list(name.encode()))
        texts = [name.encode() + rng.bytes(int(n)) for n in rng.integers(0, 90, 800)]
        records = Records(records=texts, holdout_percent=10, cache_key=name)
        return {'source': records, 'cache_dir': cache}

    packed = [CausalLM(**source(name), packing='pack') for name in ('one', 'two')]
    return {
        'mixture': Mixture(tasks=packed, weights=[5, 2]),
        'spans': SpanCorruption(**source('three')),
    }


def hashed(row):
    """A hash of the arrays of one row, their names and types."""
    whole = hashlib.blake2b(digest_size=8)
    for name in sorted(row):
        whole.update(f'{name} {row[name].dtype} {row[name].shape} '.encode() + row[name].tobytes())
    return whole.hexdigest()


def held(batch):
    """Global number and hash of every row that this process's devices hold, copy by copy."""
    copies = {}
    for name, array in batch.items():
        assert array.shape[0] == BATCH
        for shard in array.addressable_shards:
            data, [first, *_] = np.asarray(shard.data), shard.index
            for i, number in enumerate(range(*first.indices(BATCH))):
                copies.setdefault((number, shard.device.id), {})[name] = data[i]
    return sorted([number, hashed(row)] for (number, _), row in copies.items())


def main():
    """What a process does: all runs on all meshes, and prints what it held."""
    _, port, count, index, cache = sys.argv
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', 8 // int(count))
    if int(count) > 1:
        jax.config.update('jax_cpu_collectives_implementation', 'gloo')
        jax.distributed.initialize(f'127.0.0.1:{port}', int(count), int(index))

    # Whole numbers: a sum of them is the same in any order.
    total = jax.jit(lambda batch: jax.tree.reduce(jnp.add, jax.tree.map(summed, batch)))
    said = []
    for name, task in tasks(cache).items():
        rows = task.open(LENGTH).training(SEED)
        for ways in MODEL_WAYS:
            partitioner = PjitPartitioner(num_partitions=ways)
            assert partitioner.mesh.devices.shape == (8 // ways, ways)
            mine = partitioner.get_data_layout(BATCH).row_indices
            for first, steps in RUNS:
                local = LocalBatches(rows, BATCH, mine)
                with closing(Feed(local, partitioner, first_step=first)) as feed:
                    for step in range(first, first + steps):
                        batch = next(feed)
                        key = f'{name} {ways} {first} {step}'
                        said.append([key, held(batch), int(total(batch))])
    say({'rows': said})


def summed(array):
    """A whole number of an array in which every row and place counts otherwise."""
    places = jnp.arange(array.size, dtype=jnp.int32).reshape(array.shape)
    return jnp.sum(array.astype(jnp.int32) * (places % 127 + 1))


def start(count, cache):
    said = what_they_say(PROGRAM, count, cache)
    return [one['rows'] for one in said]


@pytest.fixture(scope='module')
def what_they_said(tmp_path_factory):
    """What the processes of a count print, started once for all tests."""

    @functools.cache
    def of(count):
        return start(count, str(tmp_path_factory.mktemp(f'tokens{count}')))

    return of


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
    """Hash of each row of each batch, read here, one by one, without a mesh or a feed."""
    cache = str(tmp_path_factory.mktemp('tokens'))
    rows = {name: task.open(LENGTH).training(SEED) for name, task in tasks(cache).items()}

    @functools.cache
    def of(name, step):
        return [hashed(rows[name][step * BATCH + r]) for r in range(BATCH)]

    return of


@pytest.mark.parametrize('count', COUNTS)
def test_every_row_is_the_same_byte_for_byte(what_they_said, expected, count):
    said = what_they_said(count)
    keys = [key for key, *_ in said[0]]
    assert len(keys) == len(set(keys)) == 2 * len(MODEL_WAYS) * sum(steps for _, steps in RUNS)
    for batches in zip(*said, strict=True):
        [key] = {key for key, *_ in batches}
        name, ways, _, step = key.split()
        copies = [tuple(row) for _, rows, _ in batches for row in rows]
        # Every row is on as many devices as its part of the mesh has, the same on each of them.
        assert len(copies) == BATCH * int(ways), key
        assert len(set(copies)) == BATCH, key
        assert [row for _, row in sorted(set(copies))] == expected(name, int(step)), key


@pytest.mark.parametrize('count', COUNTS)
def test_a_sum_over_the_global_batch_is_that_of_one_process(what_they_said, count):
    [alone] = what_they_said(1)
    sums = {key: total for key, _, total in alone}
    assert len(set(sums.values())) > len(sums) / 8, 'sums tell batches apart'
    for one in what_they_said(count):
        assert {key: total for key, _, total in one} == sums


def test_the_batches_differ_from_step_to_step(expected):
    """Else their being the same would say nothing."""
    steps = {step for first, count in RUNS for step in range(first, first + count)}
    for name in ('mixture', 'spans'):
        rows = {row for step in steps for row in expected(name, step)}
        # Far away it is another epoch, which may show a row once more.
        assert len(rows) > 0.9 * BATCH * len(steps)
