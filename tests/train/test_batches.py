"""Batches: row r of step n is a function of the task, the seed, n and r, on whatever mesh."""

import functools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_devices import mesh_of_processes

from partitioning.layout import data_layout
from train.data import CausalLM, FiniteBatches, LocalBatches, Mixture, SpanCorruption
from train.data.text.sources import Records

LENGTH = 12
TASKS = ('split', 'pack', 'spans', 'mixture')


def documents(name, count=700):
    """Texts of 0 to 40 bytes, no two parts' alike."""
    rng = np.random.default_rng(list(name.encode()))
    return [name.encode() + rng.bytes(int(n)) for n in rng.integers(0, 40, count)]


@pytest.fixture(scope='module')
def opened(tmp_path_factory):
    """A task opened anew, with nothing left of what others have read."""
    cache = str(tmp_path_factory.mktemp('tokens'))

    def source(name):
        # The key keeps the tokens for all openings.
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
def mesh_and_ways(number):
    """A mesh of any shape with any process at any place, and batch axes in any order of it."""
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
    ways = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
    return mesh, axes, ways, sorted(set(owners))


def joined(rows, batch_size, step, mesh, axes, processes):
    """The global batch of what each process reads, by the numbers of the rows; as bytes."""
    batch = {}
    for process in processes:
        indices = data_layout(mesh, axes, batch_size, process).row_indices
        local = LocalBatches(rows, batch_size, indices)[step]
        for i, r in enumerate(indices):
            row = {name: array[i].tobytes() for name, array in local.items()}
            assert batch.setdefault(r, row) == row, 'processes that read one row see the same'
    return batch


@pytest.fixture(scope='module')
def readers(opened):
    """For each task and seed the rows, opened once for the processes and once to compare with."""
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
@settings(deadline=None, max_examples=10_000, database=None)
def test_a_batch_is_the_same_on_any_mesh(readers, task, seed, number, rows_each, step):
    mesh, axes, ways, processes = mesh_and_ways(number)
    batch_size = ways * rows_each
    rows, alone = readers[task, seed]
    batch = joined(rows, batch_size, step, mesh, axes, processes)
    assert sorted(batch) == list(range(batch_size))
    whole = LocalBatches(alone, batch_size, range(batch_size))[step]
    for name, array in whole.items():
        assert array.shape[0] == batch_size
        assert b''.join(batch[r][name] for r in range(batch_size)) == array.tobytes(), name


def test_the_meshes_are_of_every_kind():
    """Else the test above says little: several processes, rows with gaps, rows of several."""
    gaps = shared = uneven = 0
    for number in range(300):
        mesh, axes, ways, processes = mesh_and_ways(number)
        layouts = [data_layout(mesh, axes, ways, process) for process in processes]
        indices = [layout.row_indices for layout in layouts]
        gaps += any(rows[-1] - rows[0] >= len(rows) for rows in indices)
        shared += len(processes) > 1 and sum(map(len, indices)) > ways
        uneven += not all(layout.is_even for layout in layouts)
    assert min(gaps, shared, uneven) > 20, (gaps, shared, uneven)


@pytest.mark.parametrize('task', TASKS)
def test_rows_are_read_by_number_and_nothing_else(opened, task):
    """Not by the batch size, nor by what has been read before; row r of step n is a plain row."""
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


def test_a_process_reads_its_rows_alone():
    """Others' rows are not even looked at: reading costs what a process holds."""

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
@settings(deadline=None, max_examples=300)
def test_a_finite_set_is_weighed_once_on_any_mesh(number, count, rows_each):
    mesh, axes, ways, processes = mesh_and_ways(number)
    batch_size = ways * rows_each
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


@pytest.mark.parametrize('packing', ['split', 'pack'])
@pytest.mark.parametrize('batch_size', [1, 4, 7, 64])
def test_evaluation_batches_weigh_every_target_once(tmp_path, packing, batch_size):
    texts = documents('f', 60)
    source = Records(records=texts, holdout_percent=100)
    task = CausalLM(source=source, cache_dir=str(tmp_path), packing=packing)
    held_out = task.open(LENGTH).evaluation()
    batches = FiniteBatches(held_out.rows, batch_size, range(batch_size))
    targets = []
    for step in range(len(batches)):
        weights = batches[step]['decoder_loss_weights']
        assert weights.shape == (batch_size, LENGTH)
        targets += batches[step]['decoder_target_tokens'][weights == 1].tolist()
        assert set(weights.ravel().tolist()) <= {0.0, 1.0}
    expected = [token for text in texts for token in [*text, 256]]
    assert sorted(targets) == sorted(expected)
    if packing == 'split':
        assert targets == expected


def test_numbers_of_numpy_are_numbers():
    """Far out, too, where 64 bits are not enough for what is made of them."""
    source = Records(records=['abc ' * 50, 'xyz ' * 50], holdout_percent=0)
    tasks = [CausalLM(source=source), CausalLM(source=source)]
    rows = Mixture(tasks=tasks, weights=[2, 1]).open(8).training(0)
    step = 2**40
    expected = LocalBatches(rows, 8, range(8))[step]
    found = LocalBatches(rows, 8, np.arange(8))[np.int64(step)]
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize('row_indices', [[], [0, 8], [-1, 0]])
def test_rows_that_a_batch_does_not_have(row_indices):
    rows = [{'x': np.zeros(2)}] * 9
    for kind in (LocalBatches, FiniteBatches):
        with pytest.raises(ValueError, match='row_indices must be of 0 to 7'):
            kind(rows, 8, row_indices)


@pytest.mark.parametrize('batch_size', [0, -8, 16.0, True])
def test_batch_sizes_that_are_no_counts(batch_size):
    for kind in (LocalBatches, FiniteBatches):
        with pytest.raises(ValueError, match='batch_size is'):
            kind([{'x': np.zeros(2)}], batch_size, [0])


def test_there_is_no_batch_behind_the_last():
    batches = FiniteBatches([{'x': np.zeros(2)}] * 9, 8, range(8))
    assert len(list(batches)) == 2
    for step in (-1, 2):
        with pytest.raises(IndexError):
            batches[step]
