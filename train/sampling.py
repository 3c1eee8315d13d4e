"""A sample of what a model writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import gin
import jax
import numpy as np
from jax.sharding import NamedSharding

from partitioning import BasePartitioner
from train.data.text.tokenizers import Tokenizer
from train.errors import ConfigError, check_counts
from train.models.decoding import decode


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text to show at the end of a run.

    Attributes:
      prompt: what the model continues.
      length: tokens, those of the prompt included.
      temperature: of the sampling; 0 takes the likeliest token.
    """

    prompt: str = '\n'
    length: int = 256
    temperature: float = 0.8

    def __post_init__(self) -> None:
        check_counts(**{'SampleConfig.length': self.length})
        if not isinstance(self.prompt, str):
            raise ConfigError(f'SampleConfig.prompt is {self.prompt!r}: it must be a string')
        if not isinstance(self.temperature, int | float) or not self.temperature >= 0:
            raise ConfigError(f'SampleConfig.temperature is {self.temperature!r}: use 0 or more')


def prompt_tokens(config: SampleConfig, tokenizer: Tokenizer) -> np.ndarray:
    """int32 [tokens] of the prompt; the separator if it has none.

    Raises:
      ConfigError: they leave no room for a continuation.
    """
    [tokens] = tokenizer.encode(['the prompt'], [config.prompt.encode()])
    tokens = tokens if len(tokens) else np.array([tokenizer.separator])
    if len(tokens) >= config.length:
        raise ConfigError(
            f'a sample of length {config.length} leaves no room after a prompt of {len(tokens)} '
            'tokens'
        )
    return tokens.astype(np.int32)


def sample_text(
    partitioner: BasePartitioner,
    model: Any,
    params: Any,
    params_axes: Any,
    config: SampleConfig,
    prompt: np.ndarray,
    tokenizer: Tokenizer,
    seed: int,
) -> str:
    """What the model makes of the prompt, without it.

    Every row of the batch that the mesh needs continues the prompt; the first one is kept.
    """
    rows = np.tile(prompt, (partitioner.data_mesh_size, 1))
    # A separator that is the last token is left out: a sample is of one document.
    separated_last = tokenizer.separator == tokenizer.num_tokens - 1
    num_tokens = tokenizer.num_tokens - separated_last
    spec = partitioner.data_partition_spec
    tokens_BL = jax.make_array_from_callback(
        rows.shape, NamedSharding(partitioner.mesh, spec), rows.__getitem__
    )

    def continue_prompt(params: Any, prompt_BL: jax.Array) -> jax.Array:
        return decode(
            model,
            params,
            prompt_BL,
            jax.random.fold_in(jax.random.key(seed), 1),
            length=config.length,
            temperature=config.temperature,
            num_tokens=num_tokens,
        )

    sampler = partitioner.partition(continue_prompt, (params_axes, spec), None)
    written = np.asarray(sampler(params, tokens_BL))[0, len(prompt) :]
    return tokenizer.decode(written).decode(errors='replace')
