"""T5X's reference models: their inputs, their results, and the same networks here.

Each has a folder with `model.json`, `data.npz` and checkpoints of both formats.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from train.checkpoints.formats.t5x_files import read_arrays
from train.objectives import EncoderDecoder, PrefixLanguageModel, TokenLoss
from train.t5x.modules import MODULES


class Difference(NamedTuple):
    """The difference of one figure, and where it was found."""

    figure: str
    value: float
    where: str


def difference(found: Any, expected: Any) -> float:
    """The greatest absolute difference of two arrays; infinite if their shapes differ."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.max(np.abs(found - expected))) if found.shape == expected.shape else np.inf


class Reference:
    """A model of T5X with its inputs and results, which are in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / 'model.json').read_text())
        with np.load(folder / 'data.npz') as file:
            self.arrays: dict[str, np.ndarray] = dict(file)

    @property
    def batches(self) -> list[str]:
        """The names of the batches."""
        return sorted({name.split('/')[0] for name in self.arrays if name.count('/in/')})

    def batch(self, name: str) -> dict[str, jax.Array]:
        """The inputs of the model."""
        start = f'{name}/in/'
        found = {k: v for k, v in self.arrays.items() if k.startswith(start)}
        return {k.removeprefix(start): jnp.asarray(v) for k, v in found.items()}

    def objective(self, model: nn.Module | None = None, **settings: Any) -> TokenLoss:
        """The objective with a model, by default the reference model."""
        model = self.network() if model is None else model
        if not self.is_decoder_only:
            return EncoderDecoder(model=model, **settings)
        settings.setdefault('bidirectional_prefix', True)
        return PrefixLanguageModel(model=model, **settings)

    @property
    def is_decoder_only(self) -> bool:
        return 'decoder_only' in self.facts['model']['network']

    def network(self, **changes: Any) -> nn.Module:
        """The network, with changed settings."""
        module = importlib.import_module(MODULES[self.facts['model']['network']])
        settings = self.facts['model']['config'] | changes
        if self.is_decoder_only:
            return module.DecoderWrapper(config=module.TransformerConfig(**settings))
        return module.Transformer(config=module.T5Config(**settings))

    def init(self, key: jax.Array) -> Any:
        """The variables of the network."""
        shapes = self.facts['model']['init_input_shapes'].items()
        inputs = {k: jnp.ones(v, jnp.int32) for k, v in shapes if k != 'decoder_loss_weights'}
        return self.network().init(key, **inputs, deterministic=True)


def parameters(checkpoint: Path) -> dict[str, Any]:
    """The parameters of a checkpoint, in float32."""
    found = {k: v for k, v in read_arrays(checkpoint).items() if k.startswith('target/')}
    flat = {tuple(k.split('/')[1:]): jnp.asarray(v.read(), jnp.float32) for k, v in found.items()}
    return unflatten_dict(flat)
