"""The Hugging Face architectures that the models here compute, by the `model_type` they have.

To add one, write its row: its table of arrays, and its settings in both directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from partitioning.rules import nearest
from train.checkpoints.huggingface import decoders, tables
from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.tables import Table
from train.errors import ConfigError
from train.models.config import TransformerConfig
from train.models.t5 import T5Config
from train.models.t5.config import MAX_DISTANCE, NUM_BUCKETS

_SIZES = {
    'vocab_size': 'vocab_size',
    'emb_dim': 'd_model',
    'num_heads': 'num_heads',
    'head_dim': 'd_kv',
    'mlp_dim': 'd_ff',
    'num_encoder_layers': 'num_layers',
}
# The feed_forward_proj of a configuration -> our activations. gelu is exact in transformers, unless
# it is a gate.
_ACTIVATIONS = {
    'relu': ('relu',),
    'gelu_new': ('gelu',),
    'silu': ('silu',),
    'gated-gelu': ('gelu', 'linear'),
    'gated-gelu_new': ('gelu', 'linear'),
    'gated-relu': ('relu', 'linear'),
    'gated-silu': ('silu', 'linear'),
}


def read_t5(c: ConfigJson) -> dict[str, Any]:
    """T5 1.0, T5 1.1 and what has grown from them, such as Flan-T5 and ByT5."""
    return _read(c, 'relu', is_tied=True)


def read_mt5(c: ConfigJson) -> dict[str, Any]:
    """The multilingual T5, which differs in what a configuration may leave out."""
    return _read(c, 'gated-gelu', is_tied=False)


def _read(c: ConfigJson, activation: str, is_tied: bool) -> dict[str, Any]:
    c.require('relative_attention_num_buckets', NUM_BUCKETS, default=NUM_BUCKETS)
    c.require('relative_attention_max_distance', MAX_DISTANCE, default=MAX_DISTANCE)
    c.require('layer_norm_epsilon', 1e-6, default=1e-6)
    c.require('is_encoder_decoder', True, default=True)
    activation = c.get('feed_forward_proj', activation)
    if activation not in _ACTIVATIONS:
        raise c.cannot('feed_forward_proj', activation, ', '.join(map(repr, _ACTIVATIONS)))
    return {name: c.need(key) for name, key in _SIZES.items()} | {
        'num_decoder_layers': c.get('num_decoder_layers', c.need('num_layers')),
        'mlp_activations': _ACTIVATIONS[activation],
        'dropout_rate': c.get('dropout_rate', 0.1),
        'logits_via_embedding': c.get('tie_word_embeddings', is_tied),
    }


def write_t5(m: T5Config) -> dict[str, Any]:
    # Of two names for the same functions, the first.
    known: dict[Any, str] = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {key: getattr(m, name) for name, key in _SIZES.items()} | {
        'num_decoder_layers': m.num_decoder_layers,
        'feed_forward_proj': known.get(m.mlp_activations),
        'dropout_rate': m.dropout_rate,
        'tie_word_embeddings': m.logits_via_embedding,
        'relative_attention_num_buckets': NUM_BUCKETS,
        'relative_attention_max_distance': MAX_DISTANCE,
        'layer_norm_epsilon': 1e-6,
        'is_encoder_decoder': True,
        'pad_token_id': 0,
        'eos_token_id': 1,
        'decoder_start_token_id': 0,
    }


# What changes how a model is trained or run, but not what it computes.
_OF_RUNS = ('dropout_rate', 'dtype', 'remat_policy', 'float32_attention_logits', 'param_scan_axis')


def _computed_by_t5(m: T5Config) -> dict[str, Any]:
    """What a model computes, as settings."""
    names = [name for name in T5Config.__dataclass_fields__ if name not in _OF_RUNS]
    return {name: getattr(m, name) for name in names}


ModelConfig = TransformerConfig | T5Config


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture: its class in transformers, and our model with the same arrays.

    Attributes:
      read: the settings of our model from `config.json`.
      write: makes the settings in `config.json` from the settings of our model.
    """

    class_name: str
    read: Callable[[ConfigJson], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    table: Table = tables.LLAMA
    kind: type[TransformerConfig] | type[T5Config] = TransformerConfig


ARCHITECTURES = {
    'llama': Architecture('LlamaForCausalLM', decoders.read_llama, decoders.write_llama),
    'mistral': Architecture('MistralForCausalLM', decoders.read_mistral, decoders.write_mistral),
    'qwen2': Architecture('Qwen2ForCausalLM', decoders.read_qwen2, decoders.write_qwen2),
    'qwen3': Architecture('Qwen3ForCausalLM', decoders.read_qwen3, decoders.write_qwen3),
    'gemma': Architecture('GemmaForCausalLM', decoders.read_gemma, decoders.write_gemma),
    'gemma2': Architecture(
        'Gemma2ForCausalLM', decoders.read_gemma2, decoders.write_gemma2, tables.GEMMA_2
    ),
    'gemma3_text': Architecture(
        'Gemma3ForCausalLM', decoders.read_gemma3, decoders.write_gemma3, tables.GEMMA_2
    ),
    'gpt2': Architecture('GPT2LMHeadModel', decoders.read_gpt2, decoders.write_gpt2, tables.GPT2),
    't5': Architecture('T5ForConditionalGeneration', read_t5, write_t5, tables.T5, T5Config),
    'mt5': Architecture('MT5ForConditionalGeneration', read_mt5, write_t5, tables.T5, T5Config),
}


def find_architecture(config: ConfigJson) -> Architecture:
    """Returns the architecture that a configuration names.

    Raises a ConfigError if it is not known.
    """
    name = config.get('model_type')
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f'{config.where}: model_type is {name!r}, which is not known.'
            f'{nearest(str(name), ARCHITECTURES)} The known ones are {", ".join(ARCHITECTURES)}'
        )
    return ARCHITECTURES[name]


def model_config(config: ConfigJson, **settings: Any) -> ModelConfig:
    """Returns the settings of our model that computes what `config.json` describes.

    Raises a ConfigError if the architecture is not known, or our model cannot compute it.

    Args:
      **settings: other settings of our model, such as `dtype` or `scan_layers`.
    """
    architecture = find_architecture(config)
    try:
        read = architecture.read(config)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f'{config.where} is malformed: {error!r}') from error
    known = {field.name for field in dataclasses.fields(architecture.kind)}
    for name in settings.keys() - known:
        raise ConfigError(
            f'{architecture.kind.__name__} has no setting {name!r}.{nearest(name, known)}'
        )
    try:
        return architecture.kind(**{**read, **settings})
    except ConfigError as error:
        raise ConfigError(f'{config.where}: {error}') from error


def is_tied(model: ModelConfig) -> bool:
    """Whether the output layer of a model is its embedding."""
    return model.logits_via_embedding if isinstance(model, T5Config) else model.tie_embeddings


def describe_model(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The `model_type` and the `config.json` of the architecture that computes what our model does.

    Raises a ConfigError if there is none.
    """
    closest: tuple[str, list[str]] = ('', [])
    computed = _computed(model)
    for name, architecture in ARCHITECTURES.items():
        if not isinstance(model, architecture.kind):
            continue
        settings = architecture.write(model)
        written = ConfigJson({'model_type': name, **settings}, f'the config.json of {name}')
        try:
            same = _computed(model_config(written))
        except ConfigError:
            continue
        lacking = [name for name, value in computed.items() if same[name] != value]
        if not lacking:
            return name, settings
        if not closest[0] or len(lacking) < len(closest[1]):
            closest = name, lacking
    has = ', '.join(f'{name} = {getattr(model, name)!r}' for name in closest[1])
    raise ConfigError(
        f'no known Hugging Face model computes what this one does: {closest[0] or "none"} comes '
        f'closest, and cannot have {has}'
    )


def _computed(model: ModelConfig) -> dict[str, Any]:
    """What a model computes: settings that mean the same are equal."""
    return _computed_by_t5(model) if isinstance(model, T5Config) else decoders.computed(model)
