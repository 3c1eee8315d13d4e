"""Metrics: lines of JSON, TensorBoard events and Weights & Biases, through one interface."""

import functools
import json
import math
import struct
import sys
import types

import jax
import pytest
from etils import epath
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from train.errors import ConfigError
from train.reporting.writers import (
    JsonWriter,
    TensorBoardWriter,
    WeightsAndBiasesWriter,
    Writers,
    open_writers,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]


def write(directory, resumed_step, *records, writers=(JsonWriter,)):
    opened = open_writers(writers, epath.Path(directory), resumed_step)
    for step, scalars in records:
        opened.write(step, scalars)
    opened.close()
    return opened


def read(directory):
    def refuse(token):
        raise AssertionError(f'{token} is not JSON')

    lines = (directory / 'metrics.jsonl').read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_record_is_on_disk_immediately(tmp_path):
    writer = JsonWriter(epath.Path(tmp_path), 0)
    writer.write(1, {'train/loss': 1.0})
    assert read(tmp_path) == [{'step': 1, 'train/loss': 1.0}]
    writer.close()


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_become_null(tmp_path, value):
    write(tmp_path, 0, (1, {'train/loss': value, 'train/accuracy': 0.5}))
    assert read(tmp_path) == [{'step': 1, 'train/loss': None, 'train/accuracy': 0.5}]


def test_records_after_the_resumed_step_are_dropped(tmp_path):
    write(tmp_path, 0, *((step, {'loss': float(step)}) for step in range(1, 8)))
    assert write(tmp_path, 4, (5, {'loss': 50.0})).num_dropped == 3
    losses = {r['step']: r['loss'] for r in read(tmp_path)}
    assert losses == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 50.0}


def test_every_record_of_the_resumed_step_is_kept(tmp_path):
    write(tmp_path, 0, (2, {'train/loss': 1.0}), (2, {'eval/loss': 2.0}), (3, {'train/loss': 0.5}))
    write(tmp_path, 2)
    assert read(tmp_path) == [{'step': 2, 'train/loss': 1.0}, {'step': 2, 'eval/loss': 2.0}]


@pytest.mark.parametrize(
    'half',
    [
        b'{"step": 3, "lo',
        b'{"step": 3}',
        b'{"step": 1, "loss": 1.0}',
        b'{"step": 1, "\xff": 1.0}\n',
        b'%s\n' % (b'[' * 9000),
    ],
    ids=range(5),
)
def test_an_incomplete_or_damaged_last_line_is_dropped(tmp_path, half):
    write(tmp_path, 0, (1, {'loss': 4.0}))
    with (tmp_path / 'metrics.jsonl').open('ab') as file:
        file.write(half)
    write(tmp_path, 3, (4, {'loss': 2.0}))
    assert read(tmp_path) == [{'step': 1, 'loss': 4.0}, {'step': 4, 'loss': 2.0}]


def test_the_file_is_not_rewritten_if_nothing_is_dropped(tmp_path):
    write(tmp_path, 0, (1, {'loss': 4.0}))
    before = (tmp_path / 'metrics.jsonl').stat().st_ino
    write(tmp_path, 1)
    assert (tmp_path / 'metrics.jsonl').stat().st_ino == before
    assert not (tmp_path / 'metrics.jsonl.unfinished').exists()


def test_tensorboard_gets_the_same_scalars(tmp_path):
    opened = write(tmp_path, 0, (1, {'train/loss': 2.5}), writers=(JsonWriter, TensorBoardWriter))
    assert {name: str(path) for name, path in opened.paths.items()} == {
        'JsonWriter': str(tmp_path / 'metrics.jsonl'),
        'TensorBoardWriter': str(tmp_path / 'tensorboard'),
    }
    (file,) = (tmp_path / 'tensorboard').iterdir()
    assert b'train/loss' in file.read_bytes()


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    opened = write(tmp_path, 0, (1, {'loss': 2.5}), writers=(JsonWriter, TensorBoardWriter))
    assert (opened.paths, opened.num_dropped, list(tmp_path.iterdir())) == ({}, 0, [])


def test_every_writer_is_closed_even_if_one_fails():
    closed = []

    class Failing:
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)
            raise OSError(f'{self.name}: disk full')

    with pytest.raises(OSError, match='the metrics of Failing cannot be completed: a: disk full'):
        Writers([Failing('a'), Failing('b')]).close()
    assert sorted(closed) == ['a', 'b']


# Weights & Biases, by a module with the functions of the package.


@pytest.fixture
def wandb(monkeypatch):
    """A module that records the calls of `init`, `log` and `finish`."""
    calls, ids = [], iter(['first', 'second'])

    def init(id=None, **settings):
        run = types.SimpleNamespace(id=id or next(ids))
        calls.append(('init', run.id, settings))
        run.log = lambda scalars, step: calls.append((run.id, step, scalars))
        run.finish = lambda: calls.append((run.id, 'finish'))
        return run

    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
    return calls


def test_weights_and_biases_continues_the_run_that_resumes(tmp_path, wandb):
    writers = (functools.partial(WeightsAndBiasesWriter, project='mine'),)
    write(tmp_path, 0, (1, {'loss': 2.5}), writers=writers)
    write(tmp_path, 1, (2, {'loss': 2.25}), writers=writers)
    settings = {'resume': 'allow', 'dir': str(tmp_path), 'project': 'mine'}
    assert wandb == [
        ('init', 'first', settings),
        ('first', 1, {'loss': 2.5}),
        ('first', 'finish'),
        ('init', 'first', settings),
        ('first', 2, {'loss': 2.25}),
        ('first', 'finish'),
    ]
    wandb.clear()
    write(tmp_path, 0, writers=writers)
    assert wandb[0][1] == 'second', 'a run that starts again is a new run'


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises(ConfigError, match=r"package wandb: pip install 'meshwright\[wandb\]'"):
        WeightsAndBiasesWriter(epath.Path(tmp_path), 0)


# Files that cannot be written.


def test_a_record_that_does_not_fit_leaves_nothing_and_is_written_later(tmp_path, limit_files):
    said = []
    kinds = (JsonWriter, TensorBoardWriter)
    opened = open_writers(kinds, epath.Path(tmp_path), 0, 'continue', said.append)
    opened.write(1, {'loss': 4.0})
    [events] = (tmp_path / 'tensorboard').iterdir()
    sizes = {path: path.stat().st_size for path in (tmp_path / 'metrics.jsonl', events)}
    limit_files(min(sizes.values()) + 5)
    for step in (2, 3):
        opened.write(step, {'loss': 3.0})
    assert read(tmp_path) == [{'step': 1, 'loss': 4.0}]
    limit_files()
    opened.write(4, {'loss': 2.0})
    opened.close()
    assert [record['step'] for record in read(tmp_path)] == [1, 2, 3, 4]
    assert steps_of_events(events) == [1, 2, 3, 4]
    assert said == [
        f'the metrics of {kind.__name__} cannot be written: File too large: {path}; the run '
        'continues without them'
        for kind, path in zip(kinds, sizes, strict=True)
    ] + [f'the metrics of {kind.__name__} can be written again' for kind in kinds]


def steps_of_events(path):
    """The steps of the scalars in an event file, read by its format."""
    data, steps = path.read_bytes(), []
    while data:
        (length,) = struct.unpack('<Q', data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        checked = masked_crc32c(data[:8]), masked_crc32c(data[12 : 12 + length])
        stored = struct.unpack('<I', data[8:12]) + struct.unpack('<I', data[12 + length :][:4])
        assert checked == stored
        steps += [event.step for _ in event.summary.value]
        data = data[16 + length :]
    return steps


def test_events_after_the_resumed_step_are_hidden(tmp_path):
    write(tmp_path, 4, (5, {'loss': 4.0, 'lr': 0.1}), writers=(TensorBoardWriter,))
    [path] = (tmp_path / 'tensorboard').iterdir()
    assert steps_of_events(path) == [5, 5]
    start = event_pb2.Event(
        step=5, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    )
    start.wall_time = int(path.name.split('.')[3])
    assert start.SerializeToString() in path.read_bytes()


def test_a_policy_stops_the_run_and_one_broken_writer_does_not_stop_the_others(tmp_path):
    class Broken:
        def __init__(self, directory, step): ...

        def write(self, step, scalars):
            raise RuntimeError('the thread has died')

        def close(self): ...

    opened = open_writers((Broken, JsonWriter), epath.Path(tmp_path), 0, 'stop')
    with pytest.raises(OSError, match='metrics of Broken cannot be written: the thread has died'):
        opened.write(1, {'loss': 4.0})
    assert read(tmp_path) == [{'step': 1, 'loss': 4.0}]
