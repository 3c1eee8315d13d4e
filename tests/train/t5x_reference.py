"""Arrays and checkpoints that T5X itself wrote. See t5x_data/README.md."""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / 't5x_data'


@functools.cache
def checkpoint(name: str) -> Path:
    """The folder `checkpoint_<step>` of a checkpoint, such as 't5_1_1-orbax-10'.

    It is unpacked once per process. Tests that change it copy it first.
    """
    folder = tempfile.TemporaryDirectory(prefix='t5x_data_')
    atexit.register(folder.cleanup)
    zipfile.ZipFile(DATA / f'{name}.zip').extractall(folder.name)
    return Path(folder.name) / f'checkpoint_{name.rpartition("-")[2]}'


@functools.cache
def arrays(model: str) -> dict[str, np.ndarray]:
    """The inputs and results of a model, 't5_1_1' or 'decoder_only', by name."""
    with np.load(DATA / f'{model}.npz') as file:
        return dict(file)


@functools.cache
def learning_rates() -> list[dict[str, Any]]:
    """T5X's learning rates `values` at `steps`, for several settings of its scheduler."""
    return json.loads((DATA / 'learning_rates.json').read_text())


@functools.cache
def facts(model: str) -> dict[str, Any]:
    """The settings of a model, and the figures that T5X computed for it."""
    return json.loads((DATA / f'{model}.json').read_text())
