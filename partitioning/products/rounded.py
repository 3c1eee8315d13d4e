"""Products of arrays that are rounded to 8 bits, with one scale for each row and each column.

A float array is approximately `values * scale`. A scale has size 1 along the dimensions that the
product sums over, so it multiplies the result, and matrix units see 8 bits only.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Rounded(NamedTuple):
    """An array in 8 bits.

    Attributes:
      values: the values, int8 or of a float type of 8 bits.
      scale: what multiplies them, float32, of size 1 along the dimensions that are summed.
    """

    values: jax.Array
    scale: jax.Array


class Rounding(Protocol):
    """Rounds arrays to 8 bits. It is hashable, because compiled functions depend on it."""

    def round(self, x: jax.Array, summed: tuple[int, ...], *, gradient: bool) -> Rounded:
        """Rounds an array that a product sums over the dimensions `summed`.

        `gradient` tells whether the array is the gradient of a result.
        """


def summed_dimensions(letters: str, result: str) -> tuple[int, ...]:
    """Returns the dimensions of an array, by its letters, that an einsum sums over."""
    return tuple(d for d, letter in enumerate(letters) if letter not in result)


def spread(scale: jax.Array, letters: str, target: str) -> jax.Array:
    """Reshapes the scale of an array with these letters, so that it multiplies one with `target`.

    Dimensions that the target lacks must have size 1.
    """
    kept = [letter for letter in letters if letter in target]
    scale = jnp.squeeze(scale, summed_dimensions(letters, target))
    scale = scale.transpose(sorted(range(len(kept)), key=lambda d: target.index(kept[d])))
    return jnp.expand_dims(scale, summed_dimensions(target, letters))


def multiply_values(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies two arrays of 8 bits, like `jnp.einsum`, in float32.

    Integers are summed in int32, which cannot overflow below 2**17 summands, and floats in float32.
    """
    whole = jnp.issubdtype(a.dtype, jnp.integer)
    y = jnp.einsum(equation, a, b, preferred_element_type=jnp.int32 if whole else jnp.float32)
    return y.astype(jnp.float32)
