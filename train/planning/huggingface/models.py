"""The model that a Hugging Face `config.json` describes, as one of our models.

`train.checkpoints.huggingface` has the architectures that our models compute exactly. `SIMILAR` has
those with the same matrices as our model, and so nearly the same memory and time. Each row says
what our model computes in another way. Norms and biases that differ are less than 0.1% of the
parameters. None of these models can load weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.rules import nearest
from train.checkpoints.huggingface.architectures import ARCHITECTURES, ModelConfig, model_config
from train.checkpoints.huggingface.config_json import FILE, ConfigJson, read_config_file
from train.checkpoints.huggingface.decoders import (
    Settings,
    read_gemma2,
    read_llama,
    read_qwen2,
    read_qwen3,
)
from train.errors import ConfigError, check_counts
from train.models.config import TransformerConfig
from train.models.parameters import Parameter, list_parameters
from train.models.t5 import T5
from train.paths import as_path
from train.planning.huggingface import gpt_like as gpt, llama_like as llama
from train.planning.huggingface.counted import COUNTED
from train.planning.huggingface.hub import is_hub_name, read_config_of_hub

# Kinds of scaling of rotary positions that our models have.
_SCALINGS = ('default', 'linear', 'llama3')
_MOST_TOKENS = 4096  # in a row, unless the user says otherwise
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20}

PARTIAL = 'rotary positions turn whole heads, not only a part of each'
PARALLEL = 'attention and MLP of a layer run one after the other, not both on the same input'
SHARED_NORM = 'attention and MLP of a layer have a norm each, not one in common'
OUTPUT_NORMS = 'a layer norms the inputs of attention and MLP, not their outputs'
WHOLE_NORMS = 'queries and keys are normed head by head, not all heads at once'
ALL_ROTARY = 'all layers have rotary positions'
MULTIPLIERS = 'the multipliers of embeddings, branches and logits are 1'
NO_IMAGES = 'only the model of texts is computed, not of images'
NO_OUTPUT_BIAS = 'the output layer has no bias'


@dataclasses.dataclass(frozen=True)
class Similar:
    """An architecture with the matrices of our model.

    Attributes:
      read: the settings of our model from `config.json`.
      differs: what our model computes in another way.
      rotary_part: the part of each head that rotary positions turn, if `config.json` does not say.
      shares_norm: whether attention and MLP of a layer have one norm in common.
    """

    read: Callable[[ConfigJson], Settings]
    differs: tuple[str, ...] = ()
    rotary_part: float = 1.0
    shares_norm: Callable[[ConfigJson], bool] = lambda config: False

    def list_differences(self, config: ConfigJson) -> tuple[str, ...]:
        """Returns what our model computes in another way than the model of this file."""
        return (*self.differs, *((SHARED_NORM,) if self.shares_norm(config) else ()))


def _read_normed_heads(c: ConfigJson) -> Settings:
    return read_llama(c) | {'qk_norm': True}


def _read_helium(c: ConfigJson) -> Settings:
    """Helium, whose output of attention never has a bias."""
    settings = read_llama(c)
    return settings | {'biases': tuple(b for b in settings['biases'] if b != 'out')}


SIMILAR = {
    'arcee': Similar(llama.read_arcee),
    'bloom': Similar(
        gpt.read_bloom, ('positions are rotary, not ALiBi', 'the embeddings are not normed')
    ),
    'cohere': Similar(llama.read_cohere, (PARALLEL, SHARED_NORM, 'logits are not scaled')),
    'cohere2': Similar(
        llama.read_cohere2, (PARALLEL, SHARED_NORM, 'logits are not scaled', ALL_ROTARY)
    ),
    'ernie4_5': Similar(llama.read_ernie),
    'exaone4': Similar(llama.read_exaone4, (OUTPUT_NORMS, ALL_ROTARY)),
    'falcon': Similar(gpt.read_falcon, (PARALLEL,), shares_norm=gpt.shares_norm_in_falcon),
    'glm': Similar(llama.read_glm, rotary_part=0.5),
    # of 2025, which norms the outputs of attention and MLP too
    'glm4': Similar(lambda c: llama.read_glm(c) | {'post_norms': True}, rotary_part=0.5),
    'gpt_bigcode': Similar(gpt.read_gpt_bigcode),
    'gpt_neox': Similar(gpt.read_gpt_neox, (PARALLEL,), rotary_part=0.25),
    'gpt_oss': Similar(
        llama.read_gpt_oss,
        ('attention has no sinks', 'experts and their router have no biases'),
    ),
    'gptj': Similar(gpt.read_gptj, (PARALLEL, SHARED_NORM, PARTIAL, NO_OUTPUT_BIAS)),
    'granite': Similar(
        lambda c: read_llama(c) | {'attention_scale': c.get('attention_multiplier')}, (MULTIPLIERS,)
    ),
    'granitemoe': Similar(llama.read_granitemoe, (MULTIPLIERS,)),
    'helium': Similar(_read_helium),
    'hunyuan_v1_dense': Similar(
        _read_normed_heads, ('queries and keys are normed before they are turned, not after',)
    ),
    'ministral': Similar(functools.partial(llama.read_phi3, default_window=4096)),
    'mixtral': Similar(llama.read_mixtral),
    'nemotron': Similar(llama.read_nemotron, rotary_part=0.5),
    'olmo': Similar(lambda c: read_llama(c) | {'norm': 'layer'}, ('norms have a scale',)),
    'olmo2': Similar(_read_normed_heads, (OUTPUT_NORMS, WHOLE_NORMS)),
    'olmo3': Similar(llama.read_olmo3, (OUTPUT_NORMS, WHOLE_NORMS)),
    'olmoe': Similar(llama.read_olmoe, (WHOLE_NORMS,)),
    'opt': Similar(gpt.read_opt),
    'phi': Similar(gpt.read_phi, (PARALLEL, SHARED_NORM, NO_OUTPUT_BIAS), rotary_part=0.5),
    'phi3': Similar(llama.read_phi3),
    'qwen2_5_vl': Similar(read_qwen2, (NO_IMAGES,)),
    'qwen2_vl': Similar(read_qwen2, (NO_IMAGES,)),
    'qwen3_moe': Similar(llama.read_qwen3_moe),
    'qwen3_vl': Similar(read_qwen3, (NO_IMAGES,)),
    'qwen3_vl_moe': Similar(llama.read_qwen3_moe, (NO_IMAGES,)),
    'seed_oss': Similar(llama.read_seed_oss),
    'smollm3': Similar(read_llama, (ALL_ROTARY,)),
    'stablelm': Similar(llama.read_stablelm, rotary_part=0.25),
    'starcoder2': Similar(gpt.read_starcoder2),
    'vaultgemma': Similar(lambda c: read_gemma2(c) | {'post_norms': False}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A Hugging Face model, as one of ours.

    Attributes:
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
    """Reads a `config.json`; see `find_config_json`.

    Raises a ConfigError if the file cannot be read, or if our models have no such architecture.

    Args:
      **settings: settings of our model that the file does not have, such as `dtype`.
    """
    return read_model(find_config_json(path), **settings)


def find_config_json(path: str) -> ConfigJson:
    """Reads the settings of a model, but not the settings of its images.

    `path` is the file, or the folder that has it; or the name of a model on the hub. Raises a
    ConfigError if the file cannot be read.
    """
    file = as_path('CONFIG', path)
    if not file.exists() and is_hub_name(path):
        return read_config_of_hub(path)
    return read_config_file(file / FILE if file.is_dir() else file)


def read_model(config: ConfigJson, **settings: Any) -> FoundModel:
    """Finds our model for the settings of a Hugging Face model; see `find_model`."""
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
    if kind is None:
        raise ConfigError(f'{config.where} has no model_type: a config.json of a model has one')
    known = sorted({*ARCHITECTURES, *SIMILAR, *COUNTED})
    raise ConfigError(
        f'{config.where}: model_type is {kind!r}, which is not known.{nearest(str(kind), known)} '
        f'The known ones are {", ".join(known)}. For any other model, run your own training code '
        'as it is: `meshwright dry TOPOLOGY -- python train.py`'
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
    """The file without settings of rotary positions that cost nothing, and their names."""
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


def choose_rows(
    model: FoundModel, batch_tokens: int, sequence_length: int | None
) -> dict[str, int]:
    """Returns 'batch_size' and 'sequence_length' of batches with a number of tokens.

    Args:
      batch_tokens: the number of tokens in a batch, a multiple of the length of a row.
      sequence_length: the length of a row, by default what the model was made for, up to 4096.

    Raises:
      ConfigError: if no whole number of rows makes the batch, or if the model cannot read the rows.
    """
    config = model.config
    if isinstance(config, TransformerConfig) and 0 < config.max_positions < (sequence_length or 0):
        raise ConfigError(
            f'--sequence_length={sequence_length}, but the {model.kind} has '
            f'{config.max_positions} positions: use {config.max_positions} or less'
        )
    return divide_rows(batch_tokens, sequence_length, model.max_length)


def divide_rows(
    batch_tokens: int, sequence_length: int | None, max_length: int | None
) -> dict[str, int]:
    """Returns 'batch_size' and 'sequence_length'; see `choose_rows`.

    `max_length` is the longest row that the model was made for, or None.
    """
    if sequence_length is not None:
        check_counts(**{'--sequence_length': sequence_length})
    length = sequence_length or min(max_length or _MOST_TOKENS, _MOST_TOKENS)
    if batch_tokens % length:
        rows = max(1, round(batch_tokens / length))
        raise ConfigError(
            f'--batch_tokens={batch_tokens} is not a multiple of the {length} tokens of a row: '
            f'write {rows * length}, which are {rows} rows, or another --sequence_length'
        )
    return {'batch_size': batch_tokens // length, 'sequence_length': length}


def parse_tokens(text: str) -> int:
    """Returns a number of tokens such as 4M, which is 4 * 2**20, 512K or 65536.

    Raises a ValueError if the text is something else.
    """
    found = re.fullmatch(r'([1-9]\d*)([KM]?)', text)
    if found is None:
        raise ValueError(
            f'{text!r} must be a number of tokens, such as 4M (4 * 2**20), 512K or 65536'
        )
    return int(found[1]) * _UNITS[found[2]]
