"""While a partitioner traces a function, flax's own boxes behave like ours.

linen creates and reads boxes while a function is traced over a mesh, where flax's methods fail for
correct programs. DenseGeneral, for example, reads a box around a flat kernel, which has fewer
dimensions than names. flax has no hook for this. Therefore, the three methods of flax's two boxes
that depend on a mesh or on names are replaced, once per process. The new methods act like those of
`partitioning.state.linen` while a partitioner traces, and call flax's methods at any other time.
This module imports flax, so `import partitioning` does not load it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import flax.linen as nn

from partitioning.state.linen import Partitioned

_TRACING: ContextVar[bool] = ContextVar('a partitioner is tracing', default=False)
_LOCK = threading.Lock()
_METHODS = ('unbox', 'add_axis', 'remove_axis')


@contextlib.contextmanager
def boxes_like_ours() -> Iterator[None]:
    """Inside this context, in this thread, flax's boxes behave like those of `state.linen`."""
    _replace_methods()
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


def _replace_methods() -> None:
    """Replaces the methods of flax's boxes. The second call finds nothing to replace."""
    with _LOCK:
        for box in (nn.Partitioned, nn.LogicallyPartitioned):
            for name in _METHODS:
                method = vars(box).get(name)  # LogicallyPartitioned inherits two of them
                if method is not None and not hasattr(method, 'while_tracing'):
                    setattr(box, name, _switch(method, getattr(Partitioned, name)))


def _switch(flax_method: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is `ours` while a partitioner traces, and flax's otherwise."""

    @functools.wraps(flax_method)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (ours if _TRACING.get() else flax_method)(*args, **kwargs)

    method.__dict__['while_tracing'] = ours
    return method
