"""T5X's learning-rate schedules, which are products of named factors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from partitioning.rules import nearest
from train.errors import ConfigError


def create_learning_rate_scheduler(
    factors: str = 'constant * linear_warmup * rsqrt_decay',
    base_learning_rate: float = 0.5,
    warmup_steps: int = 1000,
    decay_factor: float = 0.5,
    steps_per_decay: int = 20000,
    steps_per_cycle: int = 100000,
    step_offset: int = 0,
    min_learning_rate: float = 1e-8,
) -> optax.Schedule:
    """Returns a learning-rate schedule that is the product of named factors.

    Factors, with s = max(0, step - step_offset):
      constant: base_learning_rate.
      linear_warmup: min(1, s / warmup_steps).
      linear_decay: base_learning_rate * min(s / warmup_steps, 1 + decay_factor * (warmup_steps -
        s)). It already contains the base rate and the warmup, so combine it with neither
        'constant' nor 'linear_warmup'.
      rsqrt_decay: 1 / sqrt(max(s, warmup_steps)).
      rsqrt_normalized_decay: sqrt(warmup_steps / max(s, warmup_steps)).
      decay_every: decay_factor ** (s // steps_per_decay).
      cosine_decay: half a cosine from 1 to 0 over steps_per_cycle after the warmup, repeated.

    Raises a ConfigError if a number is out of range, and a ValueError if a factor is unknown.

    Args:
      factors: the names of the factors, joined by '*'.
      base_learning_rate, warmup_steps, decay_factor, steps_per_decay, steps_per_cycle: see above.
      step_offset: the step that counts as 0.
      min_learning_rate: the lower bound of the rate.
    """
    if warmup_steps < 0 or steps_per_decay <= 0 or steps_per_cycle <= 0:
        raise ConfigError(
            f'warmup_steps ({warmup_steps}) must be >= 0, steps_per_decay ({steps_per_decay}) and '
            f'steps_per_cycle ({steps_per_cycle}) must be > 0'
        )
    warmup = max(warmup_steps, 1)

    def cosine(s: jax.Array) -> jax.Array:
        progress = jnp.maximum(0.0, (s - warmup_steps) / steps_per_cycle)
        return jnp.maximum(0.0, 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))))

    # Each multiplies the rate. The order of the operations is T5X's, so the rates are the same to
    # the last digit.
    known: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
        'constant': lambda rate, s: rate * base_learning_rate,
        'linear_warmup': lambda rate, s: rate * jnp.minimum(1.0, s / warmup),
        'linear_decay': lambda rate, s: (
            rate
            * base_learning_rate
            * jnp.minimum(s / warmup, 1.0 + decay_factor * (warmup_steps - s))
        ),
        'rsqrt_decay': lambda rate, s: rate / jnp.sqrt(jnp.maximum(s, warmup)),
        'rsqrt_normalized_decay': lambda rate, s: (
            rate * jnp.sqrt(warmup) / jnp.sqrt(jnp.maximum(s, warmup))
        ),
        'decay_every': lambda rate, s: rate * decay_factor ** (s // steps_per_decay),
        'cosine_decay': lambda rate, s: rate * cosine(s),
    }
    names = [name.strip() for name in factors.split('*')]
    for name in names:
        if name not in known:
            raise ValueError(
                f'learning-rate factor {name!r} in {factors!r} is unknown.{nearest(name, known)} '
                f'The known factors are {", ".join(known)}'
            )

    def schedule(step: jax.Array | int) -> jax.Array:
        s = jnp.maximum(0.0, jnp.asarray(step, jnp.float32) - step_offset)
        rate = jnp.ones_like(s)
        for name in names:
            rate = known[name](rate, s)
        return jnp.maximum(rate, min_learning_rate)

    return schedule
