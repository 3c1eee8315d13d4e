"""A sample of what a model writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import gin
import jax
import numpy as np
from jax.sharding import NamedSharding

from partitioning import BasePartitioner
from train.errors import ConfigError
from train.models.decoding import decode

NUM_BYTES = 256


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text to show at the end of a run.

    Attributes:
      prompt: what the model continues.
      length: bytes, the prompt included.
      temperature: of the sampling; 0 takes the likeliest byte.
    """

    prompt: str = '\n'
    length: int = 256
    temperature: float = 0.8

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(f'SampleConfig.temperature is {self.temperature!r}: use 0 or more')
        if not 0 < len(self.prompt.encode()) < self.length:
            raise ConfigError(
                f'a sample of length {self.length} leaves no room after a prompt of '
                f'{len(self.prompt.encode())} bytes (at least 1)'
            )


def sample_text(
    partitioner: BasePartitioner,
    model: Any,
    params: Any,
    params_axes: Any,
    config: SampleConfig,
    seed: int,
) -> str:
    """What the model makes of the prompt, without it.

    Every row of the batch that the mesh needs continues the prompt; the first one is kept.
    """
    prompt = np.frombuffer(config.prompt.encode(), np.uint8)
    rows = np.tile(prompt.astype(np.int32), (partitioner.data_mesh_size, 1))
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
            num_tokens=NUM_BYTES,
        )

    sampler = partitioner.partition(continue_prompt, (params_axes, spec), None)
    written = np.asarray(sampler(params, tokens_BL))[0, len(prompt) :]
    return bytes(written.astype(np.uint8)).decode(errors='replace')
