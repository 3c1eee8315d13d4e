"""Which line of a call stack is the user's, and how lines are written for people."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Packages whose lines say nothing about the program that calls them.
_LIBRARIES = 'jax|jaxlib|flax|optax|chex|numpy|einops|equinox|haiku|keras|jaxtyping|absl'
_IN_LIBRARY = re.compile(rf'/(?:site|dist)-packages/(?:{_LIBRARIES})/')
_IN_JAX = re.compile(r'/(?:site|dist)-packages/(?:jax|jaxlib)/')
_ROOT = f'{Path(__file__).parents[1]}/'
_PLUMBING = (f'{_ROOT}meshwright/', f'{_ROOT}partitioning/')
_ABSOLUTE = re.compile(r'/[^\s:]+\.py:\d+')
_STANDARD = sysconfig.get_paths()['stdlib']


def user_line(stack: Sequence[str]) -> str:
    """Returns the innermost 'file:line' of the user's code or of the model's, or ''.

    Lines of jax, flax, optax and the like are skipped, and so are the lines of `meshwright` and
    `partitioning`. If a stack has no other lines, its innermost one is returned.

    Args:
      stack: the 'file:line' of the code, and of each of its callers.
    """
    return next((line for line in stack if not is_library(line)), stack[0] if stack else '')


def stack_of_traceback(traceback: Any) -> tuple[str, ...]:
    """Returns the 'file:line' of each frame of an equation, the innermost first.

    The frames of jax are left out, as XLA leaves them out of the text of a program.
    """
    frames = () if traceback is None else traceback.frames
    return tuple(f'{f.file_name}:{f.line_num}' for f in frames if not _IN_JAX.search(f.file_name))


def short_source(source: str) -> str:
    """A 'file:line' without the folders above the package or the current folder.

    Forecasts are shared, and the folders of one computer say nothing on another.
    """
    _, installed, rest = source.rpartition('-packages/')
    if installed:
        return rest
    folder = _ROOT if source.startswith(_ROOT) else f'{os.getcwd()}/'
    path = source.removeprefix(folder)
    return '/'.join(path.split('/')[-3:]) if os.path.isabs(path) else path


def shorten_sources(text: str) -> str:
    """A text in which `short_source` has shortened every 'file:line'."""
    return _ABSOLUTE.sub(lambda found: short_source(found[0]), text)


def is_library(line: str) -> bool:
    """Whether a "file:line" is of a library, of `meshwright` or of `partitioning`."""
    path = line.rpartition(':')[0]
    if path.startswith(_PLUMBING) or _IN_LIBRARY.search(path):
        return True
    return path.startswith(_STANDARD) and '-packages' not in path
