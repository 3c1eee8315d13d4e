"""Steps that were written for `jax.pmap`, with its axis bound to one device that has all rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def bind_axes(step: Callable[..., Any], axes: Sequence[str]) -> Callable[..., Any]:
    """`step` with axes of pmap of size 1, so that its collectives return what they are given."""
    for axis in axes:
        step = _bind_axis(step, axis)
    return step


def _bind_axis(step: Callable[..., Any], axis: str) -> Callable[..., Any]:
    @functools.wraps(step)
    def bound(*args: Any, **kwargs: Any) -> Any:
        # Only what depends on lax.axis_index has the dimension of the axis before [0].
        result = jax.vmap(lambda _: step(*args, **kwargs), axis_name=axis)(jnp.zeros(1))
        return jax.tree.map(lambda x: x[0], result)

    return bound
