"""Rotary positions.

Suffixes of array names: B batch, L length, H heads, N head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from train.models.config import RopeScaling


def find_rotation(
    positions_BL: jax.Array, head_dim: int, wavelength: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sines and cosines of rotary positions, each [batch, length, 1, head_dim / 2]."""
    half = head_dim // 2
    frequency_N = wavelength ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling:
        kept_N = jnp.zeros(half)
        if scaling.original_length:
            turns_N = scaling.original_length * frequency_N / (2 * jnp.pi)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            kept_N = jnp.clip((turns_N - low) / (high - low), 0, 1)
        frequency_N *= kept_N + (1 - kept_N) / scaling.factor
    angle = positions_BL[:, :, None, None].astype(jnp.float32) * frequency_N
    return jnp.sin(angle), jnp.cos(angle)


def rotate(x_BLHN: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each pair (i, i + head_dim / 2) of a head."""
    sin, cos = rotation
    a, b = jnp.split(x_BLHN.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHN.dtype)
