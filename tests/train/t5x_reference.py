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
from flax.traverse_util import unflatten_dict

from train.checkpoints.formats.t5x_files import read_arrays
from train.t5x import network

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


def net(model: str, **changes: Any) -> Any:
    """The network of a model, with changed settings."""
    settings = facts(model)['model']['config'] | changes
    if model == 'decoder_only':
        return network.DecoderWrapper(config=network.TransformerConfig(**settings))
    return network.Transformer(config=network.T5Config(**settings))


def batch(model: str, kind: str = 'padded') -> dict[str, np.ndarray]:
    """The inputs of a batch of a model."""
    start = f'{kind}/in/'
    return {k.removeprefix(start): x for k, x in arrays(model).items() if k.startswith(start)}


@functools.cache
def params(name: str) -> dict[str, Any]:
    """The parameters of a checkpoint."""
    stored = read_arrays(checkpoint(name))
    flat = {k.removeprefix('target/'): x for k, x in stored.items() if k.startswith('target/')}
    return unflatten_dict({k: x.read() for k, x in flat.items()}, sep='/')
