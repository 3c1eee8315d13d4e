"""Disks that are full or read-only, and folders that are gone: one line, and good steps stay good.

Most tests limit the size of files, which the operating system allows without privileges: a write
then stores what fits, and fails, as on a full disk.
"""

import dataclasses
import re
import shutil
import subprocess
import time
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from test_not_finite import Line, configure, read

from train import train
from train.checkpoints import CheckpointConfig, complete_steps, open_checkpoints
from train.checkpoints.steps.finding import examine
from train.checkpoints.steps.verifying import verify
from train.errors import ConfigError
from train.reporting.writers import JsonWriter, TensorBoardWriter

pytestmark = pytest.mark.core

LIMIT = 10_000  # bytes: more than any file of a run but the arrays
SAVING: Any = {'period': 3, 'when_busy': 'wait'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Large(Line):
    """A model with 160 kB of random numbers, which do not shrink when they are compressed."""

    def init(self, key, batch):
        variables = super().init(key, batch)
        return variables | {'noise': {'x': jax.random.normal(key, (40_000,))}}


def at(step, action, after=None):
    """A hook that does something after a step, as soon as there is a file."""

    def hook(state, now, metrics):
        if now == step:
            give_up = time.monotonic() + 60
            while after is not None and not after.exists() and time.monotonic() < give_up:
                time.sleep(0.01)
            action()

    return hook


def large(model_dir, **changes):
    return configure(model_dir, objective=Large(), log_every=1, **changes)


def assert_good(model_dir, steps):
    """Checks that these steps are all there are, and every file of them."""
    assert complete_steps(model_dir / 'checkpoints') == steps
    for step in steps:
        folder = epath.Path(model_dir) / 'checkpoints' / str(step)
        verified = verify(examine(folder, step))
        assert verified.status == 'good', verified.reasons


def test_a_save_that_fails_ends_the_run_and_the_same_command_resumes(tmp_path, limit_files):
    checkpoints = CheckpointConfig(**SAVING, asynchronous=False)
    hooks = [at(4, lambda: limit_files(LIMIT))]
    config = large(tmp_path / 'full', hooks=hooks, checkpoints=checkpoints)
    with pytest.raises(ConfigError) as error:
        train(config)
    limit_files()
    folder = tmp_path / 'full/checkpoints'
    assert str(error.value).startswith(f'checkpoint {folder / "6"} cannot be saved (')
    assert 'File too large' in str(error.value) and 'so the run ends at step 7; ' in str(
        error.value
    )
    assert 'the same command resumes from the checkpoint of step 3: free space' in str(error.value)
    assert '\n' not in str(error.value)
    assert_good(tmp_path / 'full', [3])
    assert [path.name for path in folder.iterdir()] == ['3'], 'the space is free again'
    resumed = train(dataclasses.replace(config, hooks=()))
    whole = train(large(tmp_path / 'whole'))
    np.testing.assert_array_equal(resumed.params['w'], whole.params['w'])
    assert read(tmp_path / 'full', 'train/loss') == read(tmp_path / 'whole', 'train/loss')


def test_a_policy_continues_after_a_save_that_fails(tmp_path, limit_files, capsys):
    checkpoints = CheckpointConfig(**SAVING, on_failure='continue', asynchronous=False)
    hooks = [at(4, lambda: limit_files(LIMIT)), at(7, limit_files)]
    train(large(tmp_path, total_steps=9, checkpoints=checkpoints, hooks=hooks))
    assert_good(tmp_path, [3, 9])
    lines = [line for line in capsys.readouterr().out.splitlines() if 'cannot' in line]
    assert len(lines) == 1 and '/checkpoints/6 cannot be saved (' in lines[0]
    assert lines[0].endswith('training continues, and the next save is tried when it is due')


def test_the_last_save_of_a_run_must_not_fail(tmp_path, limit_files):
    checkpoints = CheckpointConfig(**SAVING, on_failure='continue')
    saved = tmp_path / 'checkpoints/6/manifest.json'
    hooks = [at(7, lambda: limit_files(LIMIT), after=saved)]
    config = large(tmp_path, checkpoints=checkpoints, hooks=hooks)
    with pytest.raises(ConfigError, match='checkpoints/8 cannot be saved'):
        train(config)
    limit_files()
    assert_good(tmp_path, [3, 6])


def test_a_failed_save_does_not_hide_why_a_run_ends(tmp_path, limit_files, capsys):
    """A step that is not finite ends the run, while a save in the background fails."""
    saved = tmp_path / 'checkpoints/3/manifest.json'
    config = large(tmp_path, hooks=[at(6, lambda: limit_files(LIMIT), after=saved)])
    objective = Large(bad_steps=(7,))
    with pytest.raises(FloatingPointError, match=r'step 7; the same .* checkpoint of step 3') as e:
        train(dataclasses.replace(config, objective=objective, checkpoints=Unreported()))
    limit_files()
    assert '/checkpoints/6 cannot be saved (' in capsys.readouterr().out
    assert '\n' not in str(e.value)
    assert_good(tmp_path, [3])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unreported(CheckpointConfig):
    """Checkpoints whose failure is first known when the run ends."""

    period: int = 3
    when_busy: Any = 'wait'


@open_checkpoints.register
def open_unreported(config: Unreported, model_dir):
    checkpoints = open_checkpoints.dispatch(CheckpointConfig)(config, model_dir)
    failure, latest_step = checkpoints.failure, checkpoints.latest_step

    def report_now():
        checkpoints.failure = failure
        return latest_step()

    checkpoints.failure, checkpoints.latest_step = lambda: None, report_now
    return checkpoints


@pytest.mark.parametrize('kinds', [(JsonWriter,), (JsonWriter, TensorBoardWriter)])
def test_a_model_dir_that_is_removed_ends_the_run(tmp_path, kinds, capsys):
    model_dir = tmp_path / 'model'
    checkpoints = CheckpointConfig(**SAVING, asynchronous=False)
    hooks = [at(4, lambda: model_dir.rename(tmp_path / 'elsewhere'))]
    config = large(model_dir, writers=kinds, hooks=hooks, checkpoints=checkpoints)
    with pytest.raises(
        ConfigError, match=r'checkpoints/6 cannot .* has been removed\), so the run'
    ):
        train(config)
    assert not model_dir.exists()
    assert_good(tmp_path / 'elsewhere', [3])
    lines = [line for line in capsys.readouterr().out.splitlines() if 'cannot' in line]
    assert [line.split()[3] for line in lines] == [kind.__name__ for kind in kinds]
    assert all('No such file or directory' in line for line in lines)


@pytest.mark.parametrize(
    'name, words',
    [
        ('checkpoints', r'model/checkpoints, where checkpoints are to be saved, is a file: change'),
        ('tensorboard', 'the metrics of TensorBoardWriter cannot be opened: File exists: '),
        ('data.json.unfinished/x', r'MODEL_DIR .*/model cannot be written: Is a directory'),
        ('metrics.jsonl/x', 'the metrics of JsonWriter cannot be opened: Is a directory: '),
    ],
)
def test_what_is_in_the_way_is_an_error_at_the_start(tmp_path, name, words):
    path = tmp_path / 'model' / name
    path.parent.mkdir(parents=True)
    path.write_text('mine')
    with pytest.raises(ConfigError, match=words):
        train(configure(tmp_path / 'model', writers=(JsonWriter, TensorBoardWriter)))
    assert path.read_text() == 'mine'


def test_a_start_on_a_full_disk_leaves_the_files_of_the_run_as_they_are(tmp_path, limit_files):
    train(large(tmp_path, total_steps=3))
    files = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    limit_files(5)
    try:
        with pytest.raises(ConfigError, match=f'MODEL_DIR {tmp_path} cannot be written: File too'):
            train(large(tmp_path))
    finally:
        limit_files()
    assert {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()} == files


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MB in memory, which needs the permission to mount."""
    disk = tmp_path / 'disk'
    disk.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', 'size=1500k', 'tmpfs', str(disk)]
    if shutil.which('mount') is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip('mounting a file system is not permitted')
    yield disk
    subprocess.run(['umount', '-l', str(disk)], check=True)


def test_a_disk_that_fills_up_and_one_that_becomes_read_only(small_disk, capsys):
    checkpoints = CheckpointConfig(period=1, keep=None, when_busy='wait')
    settings: Any = {'total_steps': 50, 'checkpoints': checkpoints}
    with pytest.raises(ConfigError, match=r'cannot be saved .*No space left on device') as error:
        train(large(small_disk, **settings))
    assert '\n' not in str(error.value)
    told = re.search(r'have (\S+) kB in memory, and the disk has (\S+) kB left', str(error.value))
    assert told is not None and float(told[2]) < float(told[1])
    steps = complete_steps(small_disk / 'checkpoints')
    assert 1 < len(steps) < 50
    assert_good(small_disk, steps)
    shutil.rmtree(small_disk / 'checkpoints' / str(steps[-1]))

    def remount():
        subprocess.run(['mount', '-o', 'remount,ro', str(small_disk)], check=True)

    checkpoints = CheckpointConfig(period=100, keep=None)
    settings = {'hooks': [at(steps[-1], remount)], 'checkpoints': checkpoints}
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r'cannot be saved .*Read-only file system'):
        train(large(small_disk, total_steps=steps[-1] + 2, **settings))
    said = capsys.readouterr().out
    assert said.count('the metrics of JsonWriter cannot be written: Read-only file system') == 1
    assert_good(small_disk, steps[:-1])
