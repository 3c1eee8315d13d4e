"""Errors that a user can fix, explained in one line, and checks of settings that raise them."""

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# What a run does if its checkpoints or its metrics cannot be written.
FailurePolicy = Literal['stop', 'continue']
# The types of the errors that users can fix: a command that fails with one ends with exit code 2.
USER_ERRORS = (ValueError, OSError, FloatingPointError)


class ConfigError(ValueError):
    """A setting that cannot be honoured: what is wrong, where, and what to write instead."""


def check_counts(minimum: int = 1, **counts: int) -> None:
    """Checks that each setting is an integer of at least `minimum`."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < minimum:
            raise ConfigError(f'{name} is {count!r}: it must be an integer >= {minimum}')


def check_number(name: str, value: Any, allowed: str) -> None:
    """Checks that a setting is a number in an interval.

    `allowed` is the interval in the usual notation, such as `[0, 1)` or `(0, inf)`. With `(0, 1] or
    None`, None is allowed too.
    """
    interval, _, or_none = allowed.partition(' or ')
    if (value is None and or_none) or is_within(value, interval):
        return
    least, most = _ends(interval)
    bounds = f'{">=" if interval[0] == "[" else ">"} {least:g}'
    if most < math.inf:
        bounds += f' and {"<=" if interval[-1] == "]" else "<"} {most:g}'
    raise ConfigError(
        f'{name} is {value!r}: it must be a number {bounds}{", or None" if or_none else ""}'
    )


def is_within(value: Any, interval: str) -> bool:
    """Whether a value is a number in an interval, which is written as for `check_number`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    least, most = _ends(interval)
    above = value >= least if interval[0] == '[' else value > least
    return above and (value <= most if interval[-1] == ']' else value < most)


def _ends(interval: str) -> tuple[float, float]:
    least, most = interval[1:-1].split(',')
    return float(least), float(most)


_type_hints = functools.cache(get_type_hints)  # settings are made often, and this is slow


def check_fields(kind: type, settings: Any, owner: str = '', **intervals: str) -> None:
    """Checks that the fields of a dataclass have the values that their types allow.

    Fields of other types than bools, numbers, literals and classes of settings are not checked.

    Args:
      kind: the class whose fields are checked. Subclasses may add any fields to them.
      settings: an instance of this class, or of a subclass.
      owner: what precedes the names of its fields in messages, such as `Pipeline.`.
      intervals: the interval of each number that may not be every integer >= 1 or number > 0, as
        for `check_number`. Of an interval of integers, only the least one counts.
    """
    for field, hint in _type_hints(kind).items():
        name, value = f'{owner}{field}', getattr(settings, field)
        hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if (value is None and NoneType in hints) or len({*hints} - {NoneType}) > 1:
            continue
        hint = next(one for one in hints if one is not NoneType)
        interval = intervals.get(field, '')
        if get_origin(hint) is Literal:
            choices = (*[None] * (len(hints) > 1), *get_args(hint))
            if value not in choices:
                raise ConfigError(f'{name} is {value!r}: use {" or ".join(map(repr, choices))}')
        elif hint is bool and not isinstance(value, bool):
            raise ConfigError(f'{name} is {value!r}: use True or False; write {name} = True')
        elif hint is int:
            check_counts(int(interval[1:].partition(',')[0] or 1), **{name: value})
        elif hint is float:
            or_none = ' or None' if len(hints) > 1 else ''
            check_number(name, value, (interval or '(0, inf)') + or_none)
        elif (
            isinstance(hint, type)
            and dataclasses.is_dataclass(hint)
            and not isinstance(value, hint)
        ):
            article = 'an' if hint.__name__[0] in 'AEIO' else 'a'
            raise ConfigError(f'{name} is {value!r}: it must be {article} {hint.__name__}')


def check_seconds(**values: float) -> None:
    """Checks that each setting is a number of seconds above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f'{name} is {value!r}: it must be a number of seconds > 0')


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if there is no message.

    The settings of an array, which TensorStore writes behind its messages, are left out.
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition(" [tensorstore_spec='")[0]


def describe_error(error: Exception) -> str:
    """Returns what went wrong and with which file, such as 'No space left on device: runs/a/b'."""
    if found := re.search(r"os_error_code='(\d+)'", str(error)):  # of TensorStore, with much else
        return os.strerror(int(found[1]))
    if not isinstance(error, OSError) or error.strerror is None:
        return first_line(error)
    return error.strerror if error.filename is None else f'{error.strerror}: {error.filename}'


@contextlib.contextmanager
def os_errors_as(message: str) -> Iterator[None]:
    """Raises a ConfigError with this message and the reason in place of an OSError of the body."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f'{message} {error.strerror or error}') from error


def import_optional(module: str, extra: str, user: str) -> Any:
    """Imports a module of an optional package.

    Raises a ConfigError if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split('.')[0]
        raise ConfigError(
            f"{user} needs the package {package}: pip install 'meshwright[{extra}]'"
        ) from error
