"""Runs of a small model on small texts, in this process."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import gin
import jax
import pytest
from gin_fixtures import (  # noqa: F401  # fixtures
    intruder,
    load,
    load_t5x,
    own_registry,
    refusal,
    t5x_files,
)
from small_runs import SMALL

from train import train as train_module
from train.config import load_config


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


def train_small(model_dir: Path, texts: Path, *changes: str) -> Any:
    """Trains the small model on texts; returns the state after the last step."""
    gin.clear_config()
    paths = [f"MODEL_DIR='{model_dir}'", f"TextFiles.root='{texts}'"]
    text = ["TextFiles.pattern='*.txt'", 'TextFiles.holdout_percent=20.0']
    load_config(['configs/runs/quickstart.gin'], [*SMALL, *paths, *text, *changes])
    return train_module.train()


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / 'texts')


@pytest.fixture
def run(texts):
    """Returns a function (model_dir, *changes) that trains the small model."""
    return lambda model_dir, *changes: train_small(model_dir, texts, *changes)


class FinishedRun(NamedTuple):
    """A run of 6 steps with checkpoints and evaluations at 2, 4 and 6. Tests must not change it.

    Attributes:
      directory: its folder.
      state: the state after its last step.
      traces: 'init' or 'train step' for each time that one of them was traced.
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
    folder, traces = tmp_path_factory.mktemp('finished'), []
    make_train_step, train_state = train_module.make_train_step, train_module.TrainState

    def counted(*args, **kwargs):
        step = make_train_step(*args, **kwargs)
        return lambda *a: traces.append('train step') or step(*a)

    class CountedState(train_state):
        @classmethod
        def create(cls, *args):
            traces.append('init')
            return train_state.create(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, 'make_train_step', counted)
        patch.setattr(train_module, 'TrainState', CountedState)
        state = train_small(folder / 'model', write_texts(folder / 'texts'))
    gin.clear_config()
    return FinishedRun(folder / 'model', state, traces)
