"""Runs of a small model on small texts, in this process."""

import gin
import jax
import pytest
from small_runs import SMALL

from train import train as train_module
from train.config import load_config


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / 'texts'
    folder.mkdir()
    for i in range(20):
        (folder / f'{i}.txt').write_text(f'file {i} counts: ' + ' '.join(map(str, range(i, 90))))
    return folder


@pytest.fixture
def run(texts):
    def run(model_dir, *changes):
        gin.clear_config()
        paths = [f"MODEL_DIR='{model_dir}'", f"TextFiles.root='{texts}'"]
        text = ["TextFiles.pattern='*.txt'", 'TextFiles.holdout_percent=20.0']
        load_config(['configs/runs/quickstart.gin'], [*SMALL, *paths, *text, *changes])
        return train_module.train()

    return run


@pytest.fixture(autouse=True, scope='package')
def _programs_are_compiled_once(tmp_path_factory):
    """Runs of the same small model share their compiled programs."""
    jax.config.update('jax_compilation_cache_dir', str(tmp_path_factory.mktemp('programs')))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    yield
    jax.config.update('jax_compilation_cache_dir', None)
