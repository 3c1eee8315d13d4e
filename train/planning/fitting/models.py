"""The model that a `config.json` of Hugging Face describes, as one of our models."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.rules import nearest
from train.checkpoints.huggingface.architectures import ARCHITECTURES, ModelConfig, model_config
from train.checkpoints.huggingface.config_json import FILE, ConfigJson, read_config_file
from train.errors import ConfigError
from train.models.config import TransformerConfig
from train.models.parameters import Parameter, list_parameters
from train.models.t5 import T5
from train.paths import as_path
from train.planning.fitting.architectures import NO_IMAGES, PARTIAL, SIMILAR

# Kinds of scaling of rotary positions that our models have.
_SCALINGS = ('default', 'linear', 'llama3')


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model of Hugging Face, as one of ours.

    Attributes:
      kind: its `model_type`.
      config: the settings of our model.
      max_length: the longest text that it was made for, in tokens, or None.
      differs: what our model computes in another way.
    """

    kind: str
    config: ModelConfig
    max_length: int | None
    differs: tuple[str, ...]

    @functools.cached_property
    def num_parameters(self) -> int:
        """The number of parameters of our model."""
        if isinstance(self.config, TransformerConfig):
            listed = list_parameters(self.config)
            leaves = jax.tree.leaves(listed, is_leaf=lambda x: isinstance(x, Parameter))
        else:
            tokens = jnp.zeros((1, 1), jnp.int32)
            made = jax.eval_shape(T5(self.config).init, jax.random.key(0), tokens, tokens, tokens)
            leaves = jax.tree.leaves(made['params'])
        return sum(math.prod(leaf.shape) for leaf in leaves)


def find_model(path: str, **settings: Any) -> FoundModel:
    """Reads a `config.json`.

    Args:
      path: the file, or the folder that has it.
      **settings: settings of our model that the file does not have, such as `dtype`.

    Raises:
      ConfigError: if the file cannot be read, or if our models have no such architecture.
    """
    file = as_path('config.json', path)
    return read_model(read_config_file(file / FILE if file.is_dir() else file), **settings)


def read_model(config: ConfigJson, **settings: Any) -> FoundModel:
    """Finds our model for the settings of a model of Hugging Face; see `find_model`."""
    config, differs = _text_model(config)
    kind = _find_kind(config)
    config, simpler = _without_details(config, kind)
    differs += simpler
    if kind in ARCHITECTURES:
        ours = model_config(config, **settings)
    else:
        ours = _read_similar(config, kind, settings)
        differs += SIMILAR[kind].list_differences(config)
    longest = config.get('max_position_embeddings', config.get('n_positions'))
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise config.cannot('max_position_embeddings', longest, 'integers >= 1')
    if isinstance(ours, TransformerConfig) and ours.max_positions:
        longest = ours.max_positions
    return FoundModel(
        kind=kind, config=ours, max_length=longest, differs=tuple(dict.fromkeys(differs))
    )


def _find_kind(config: ConfigJson) -> str:
    """The `model_type`, which for the texts of a model of images may end with _text."""
    kind = config.get('model_type')
    names = [kind, kind.removesuffix('_text')] if isinstance(kind, str) else []
    if found := next((name for name in names if name in ARCHITECTURES or name in SIMILAR), None):
        return found
    known = sorted((*ARCHITECTURES, *SIMILAR))
    raise ConfigError(
        f'{config.where}: model_type is {kind!r}, which is not known.{nearest(str(kind), known)} '
        f'The known ones are {", ".join(known)}; write one of them into a copy of the file, if its '
        'layers have the same matrices'
    )


def _read_similar(config: ConfigJson, kind: str, settings: Mapping[str, Any]) -> TransformerConfig:
    try:
        return TransformerConfig(**{**SIMILAR[kind].read(config), **settings})
    except ConfigError as error:
        if config.where in str(error):
            raise
        raise ConfigError(f'{config.where}: {error}') from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f'{config.where} is malformed: {error!r}') from error


def _text_model(config: ConfigJson) -> tuple[ConfigJson, tuple[str, ...]]:
    """The part of a model of texts and images that reads texts."""
    text = config.get('text_config')
    if not isinstance(text, dict):
        return config, ()
    return ConfigJson(text, config.where), (NO_IMAGES,)


def _without_details(config: ConfigJson, kind: str) -> tuple[ConfigJson, tuple[str, ...]]:
    """The settings without those of rotary positions that cost nothing, and what they are."""
    values = dict(config.values)
    differs: tuple[str, ...] = ()
    for key in ('rope_scaling', 'rope_parameters'):
        scaling = values.get(key)
        known = scaling.get('rope_type', scaling.get('type')) if isinstance(scaling, dict) else None
        if isinstance(known, str) and known not in _SCALINGS:
            del values[key]
            differs = (f'rotary positions are not scaled ({known})',)
    default = SIMILAR[kind].rotary_part if kind in SIMILAR else 1.0
    parts = [values.pop(key, None) for key in ('partial_rotary_factor', 'rotary_pct')]
    if next((part for part in parts if part is not None), default) != 1.0:
        differs += (PARTIAL,)
    return dataclasses.replace(config, values=values), differs
