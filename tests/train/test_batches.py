"""Batches: row r of step n depends only on the task, the seed, n and r, on every mesh."""

import functools
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mock_devices import mesh_of_processes

from partitioning.layout import data_layout
from train.data import CausalLM, FiniteBatches, LocalBatches, Mixture, SpanCorruption
from train.data.text.sources import Records

pytestmark = pytest.mark.smoke

LENGTH = 12
TASKS = ('split', 'pack', 'spans', 'mixture')


def documents(name, count=700):
    """Texts of 0 to 40 bytes, different for each name."""
    rng = np.random.default_rng(list(name.encode()))
    return [name.encode() + rng.bytes(int(n)) for n in rng.integers(0, 40, count)]


@pytest.fixture(scope='module')
def opened(tmp_path_factory):
    """Returns a function that opens a task again, without state from earlier reads."""
    cache = str(tmp_path_factory.mktemp('tokens'))

    def source(name):
        # The key keeps the token index for later openings.
        records = Records(records=documents(name), holdout_percent=0, cache_key=name)
        return {'source': records, 'cache_dir': cache}

    def open_task(name):
        parts = [CausalLM(**source(name), packing='pack') for name in ('b', 'c', 'd')]
        task = {
            'split': CausalLM(**source('a')),
            'pack': parts[0],
            'spans': SpanCorruption(**source('e')),
            'mixture': Mixture(
                tasks=[parts[0], Mixture(tasks=parts[1:], weights=[3, 1])], weights=[2, 5]
            ),
        }[name]
        return task.open(LENGTH)

    return open_task


@functools.lru_cache(4096)
def random_mesh(number):
    """A random mesh, batch axes and number of shards, with processes at random places."""
    chance = random.Random(number)
    names = ('data', 'fsdp', 'model')[: chance.randint(1, 3)]
    shape = [chance.choice([1, 2, 2, 3, 4, 8]) for _ in names]
    while np.prod(shape) > 16:
        shape[shape.index(max(shape))] //= 2
    size = int(np.prod(shape))
    owners = [i % chance.randint(1, size) for i in range(size)]
    arrange = chance.choice([sorted, lambda a: chance.sample(a, size), lambda a: a])
    mesh = mesh_of_processes(np.array(arrange(owners)).reshape(shape), names)
    axes = tuple(chance.sample(names, chance.randint(0, len(names))))
    num_shards = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
    return mesh, axes, num_shards, sorted(set(owners))


def joined(rows, batch_size, step, mesh, axes, processes):
    """The rows that all processes read, as bytes, by their number in the global batch."""
    batch = {}
    for process in processes:
        indices = data_layout(mesh, axes, batch_size, process).row_indices
        local = LocalBatches(rows, batch_size, indices)[step]
        for i, r in enumerate(indices):
            row = {name: array[i].tobytes() for name, array in local.items()}
            assert batch.setdefault(r, row) == row, (
                'processes that read the same row see the same values'
            )
    return batch


@pytest.fixture(scope='module')
def readers(opened):
    """Opens the rows of each task and seed twice: for the processes, and for the comparison."""
    return {
        (name, seed): tuple(opened(name).training(seed) for _ in range(2))
        for name in TASKS
        for seed in (0, 12345)
    }


@given(
    task=st.sampled_from(TASKS),
    seed=st.sampled_from([0, 12345]),
    number=st.integers(0, 4095),
    rows_each=st.integers(1, 3),
    step=st.integers(0, 1000) | st.integers(0, 10**9),
)
@settings(max_examples=250, database=None)
def test_a_batch_is_the_same_on_any_mesh(readers, task, seed, number, rows_each, step):
    mesh, axes, num_shards, processes = random_mesh(number)
    batch_size = num_shards * rows_each
    rows, alone = readers[task, seed]
    batch = joined(rows, batch_size, step, mesh, axes, processes)
    assert sorted(batch) == list(range(batch_size))
    whole = LocalBatches(alone, batch_size, range(batch_size))[step]
    for name, array in whole.items():
        assert array.shape[0] == batch_size
        assert b''.join(batch[r][name] for r in range(batch_size)) == array.tobytes(), name


@pytest.mark.parametrize('task', TASKS)
def test_a_row_depends_only_on_its_number(opened, task):
    """It does not depend on the batch size or on earlier reads."""
    rows = opened(task).training(7)
    batches = LocalBatches(rows, 6, range(6))
    read = {step: batches[step] for step in (5, 0, 1000, 5, 3)}
    for step, batch in read.items():
        fresh = opened(task).training(7)
        for r in range(6):
            for name, array in fresh[step * 6 + r].items():
                np.testing.assert_array_equal(batch[name][r], array)
                assert batch[name].dtype == array.dtype
    small, large = LocalBatches(rows, 4, range(4)), LocalBatches(rows, 8, range(8))
    for name, array in large[11].items():
        np.testing.assert_array_equal(array, np.concatenate([small[22][name], small[23][name]]))


@pytest.mark.parametrize('task', TASKS)
def test_another_seed_gives_other_batches(opened, task):
    one, two = (LocalBatches(opened(task).training(seed), 8, range(8))[0] for seed in (0, 1))
    assert one['decoder_target_tokens'].tolist() != two['decoder_target_tokens'].tolist()


def test_a_process_reads_only_its_own_rows():

    class Watched:
        def __init__(self):
            self.read = []

        def __getitem__(self, index):
            self.read.append(index)
            return {'x': np.array([index])}

    rows = Watched()
    batch = LocalBatches(rows, 10, (1, 4, 5))[7]
    assert rows.read == [71, 74, 75]
    assert batch['x'].tolist() == [[71], [74], [75]]


# Finite sets.


def numbers(count):
    return [
        {'tokens': np.full(3, i + 1, np.int32), 'decoder_loss_weights': np.ones(3, np.float32)}
        for i in range(count)
    ]


@given(st.integers(0, 4095), st.integers(1, 30), st.integers(1, 3))
@settings(max_examples=200)
def test_each_row_of_a_finite_set_has_weight_once_on_any_mesh(number, count, rows_each):
    mesh, axes, num_shards, processes = random_mesh(number)
    batch_size = num_shards * rows_each
    rows = numbers(count)
    steps = -(-count // batch_size)
    seen = {}
    for process in processes:
        indices = data_layout(mesh, axes, batch_size, process).row_indices
        batches = FiniteBatches(rows, batch_size, indices)
        assert len(batches) == steps
        for step in range(steps):
            local = batches[step]
            assert local['tokens'].shape == (len(indices), 3)
            for i, r in enumerate(indices):
                row = tuple(local['tokens'][i]), tuple(local['decoder_loss_weights'][i])
                assert seen.setdefault(step * batch_size + r, row) == row
    assert sorted(seen) == list(range(steps * batch_size))
    for i, (tokens, weights) in seen.items():
        inside = i < count
        assert weights == (1.0 if inside else 0.0,) * 3
        assert tokens == (i + 1 if inside else 0,) * 3


def test_numpy_integers_are_valid_steps_and_rows():
    """They are valid even at large steps, where intermediate results exceed 64 bits."""
    source = Records(records=['abc ' * 50, 'xyz ' * 50], holdout_percent=0)
    tasks = [CausalLM(source=source), CausalLM(source=source)]
    rows = Mixture(tasks=tasks, weights=[2, 1]).open(8).training(0)
    step = 2**40
    expected = LocalBatches(rows, 8, range(8))[step]
    found = LocalBatches(rows, 8, np.arange(8))[np.int64(step)]
    np.testing.assert_equal(found, expected)
    for index in range(2**44, 2**44 + 20):
        np.testing.assert_equal(rows[np.int64(index)], rows[index])


@pytest.mark.parametrize('row_indices', [[], [0, 8], [-1, 0]])
def test_row_indices_outside_the_batch_are_an_error(row_indices):
    rows = [{'x': np.zeros(2)}] * 9
    for kind in (LocalBatches, FiniteBatches):
        with pytest.raises(ValueError, match=r'row_indices .* 0 and 7'):
            kind(rows, 8, row_indices)


@pytest.mark.parametrize('batch_size', [0, -8, 16.0, True])
def test_invalid_batch_sizes_are_an_error(batch_size):
    for kind in (LocalBatches, FiniteBatches):
        with pytest.raises(ValueError, match='batch_size is'):
            kind([{'x': np.zeros(2)}], batch_size, [0])


def test_steps_outside_a_finite_set_are_an_error():
    batches = FiniteBatches([{'x': np.zeros(2)}] * 9, 8, range(8))
    assert len(list(batches)) == 2
    for step in (-1, 2):
        with pytest.raises(IndexError):
            batches[step]
