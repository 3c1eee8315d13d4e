"""Tells when a jitted function is compiled again, and which argument was the reason.

jax says nothing when a second call compiles: the step is merely slow. A watched function has jax's
own speed, because only what jax lowers is looked at; nothing is traced, and no argument is read in
calls that jax has compiled already.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax

from meshwright.calls.differences import list_differences
from meshwright.jax_private import TracedCall, on_lower
from meshwright.user_lines import is_library
from partitioning.untrusted_text import printable

Report = Callable[[str], None]

# .watches: the watches whose function runs in this thread, with the arguments of the call
_active = threading.local()
_lowered: weakref.WeakSet[Any] = weakref.WeakSet()  # what was compiled already
_installed = False


class Watch:
    """The compilations of a function, or of all functions that are called while it is entered.

    Attributes:
      recompilations: one line for each compilation after the first of a function, such as
        "train_step was compiled again: state['step'] was weakly typed int32[] and is int32[]".
    """

    def __init__(self, fn: Any = None, *, report: Report | None = None):
        self.recompilations: list[str] = []
        self._fn = fn
        self._name = getattr(fn, '__name__', '')
        self._report = report or _print
        self._kept: dict[Any, list[tuple[TracedCall, dict[str, str]]]] = {}
        if fn is not None:
            with contextlib.suppress(AttributeError, TypeError):
                functools.update_wrapper(self, fn, updated=())
        _install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._fn is None:
            raise ValueError('this watch has no function: write watch(fn), or enter it by `with`')
        try:
            watches = _active.watches
        except AttributeError:
            watches = _watches()
        watches.append((self, args, kwargs))
        try:
            return self._fn(*args, **kwargs)
        finally:
            watches.pop()

    def __getattr__(self, name: str) -> Any:
        if name == '_fn' or self._fn is None:
            raise AttributeError(name)
        return getattr(self._fn, name)  # such as `trace` and `lower`

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __enter__(self) -> Self:
        _watches().append((self, (), {}))
        return self

    def __exit__(self, *error: Any) -> None:
        watches = _watches()
        watches.remove(next(entry for entry in reversed(watches) if entry[0] is self))

    @property
    def compilations(self) -> int:
        """How often something was compiled."""
        return sum(map(len, self._kept.values()))

    def assert_compiled_once(self) -> None:
        """Raises AssertionError unless each function was compiled exactly once."""
        if not self._kept:
            name = self._name or 'anything'
            raise AssertionError(
                f'{name} was not compiled while it was watched: call the watched function, for '
                'arguments that jax has not compiled it for'
            )
        if self.recompilations:
            raise AssertionError('\n'.join(self.recompilations))

    def see(self, call: TracedCall, args: Any, kwargs: Any) -> None:
        """Records what jax compiles, in a call with these arguments."""
        if not self._is_mine(call):
            return
        source = 'the function' if self._fn is not None else _source(call)
        kept = self._kept.setdefault(source, [])
        values = _static_values(args, kwargs)
        if kept:
            line = _explain(call, values, kept)
            self.recompilations.append(line)
            self._report(line)
        kept.append((call, values))

    def _is_mine(self, call: TracedCall) -> bool:
        if self._fn is None:
            path = _source(call).rpartition(' at ')[2]
            return not is_library(path)
        return not self._name or call.name == self._name or call.name.startswith('<')


def watch(fn: Any = None, *, report: Report | None = None) -> Watch:
    """Watches a jitted function, and reports in one line why it is compiled again.

    Usage:
      train_step = mw.watch(jax.jit(train_step))         # or @mw.watch above @jax.jit
      with mw.watch() as seen:                           # all functions of this thread
          train()
      seen.assert_compiled_once()                        # in a test

    A watched function is called as before, in nearly the same time, and `forecast` and the others
    take it, too.

    Args:
      fn: what `jax.jit`, `nnx.jit` or `eqx.filter_jit` returned; by default, the watch sees all
        functions outside of libraries that are called while it is entered.
      report: receives each line; by default, it is printed to the standard error.

    Raises:
      ValueError: if the function is not jitted.
    """
    if fn is not None and not hasattr(fn, 'lower'):
        name = getattr(fn, '__name__', repr(fn))
        raise ValueError(
            f'{name} is not jitted, so it is never compiled: write watch(jax.jit({name}))'
        )
    return Watch(fn, report=report)


def _watches() -> list[tuple[Watch, Any, Any]]:
    if not hasattr(_active, 'watches'):
        _active.watches = []
    watches: list[tuple[Watch, Any, Any]] = _active.watches
    return watches


def _install() -> None:
    """Puts a listener where jax lowers functions, once in a process."""
    global _installed
    if not _installed:
        _installed = True
        owner, name, replacement = on_lower(_seen)
        setattr(owner, name, replacement)


def _seen(computation: Any, call: TracedCall) -> None:
    watches = _watches()
    if not watches:
        return
    # jax returns the same object for what it has compiled already.
    is_new = computation not in _lowered
    _lowered.add(computation)
    for one, args, kwargs in watches if is_new else ():
        one.see(call, args, kwargs)


def _explain(
    call: TracedCall, values: dict[str, str], kept: Sequence[tuple[TracedCall, dict[str, str]]]
) -> str:
    """The difference to the compilation that is most like this one."""
    again = f'{call.name} was compiled again'
    differences = min((_differences(*one, call, values) for one in kept), key=len)
    if not differences:
        return (
            f'{again}: its arguments have the same types and layouts, so a setting of jax, a mesh '
            'context, a static argument or a cleared cache has changed'
        )
    others = len(differences) - 1
    return f'{again}: {differences[0]}' + (f' (and {others} more)' if others else '')


def _differences(
    before: TracedCall, held: dict[str, str], after: TracedCall, values: dict[str, str]
) -> list[str]:
    """What differs between two compilations: arrays, or else what is not an array."""
    found = list(list_differences(before, after))
    changed = [k for k in values if k in held and values[k] != held[k]] if not found else []
    return found or [f'the static {k} was {held[k]} and is {values[k]}' for k in changed]


def _static_values(args: Any, kwargs: Any) -> dict[str, str]:
    """What is not an array in the arguments of a call, by its path."""
    found = {}
    for path, leaf in _leaves(args, kwargs):
        if not hasattr(leaf, 'shape'):
            text = printable(repr(leaf))
            found[path] = text if len(text) <= 60 else f'{text[:59]}…'
    return found


def _leaves(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    named = [(f'argument {i}', x) for i, x in enumerate(args)]
    for name, value in (*named, *kwargs.items()):
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            yield f'{name}{jax.tree_util.keystr(path)}', leaf


def _source(call: TracedCall) -> str:
    return str(call.jaxpr.jaxpr.debug_info.func_src_info)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
