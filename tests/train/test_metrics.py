"""Metrics in files: one JSON object per line, and TensorBoard events."""

import json
import math

import pytest

from train.metrics import MetricWriter

pytestmark = [pytest.mark.core, pytest.mark.smoke]


def write(model_dir, resumed_step, *records):
    writer = MetricWriter(model_dir, resumed_step)
    for step, scalars in records:
        writer.write(step, scalars)
    writer.close()
    return writer


def read(model_dir):
    def refuse(token):
        raise AssertionError(f'{token} is not JSON')

    lines = (model_dir / 'metrics.jsonl').read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_each_record_is_a_line_of_json_with_its_step(tmp_path):
    write(tmp_path, 0, (1, {'train/loss': 2.5}), (2, {'train/loss': 2.25, 'eval/loss': 3.0}))
    assert read(tmp_path) == [
        {'step': 1, 'train/loss': 2.5},
        {'step': 2, 'train/loss': 2.25, 'eval/loss': 3.0},
    ]


def test_a_record_is_on_disk_immediately(tmp_path):
    writer = MetricWriter(tmp_path, 0)
    writer.write(1, {'train/loss': 1.0})
    assert read(tmp_path) == [{'step': 1, 'train/loss': 1.0}]
    writer.close()


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_become_null(tmp_path, value):
    write(tmp_path, 0, (1, {'train/loss': value, 'train/accuracy': 0.5}))
    assert read(tmp_path) == [{'step': 1, 'train/loss': None, 'train/accuracy': 0.5}]


def test_records_after_the_resumed_step_are_dropped(tmp_path):
    write(tmp_path, 0, *((step, {'loss': float(step)}) for step in range(1, 8)))
    write(tmp_path, 4, (5, {'loss': 50.0}))
    losses = {r['step']: r['loss'] for r in read(tmp_path)}
    assert losses == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 50.0}


def test_every_record_of_the_resumed_step_is_kept(tmp_path):
    write(tmp_path, 0, (2, {'train/loss': 1.0}), (2, {'eval/loss': 2.0}), (3, {'train/loss': 0.5}))
    write(tmp_path, 2)
    assert read(tmp_path) == [{'step': 2, 'train/loss': 1.0}, {'step': 2, 'eval/loss': 2.0}]


def test_a_run_from_step_0_drops_all_earlier_records(tmp_path):
    write(tmp_path, 0, (1, {'loss': 4.0}), (2, {'loss': 3.0}))
    write(tmp_path, 0, (1, {'loss': 5.0}))
    assert read(tmp_path) == [{'step': 1, 'loss': 5.0}]


@pytest.mark.parametrize('half', ['{"step": 3, "lo', '{"step": 3}', '{"step": 1, "loss": 1.0}'])
def test_an_incomplete_last_line_is_dropped(tmp_path, half):
    write(tmp_path, 0, (1, {'loss': 4.0}))
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write(half)
    write(tmp_path, 3, (4, {'loss': 2.0}))
    assert read(tmp_path) == [{'step': 1, 'loss': 4.0}, {'step': 4, 'loss': 2.0}]


def test_the_file_is_not_rewritten_if_nothing_is_dropped(tmp_path):
    write(tmp_path, 0, (1, {'loss': 4.0}))
    before = (tmp_path / 'metrics.jsonl').stat().st_ino
    write(tmp_path, 1)
    assert (tmp_path / 'metrics.jsonl').stat().st_ino == before
    assert not (tmp_path / 'metrics.tmp').exists()


def test_tensorboard_gets_the_same_scalars(tmp_path):
    events = write(tmp_path, 0, (1, {'train/loss': 2.5})).tensorboard_dir
    (file,) = events.iterdir()
    assert events == tmp_path / 'tensorboard'
    assert b'train/loss' in file.read_bytes()
