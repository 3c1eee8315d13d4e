"""Tracebacks with the lines of the program only, as jax makes them for its own functions.

`JAX_TRACEBACK_FILTERING=off` shows all frames, of jax and of this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import jax

from partitioning.library_files import is_own_error, is_program_frame

_P = ParamSpec('_P')
_R = TypeVar('_R')
_NOTE_OF_JAX = 'For simplicity, JAX has removed its internal frames'


def hide_own_frames(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """`fn`, whose errors show no frames of this package and of jax."""

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            keep_user_frames(error)
            raise  # alone, it adds no frame of this function

    return call


def keep_user_frames(error: Exception) -> None:
    """Removes the frames of libraries from the traceback of an error.

    The caller must then write `raise` alone. An error that this package did not mean to raise
    keeps its frames.
    """
    if getattr(jax.config, 'jax_traceback_filtering', None) == 'off':
        return
    is_own = is_own_error(error)
    if is_own and not isinstance(error, ValueError | TypeError | AttributeError):
        return
    if is_own:
        error.__dict__['explains_itself'] = True
    kept: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        if is_program_frame(traceback.tb_frame):
            kept.append(traceback)
        traceback = traceback.tb_next
    shown: TracebackType | None = None
    for one in reversed(kept):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = shown
    notes: list[Any] = getattr(error, '__notes__', [])
    if error.__dict__.get('explains_itself'):  # one line says it all
        notes[:] = [note for note in notes if _NOTE_OF_JAX not in note]
