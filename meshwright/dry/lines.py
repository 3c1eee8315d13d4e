"""Which line of a script is running, and which of its calls could not be imitated."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax

from meshwright import jax_private
from meshwright.dry.stand_in import StandIn
from meshwright.user_lines import short_source, user_line

_OWN = Path(__file__).parent
_PACKAGE = f'{_OWN.parent}{os.sep}'
# Modules whose errors a script would see on the machine too: they stand for arrays and files.
_LIKE_THE_MACHINE = {str(_OWN / name) for name in ('stand_in.py', 'stores.py', 'libraries.py')}


def line_of_script(frame: FrameType | None = None) -> str:
    """The 'file:line' of the script that is running, or that a frame belongs to."""
    frame, stack = frame or sys._getframe(1), []
    while frame is not None:
        if not _is_own(frame.f_code.co_filename):
            stack.append(f'{frame.f_code.co_filename}:{frame.f_lineno}')
        frame = frame.f_back
    return user_line(stack)


def find_refusal(error: BaseException) -> str | None:
    """One line about a call that could not be imitated; None if a script failed by itself."""
    frames = list(_frames(error.__traceback__))
    if not frames:
        return None
    *_, (last, _) = frames
    file = last.f_code.co_filename
    missing = getattr(error, 'name', '') if isinstance(error, AttributeError) else ''
    asked = getattr(error, 'obj', None)
    if missing and isinstance(asked, StandIn):
        if not jax_private.has_attribute_of_arrays(missing):
            return None
        reason = f'an array without values has no `{missing}`'
    elif missing and type(asked).__module__.startswith(__package__):
        reason = f'there is no `{missing}` of other processes'
    elif isinstance(error, jax.errors.JaxRuntimeError) and 'compile-only' in str(error):
        reason = str(error).partition('\n')[0]
    elif _is_own(file) and file not in _LIKE_THE_MACHINE and not isinstance(error, ValueError):
        reason = f'{type(error).__name__}: {error}'.partition('\n')[0]
    else:
        return None
    stack = [f'{frame.f_code.co_filename}:{line}' for frame, line in reversed(frames)]
    source = user_line(stack)
    at = len(stack) - 1 - stack.index(source)
    called = _name_of(frames[at + 1][0]) if at + 1 < len(frames) else f'`{missing}`'
    return f'{short_source(source)}: {called} cannot be imitated: {reason}'


def _frames(traceback: TracebackType | None) -> Any:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _is_own(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _name_of(frame: FrameType) -> str:
    name = getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)
    module = frame.f_globals.get('__name__', '')
    if _is_own(frame.f_code.co_filename):
        return 'this call'
    return f'{module}.{name}'.replace('jax._src.', 'jax.')
