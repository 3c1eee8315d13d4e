"""Abstract arguments of functions of equinox, which takes only arrays as arguments of jit.

`eqx.filter_jit` makes a constant of everything that is no array, ShapeDtypeStructs included. While
a function is traced here, it takes them for arrays.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax

_MODULE, _TEST = 'equinox._jit', 'is_array'


@contextlib.contextmanager
def structs_as_arrays() -> Iterator[None]:
    """Lets `eqx.filter_jit` take ShapeDtypeStructs as arrays; does nothing without equinox."""
    module: Any = sys.modules.get(_MODULE)
    is_array = getattr(module, _TEST, None)
    if is_array is None:
        yield
        return
    setattr(module, _TEST, lambda x: is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    try:
        yield
    finally:
        setattr(module, _TEST, is_array)
