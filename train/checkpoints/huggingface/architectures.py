"""The Hugging Face architectures that the models here compute, by the `model_type` they have.

To add one, write its row: its table of arrays, and its settings in both directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from partitioning.rules import nearest
from train.checkpoints.huggingface import decoders, t5, tables
from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.tables import Table
from train.errors import ConfigError
from train.models.config import TransformerConfig
from train.models.t5 import T5Config

ModelConfig = TransformerConfig | T5Config


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
      class_name: the class in transformers.
      read: the settings of our model from `config.json`.
      write: makes the settings in `config.json` from the settings of our model.
      table: the names of its arrays.
      kind: the type of the settings of our model.
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
    't5': Architecture('T5ForConditionalGeneration', t5.read_t5, t5.write_t5, tables.T5, T5Config),
    'mt5': Architecture(
        'MT5ForConditionalGeneration', t5.read_mt5, t5.write_t5, tables.T5, T5Config
    ),
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
    return t5.computed(model) if isinstance(model, T5Config) else decoders.computed(model)
