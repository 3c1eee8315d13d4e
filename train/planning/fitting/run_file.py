"""The gin file of a run that trains a model of Hugging Face from scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from train.errors import ConfigError
from train.models.config import RopeScaling, TransformerConfig
from train.models.experts import ExpertsConfig
from train.models.t5 import T5Config
from train.planning.fitting.models import FoundModel

# The default settings that are written, too, because the run that the file begins with has others.
_OF_PRETRAIN = {
    *('remat', 'tie_embeddings', 'dtype', 'rope_max_wavelength'),
    *(f.name for f in dataclasses.fields(TransformerConfig) if f.default is dataclasses.MISSING),
}
# Settings that a layout decides.
_NOT_WRITTEN = {'pipeline', 'attention', 'vocab_size'}


def write_run(model: FoundModel, *, batch_size: int, sequence_length: int) -> str:
    """Returns the text of a gin file that `python -m train` accepts. It needs TEXT, the data.

    Args:
      model: the model.
      batch_size: the number of rows in a batch.
      sequence_length: the number of tokens in a row; for an encoder and a decoder, of the inputs.
    """
    writes = _write_t5 if isinstance(model.config, T5Config) else _write_decoder
    return '\n'.join(
        [
            "include 'configs/runs/pretrain.gin'",
            '',
            "MODEL_DIR = 'runs/pretrain'",
            f'BATCH_SIZE = {batch_size}',
            f'VOCAB_SIZE = {model.config.vocab_size:_}',
            *writes(model.config, sequence_length),
            '',
        ]
    )


def _write_decoder(config: Any, sequence_length: int) -> list[str]:
    lines = [f'SEQUENCE_LENGTH = {sequence_length}', '']
    for field in dataclasses.fields(TransformerConfig):
        value = getattr(config, field.name)
        if field.name in _NOT_WRITTEN or (
            value == field.default and field.name not in _OF_PRETRAIN
        ):
            continue
        if isinstance(value, RopeScaling | ExpertsConfig):
            kind = type(value).__name__
            lines += [f'TransformerConfig.{field.name} = @{kind}()']
            lines += _bind(kind, _changed(value))
        else:
            lines += _bind('TransformerConfig', {field.name: value})
    return lines


def _changed(settings: RopeScaling | ExpertsConfig) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    pairs = ((field, getattr(settings, field.name)) for field in dataclasses.fields(settings))
    return {field.name: value for field, value in pairs if value != field.default}


def _write_t5(config: Any, sequence_length: int) -> list[str]:
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(T5Config)
        if getattr(config, field.name) != field.default and field.name not in _NOT_WRITTEN
    }
    return [
        f"SEQUENCE_LENGTH = {{'inputs': {sequence_length}}}",
        '',
        'TrainConfig.objective = @EncoderDecoder()',
        'EncoderDecoder.model = @T5()',
        'T5.config = @T5Config()',
        'T5Config.vocab_size = %VOCAB_SIZE',
        *_bind('T5Config', settings | {'dtype': str(config.dtype)}),
        '',
        'TrainConfig.task = @SpanCorruption()',
        'SpanCorruption.source = @TextFiles()',
    ]


def _bind(name: str, settings: Mapping[str, Any]) -> list[str]:
    for key, value in settings.items():
        if not isinstance(value, str | int | float | tuple | None) or callable(value):
            raise ConfigError(f'{name}.{key} is {value!r}, which a gin file cannot say')
    return [f'{name}.{key} = {value!r}' for key, value in settings.items()]
