"""What to write instead of a keyword that a method does not take."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from partitioning.rules import nearest

_P = ParamSpec('_P')
_R = TypeVar('_R')
_REFUSED = re.compile(r"unexpected keyword argument '(\w+)'|as keyword arguments: '(.+)'")


def explain_keywords(
    otherwise: str = '', **instead: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator whose TypeErrors about keywords say what to write.

    Args:
      otherwise: what to write instead of a keyword that is like none of the function.
      **instead: what to write instead of keywords of other functions, by keyword.
    """

    def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        known = [
            p.name for p in inspect.signature(fn).parameters.values() if p.kind > p.POSITIONAL_ONLY
        ]
        method = fn.__name__

        @functools.wraps(fn)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return fn(*args, **kwargs)
            except TypeError as error:
                below = error.__traceback__ and error.__traceback__.tb_next
                refused = _REFUSED.search(str(error))
                if below is not None or refused is None:  # an error inside the function
                    raise
                name = refused[1] or refused[2].split(',')[0]
                near = nearest(name, known)
                hint = instead.get(name) or ('' if near else otherwise)
                raise TypeError(
                    f'{method} has no keyword {name!r}{f": {hint}" if hint else f".{near}"}'
                ) from None

        return call

    return decorate


def explain_positions(instead: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator of `__init__` that says what to write instead of too many arguments by position.

    Args:
      instead: what to write.
    """

    def decorate(init: Callable[_P, _R]) -> Callable[_P, _R]:
        known = inspect.signature(init).parameters.values()
        _, *names = [p.name for p in known if p.kind == p.POSITIONAL_OR_KEYWORD]

        @functools.wraps(init)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if len(args) > len(names) + 1:
                made, *given = args
                raise TypeError(
                    f'{type(made).__name__} takes {len(names)} arguments by position, '
                    f'{" and ".join(names)}, but got {len(given)}: {instead}'
                )
            return init(*args, **kwargs)

        return call

    return decorate
