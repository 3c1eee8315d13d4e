"""Rows from memory: each once per epoch, compared when a run resumes, and refused if malformed."""

import json

import numpy as np
import pytest
from etils import epath

from train.data import Examples, FiniteBatches, LocalBatches
from train.data.record import check_same_as_before, data_record, write_record
from train.errors import ConfigError

pytestmark = pytest.mark.core

ARRAYS = {'x': np.arange(21.0).reshape(7, 3), 'y': np.arange(7)}


class Squares:
    """Examples that are computed when they are read, as Python numbers."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return {'x': index, 'square': float(index**2)}


@pytest.mark.parametrize('count', [1, 7, 1500])
def test_each_epoch_has_every_example_once_in_another_order(count):
    opened = Examples(training=Squares(count)).open()
    assert opened.rows_per_epoch == count
    rows = opened.training(seed=3)
    epochs = [[rows[e * count + i] for i in range(count)] for e in range(2)]
    orders = [[int(row['x']) for row in epoch] for epoch in epochs]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count == 1 or orders[0] != orders[1] != list(range(count))
    assert all(row['square'] == row['x'] ** 2 for row in epochs[0])
    again, other = opened.training(seed=3), opened.training(seed=4)
    assert [again[i]['x'] for i in range(count)] == orders[0]
    assert count == 1 or [other[i]['x'] for i in range(count)] != orders[0]


def test_batches_of_arrays_have_their_shapes_and_dtypes():
    opened = Examples(training=ARRAYS, held_out={n: a[:3] for n, a in ARRAYS.items()}).open()
    batch = LocalBatches(opened.training(0), 4, [1, 3])[5]
    assert {n: (a.shape, a.dtype.name) for n, a in batch.items()} == {
        'x': ((2, 3), 'float32'),
        'y': ((2,), 'int32'),
    }
    assert (batch['x'][:, 0] == 3 * batch['y']).all()
    held_out = opened.evaluation()
    [last] = FiniteBatches(held_out.rows, 4, range(4))
    assert last['y'].tolist() == [0, 1, 2, 0] and last['row_weights'].tolist() == [1, 1, 1, 0]
    assert (held_out.num_documents, held_out.num_bytes, held_out.text) == (3, None, b'')
    assert len(opened.evaluation(limit=2).rows) == 2


def test_examples_are_read_only_when_they_are_needed():
    squares = Squares(10**9)
    opened = Examples(training=squares, held_out=Squares(10)).open()
    opened.record()
    opened.training(0)[12]
    assert len(squares.read) < 10


@pytest.mark.parametrize(
    'changes',
    [
        {'training': ARRAYS | {'y': np.arange(7)[::-1]}},
        {'training': ARRAYS | {'y': np.arange(7, dtype=np.int32)}},
        {'training': {'x': ARRAYS['x'], 'z': ARRAYS['y']}},
        {'training': {name: values[:6] for name, values in ARRAYS.items()}},
        {'version': 'two'},
    ],
    ids=['values', 'dtype', 'names', 'number', 'version'],
)
def test_a_run_resumes_only_with_the_same_examples(tmp_path, changes):
    def record(**changes):
        task = Examples(**{'training': ARRAYS, 'name': 'mine', 'version': 'one'} | changes)
        return json.loads(json.dumps(data_record(task.open(), {}, seed=0)))

    folder = epath.Path(tmp_path)
    write_record(folder, record())
    reordered = {name: ARRAYS[name].copy() for name in ('y', 'x')}
    assert check_same_as_before(folder, record(training=reordered, name='other'), 5) == []
    with pytest.raises(ConfigError, match=r'the data has changed .* mine with 7 training') as error:
        check_same_as_before(folder, record(**changes), 5)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'task, message',
    [
        ({'training': 5}, r'Examples\.training is of type int: .*__len__'),
        ({'training': [[1, 2]]}, r'training\[0\] is of type list: .*a dict of arrays'),
        ({'training': []}, r'Examples\.training has 0 examples'),
        ({'training': {'x': np.zeros((0, 2))}}, 'has 0 examples'),
        ({'training': {'x': [1, 2], 'y': [1]}}, r"\{'x': 2, 'y': 1\}: .*same number"),
        ({'training': {'x': 3}}, r"\{'x': None\}"),
        ({'training': {'x': ['a', 'b']}}, "array 'x' of an example has the dtype <U1"),
        ({'training': ARRAYS, 'held_out': {'x': 3}}, r'Examples\.held_out'),
    ],
)
def test_malformed_examples(task, message):
    with pytest.raises(ConfigError, match=message) as error:
        _ = Examples(**task).open().training(0)[0]
    assert '\n' not in str(error.value)


def test_held_out_examples_have_the_arrays_of_the_training():
    opened = Examples(training=ARRAYS, held_out={'x': np.zeros((2, 4)), 'y': np.arange(2)}).open()
    with pytest.raises(ConfigError, match=r'held-out examples have .*\(4,\).*\(3,\)'):
        opened.evaluation()
    with pytest.raises(ConfigError, match='seed is -1'):
        opened.training(-1)
