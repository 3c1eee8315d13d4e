"""Sample text from a model."""

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
    """The sample that a run shows at its end.

    Attributes:
      prompt: the text that the model continues.
      length: the number of tokens, including the prompt.
      temperature: the temperature of the softmax. 0 always takes the most likely token.
    """

    prompt: str = '\n'
    length: int = 256
    temperature: float = 0.8

    def __post_init__(self) -> None:
        check_counts(**{'SampleConfig.length': self.length})
        if not isinstance(self.prompt, str):
            raise ConfigError(f'SampleConfig.prompt is {self.prompt!r}: it must be a string')
        if not isinstance(self.temperature, int | float) or not self.temperature >= 0:
            raise ConfigError(
                f'SampleConfig.temperature is {self.temperature!r}: it must be a number >= 0'
            )


def prompt_tokens(config: SampleConfig, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the tokens of the prompt, int32 [tokens]. An empty prompt becomes the separator.

    Raises:
      ConfigError: if the prompt leaves no room for a continuation.
    """
    [tokens] = tokenizer.encode(['the prompt'], [config.prompt.encode()])
    tokens = tokens if len(tokens) else np.array([tokenizer.separator])
    if len(tokens) >= config.length:
        raise ConfigError(
            f'SampleConfig.length is {config.length}, but the prompt already has {len(tokens)} '
            f'tokens: use {len(tokens) + 1} or more'
        )
    return tokens.astype(np.int32)


def sample_text(
    partitioner: BasePartitioner,
    model: Any,
    params: Any,
    params_specs: Any,
    config: SampleConfig,
    prompt: np.ndarray,
    tokenizer: Tokenizer,
    seed: int,
) -> str:
    """Returns the model's continuation of a prompt, without the prompt.

    The mesh needs at least one row per data shard. All rows continue the same prompt, and the first
    one is returned.

    Args:
      partitioner: lays out the sampling over the mesh.
      model: the linen module.
      params: its parameters.
      params_specs: the PartitionSpecs of the parameters.
      config: the length and the temperature.
      prompt: int32 [tokens].
      tokenizer: decodes the continuation.
      seed: the seed of the sampling.
    """
    rows = np.tile(prompt, (partitioner.data_mesh_size, 1))
    # A sample is one document. If the separator is the last token, it is never sampled.
    separator_is_last = tokenizer.separator == tokenizer.num_tokens - 1
    num_tokens = tokenizer.num_tokens - separator_is_last
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

    sampler = partitioner.partition(continue_prompt, (params_specs, spec), None)
    continuation = np.asarray(sampler(params, tokens_BL))[0, len(prompt) :]
    return tokenizer.decode(continuation).decode(errors='replace')
