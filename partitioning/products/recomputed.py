"""What a backward pass computes again, which does not count as work of the model."""

from __future__ import annotations

import contextlib

import jax

# The name scope in which jax traces what the backward pass of `jax.checkpoint` computes again.
RECOMPUTED = 'rematted_computation'


def computed_again() -> contextlib.AbstractContextManager[None]:
    """Inside, operations are named like those that `jax.checkpoint` computes again.

    Hand-written gradients use it for what they compute in place of keeping it, so that counts of
    FLOPs can leave it out.
    """
    return jax.named_scope(RECOMPUTED)
