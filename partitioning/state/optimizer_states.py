"""Recognizes the state of an optimizer inside a train state, wherever it stands.

The state of optax is made of NamedTuples, which are recognized without importing optax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def flags_of_leaves(state: Any, is_leaf: Callable[[Any], bool]) -> list[bool]:
    """For each leaf of a state, whether it is inside the state of an optimizer.

    The state as a whole is not taken for an optimizer's.
    """

    def is_optimizer(x: Any) -> bool:
        return x is not state and _is_optimizer_state(x)

    flags: list[bool] = []
    for x in jax.tree.leaves(state, is_leaf=lambda x: is_leaf(x) or is_optimizer(x)):
        inside = is_optimizer(x)
        flags += [inside] * (len(jax.tree.leaves(x, is_leaf=is_leaf)) if inside else 1)
    return flags


def may_be_optimizer_state(x: Any) -> bool:
    """Whether `x` is a NamedTuple of optax, or is named like one."""
    return isinstance(x, tuple) and _kind(x.__class__) is not None


def _is_optimizer_state(x: Any) -> bool:
    """Whether `x` is optax's, or a NamedTuple like those that users write for optax.

    A NamedTuple that holds a whole train state is named alike, but has parameters, or a state of
    optax next to them.
    """
    if not may_be_optimizer_state(x):
        return False
    if _kind(x.__class__) == 'optax':
        return True
    below = jax.tree.leaves(x, is_leaf=_is_from_optax)
    return 'params' not in x._fields and not any(map(_is_from_optax, below))


def _is_from_optax(x: Any) -> bool:
    return isinstance(x, tuple) and _kind(x.__class__) == 'optax'


@functools.cache
def _kind(cls: Any) -> str | None:
    """'optax' for a NamedTuple of optax, 'alike' for one with such a name, or None."""
    if not hasattr(cls, '_fields'):
        return None
    if cls.__module__.partition('.')[0] == 'optax':
        return 'optax'
    return 'alike' if cls.__name__.endswith('State') else None
