"""Names of the arguments of a function by the call that is being made of it.

Libraries flatten what they pass to jax: `nnx.jit` and `eqx.filter_jit` give it arrays whose names
are "model.states[0][3]". The call that the user has made has the models themselves. A step of Keras
takes lists of arrays, and its model knows their paths.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from meshwright.calls.keras_models import state_paths
from meshwright.calls.plain_call import jax_paths, user_paths
from meshwright.jax_private import TracedCall

_MOST = 60  # frames that are looked at
_FUNCTIONS = ('self', 'fun', 'fn', 'f')  # what the caller of a function calls it


def named_by_caller(traced: TracedCall) -> TracedCall:
    """A function that is being called, with the names of its arguments in the user's call.

    Of all calls around it, the one counts whose arguments have the fewest names that end with a
    number: "states[0][3]" says less than "kernel".
    """
    now = jax_paths(traced)
    found = min([now, *_named(traced, now)], key=_count_numbers)
    if found is now:
        return traced
    return dataclasses.replace(traced, argument_names=tuple('.'.join(path) for path in found))


def _count_numbers(paths: list[tuple[str, ...]]) -> int:
    return sum(not path or path[-1].isdigit() or 'args[' in path[0] for path in paths)


def _named(traced: TracedCall, now: list[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """The paths of the arrays in the arguments of each call around this one that has just them."""
    frame: Any = sys._getframe(2)
    for _ in range(_MOST):
        if frame is None:
            return
        local = frame.f_locals
        if 'keras' in sys.modules and (paths := state_paths(local.get('self'), now, traced)):
            yield paths
        args = local.get('args')
        if isinstance(args, tuple) and args:
            callers = (local[name] for name in _FUNCTIONS if callable(local.get(name)))
            for fn in callers:
                if paths := user_paths(fn, args, traced):
                    yield paths
        frame = frame.f_back
