"""The optimizer of a run: any optax transformation, a schedule, and gradient clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax

from train.errors import ConfigError
from train.schedules import Schedule


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optax transformation with a learning rate and gradient clipping.

    Attributes:
      transform: a function that takes `learning_rate` and returns an optax transformation, such as
        `optax.adamw`.
      learning_rate: a schedule (step -> rate) or a constant.
      clip_norm: the global norm that gradients are clipped to. None disables clipping.
    """

    transform: Callable[..., optax.GradientTransformation]
    learning_rate: Schedule | float
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise ConfigError(
                f'Optimizer.transform is {self.transform!r}: it must be a function of the learning '
                'rate. In a gin file, write @optax.adamw, without parentheses'
            )
        if not callable(self.learning_rate) and not isinstance(self.learning_rate, float | int):
            raise ConfigError(
                f'Optimizer.learning_rate is {self.learning_rate!r}: it must be a number or a '
                'schedule. In a gin file, write @create_learning_rate_scheduler()'
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f'Optimizer.clip_norm is {self.clip_norm!r}: it must be greater than 0, or None'
            )

    def build(self) -> optax.GradientTransformation:
        """Returns the optax transformation, including clipping."""
        update = self.transform(learning_rate=self.learning_rate)
        if self.clip_norm is None:
            return update
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), update)

    def rate(self, step: jax.Array) -> jax.Array:
        """Returns the learning rate at a step."""
        rate = self.learning_rate
        return rate(step) if callable(rate) else jnp.float32(rate)


@gin.configurable
def decay_matrices_only(params: Any) -> Any:
    """Returns a weight-decay mask: False for the scales of norms, True for everything else."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != 'scale', params)
