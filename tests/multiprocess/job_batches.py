"""Reports which rows of real global batches the devices of a process hold, by hash."""

import hashlib
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np

from partitioning import PjitPartitioner
from train.data import CausalLM, Feed, LocalBatches, Mixture, SpanCorruption
from train.data.text.sources import Records

BATCH, LENGTH, SEED = 16, 32, 11
MODEL_SIZES = (1, 4)  # meshes of 8 devices: 8x1 and 2x4
# (first step, number of steps): a new run, a resumed run, and a run that is very far.
RUNS = ((0, 3), (2, 1), (100_000, 1))


def run(folder):
    """Reports, for each batch, the rows that this process holds and the sum over all processes."""
    # A sum of integers does not depend on its order.
    total = jax.jit(lambda batch: jax.tree.reduce(jnp.add, jax.tree.map(_weighted_sum, batch)))
    report = []
    for name, task in tasks(folder).items():
        rows = task.open(LENGTH).training(SEED)
        for size in MODEL_SIZES:
            partitioner = PjitPartitioner(num_partitions=size)
            assert partitioner.mesh.devices.shape == (8 // size, size)
            mine = partitioner.get_data_layout(BATCH).row_indices
            for first, steps in RUNS:
                local = LocalBatches(rows, BATCH, mine)
                with closing(Feed(local, partitioner, first_step=first)) as feed:
                    for step in range(first, first + steps):
                        batch = next(feed)
                        key = f'{name} {size} {first} {step}'
                        report.append([key, _held_rows(batch), int(total(batch))])
    return report


def tasks(folder):
    """Returns tasks whose token indices the processes share. The first to need one builds it."""

    def source(name):
        rng = np.random.default_rng(list(name.encode()))
        texts = [name.encode() + rng.bytes(int(n)) for n in rng.integers(0, 90, 400)]
        records = Records(records=texts, holdout_percent=10, cache_key=name)
        return {'source': records, 'cache_dir': str(folder)}

    packed = [CausalLM(**source(name), packing='pack') for name in ('one', 'two')]
    return {
        'mixture': Mixture(tasks=packed, weights=[5, 2]),
        'spans': SpanCorruption(**source('three')),
    }


def hash_row(row):
    """Returns a hash of the arrays of one row, with their names and dtypes."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(row):
        digest.update(f'{name} {row[name].dtype} {row[name].shape} '.encode() + row[name].tobytes())
    return digest.hexdigest()


def _held_rows(batch):
    """Returns the global number and hash of every row that the devices of this process hold."""
    copies = {}
    for name, array in batch.items():
        assert array.shape[0] == BATCH
        for shard in array.addressable_shards:
            data, [first, *_] = np.asarray(shard.data), shard.index
            for i, number in enumerate(range(*first.indices(BATCH))):
                copies.setdefault((number, shard.device.id), {})[name] = data[i]
    return sorted([number, hash_row(row)] for (number, _), row in copies.items())


def _weighted_sum(array):
    """Returns an integer that changes if rows or elements are reordered."""
    places = jnp.arange(array.size, dtype=jnp.int32).reshape(array.shape)
    return jnp.sum(array.astype(jnp.int32) * (places % 127 + 1))
