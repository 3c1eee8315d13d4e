"""Runs of a small model on small texts, in this process."""

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gin
import jax
import pytest
from gin_fixtures import (  # noqa: F401  # fixtures
    intruder,
    load,
    load_t5x,
    refusal,
    t5x_files,
)
from small import small_config

from train import train
from train.cli import main
from train.machine import devices as machine


@pytest.fixture(autouse=True, scope='package')
def _compilation_cache(tmp_path_factory):
    """Caches compiled programs, which runs of the same small model share."""
    jax.config.update('jax_compilation_cache_dir', str(tmp_path_factory.mktemp('programs')))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    yield
    jax.config.update('jax_compilation_cache_dir', None)


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for i in range(20):
        (folder / f'{i}.txt').write_text(f'file {i} counts: ' + ' '.join(map(str, range(i, 90))))
    return folder


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / 'texts')


@pytest.fixture
def run(texts):
    """Returns a function (model_dir, **changes) that trains the small model."""
    return lambda model_dir, **changes: train(small_config(model_dir, texts, **changes))


@pytest.fixture
def meshwright(monkeypatch, capsys):
    """Returns a function that runs a command here: arguments -> status, output and errors."""
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(machine, 'use_virtual_devices', lambda count: None)  # jax has its devices

    def run(*arguments):
        gin.clear_config()
        try:
            status = main([*map(str, arguments)])
        except SystemExit as exit_:
            status = exit_.code
        return status, *capsys.readouterr()

    return run


class FinishedRun(NamedTuple):
    """A run of 6 steps with checkpoints and evaluations at 2, 4 and 6. Tests must not change it.

    Attributes:
      directory: its folder.
      state: the state after its last step.
      traces: 'init', 'train' or 'evaluate' for each time that one of them was traced.
    """

    directory: Path
    state: Any
    traces: list[str]

    def copy(self, directory: Path, last_step: int = 6) -> Path:
        """Copies the run as if it had been killed after the checkpoint of a step."""
        shutil.copytree(self.directory, directory)
        for checkpoint in (directory / 'checkpoints').iterdir():
            if int(checkpoint.name) > last_step:
                shutil.rmtree(checkpoint)
        return directory


@pytest.fixture(scope='package')
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp('finished')
    config = small_config(folder / 'model', write_texts(folder / 'texts'))
    return FinishedRun(folder / 'model', train(config), config.objective.traces)
