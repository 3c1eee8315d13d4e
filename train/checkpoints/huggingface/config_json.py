"""Reads `config.json`, the settings of a Hugging Face model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from partitioning.untrusted_text import parse_json
from train.errors import ConfigError, first_line

FILE = 'config.json'
MAX_BYTES = 2**20
MOST_LAYERS = 1_000  # Layers are listed one by one.
_COUNTS_OF_LAYERS = ('num_hidden_layers', 'num_layers', 'num_decoder_layers', 'n_layer')


@dataclasses.dataclass(frozen=True)
class ConfigJson:
    """The settings of a model by name, such as 'hidden_size'. `where` is the file, for messages."""

    values: Mapping[str, Any]
    where: str

    def __post_init__(self) -> None:
        for key in _COUNTS_OF_LAYERS:
            count = self.values.get(key)
            if isinstance(count, int | float) and count > MOST_LAYERS:
                raise ConfigError(
                    f'{self.where}: {key} is {count:,}: at most {MOST_LAYERS:,} are read'
                )

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, or the default if it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """A setting that has no default. Raises a ConfigError if it is missing."""
        if self.get(key) is None:
            raise ConfigError(f'{self.where} has no {key}: a {self.get("model_type")} needs it')
        return self.values[key]

    def require(self, key: str, *values: Any, default: Any = None) -> None:
        """Checks that a setting has one of the values that our models can compute."""
        if (value := self.get(key, default)) not in values:
            raise self.cannot(key, value, ' or '.join(map(repr, values)))

    def cannot(self, key: str, value: Any, allowed: str) -> ConfigError:
        """The error for a setting that our models cannot express."""
        return ConfigError(
            f'{self.where}: {key} is {value!r}, which the model here cannot compute. It can '
            f'compute {allowed}'
        )


def read_config(folder: epath.Path) -> ConfigJson:
    """Reads the settings of the model in a folder.

    Raises:
      ConfigError: if the file is missing or malformed, or if the model is quantized or an adapter.
    """
    file = folder / FILE
    if not folder.is_dir():
        raise ConfigError(
            f'{folder} is not a folder: download the model, for example with `hf download NAME '
            '--local-dir FOLDER`, and write the path of its folder'
        )
    if not file.exists():
        if (folder / 'adapter_config.json').exists():
            raise ConfigError(
                f'{folder} is an adapter, not a model: merge it into its model with '
                'model.merge_and_unload(), and save that'
            )
        raise ConfigError(f'{folder} has no {FILE}: a Hugging Face model has one')
    config = read_config_file(file)
    quantized = config.get('quantization_config')
    if quantized is not None:
        method = quantized.get('quant_method') if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f'{file}: the model is quantized (quant_method of quantization_config is {method!r}): '
            'use the weights from which it was made, in float32, bfloat16 or float16'
        )
    return config


def read_config_file(file: epath.Path) -> ConfigJson:
    """Reads the settings of a model from a file.

    Raises a ConfigError if the file is missing or malformed.
    """
    try:
        if (size := file.stat().length) > MAX_BYTES:
            raise ValueError(f'it has {size:,} bytes, and at most {MAX_BYTES:,} are read')
        values = parse_json(file.read_bytes())
        if not isinstance(values, dict):
            raise ValueError('it contains no JSON object')
    except (ValueError, OSError) as error:
        reason = getattr(error, 'strerror', None) or first_line(error)
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            reason = f'it is not JSON ({reason}); write the path of a config.json, or of its folder'
        raise ConfigError(f'{file} cannot be read: {reason}') from error
    return ConfigJson(values, str(file))
