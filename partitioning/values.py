"""Values of users as error messages show them, on one line, whatever they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

_LONGEST = 80  # characters


def value_str(x: Any) -> str:
    """A value in a message: its repr if that is one short line, or its type and size.

    Arrays are shown as `float32[8, 16]`, and what holds arrays as `a tuple of 2` or `a TrainState`.
    """
    if hasattr(x, 'dtype') and hasattr(x, 'shape') and not isinstance(x, type):
        return array_str(x)
    if callable(x) and hasattr(x, '__name__'):
        return f'the function {x.__name__}'
    if any(hasattr(leaf, 'dtype') for leaf in jax.tree.leaves(x)):
        return kind_str(x)
    shown = repr(x)
    return shown if len(shown) <= _LONGEST and '\n' not in shown else kind_str(x)


def array_str(x: Any) -> str:
    """The dtype and shape of an array or a number: `float32[8, 16]`, `int[]`."""
    return f'{getattr(x, "dtype", type(x).__name__)}{list(np.shape(x))}'


def kind_str(x: Any) -> str:
    """The type of a value with an article, and the length of a container: `a tuple of 3`."""
    kind = 'numpy array' if isinstance(x, np.ndarray) else type(x).__name__
    is_container = isinstance(x, tuple | list | str | Mapping) and not hasattr(x, '_fields')
    count = f' of {len(x)}' if is_container else ''
    return f'{"an" if kind[0] in "AEIOUaeiou" else "a"} {kind}{count}'
