"""Errors that a user can fix, explained in one line."""

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from typing import Any, Literal

# What a run does if its checkpoints or its metrics cannot be written.
FailurePolicy = Literal['stop', 'continue']
# The types of the errors that users can fix: a command that fails with one ends with exit code 2.
USER_ERRORS = (ValueError, OSError, FloatingPointError)


class ConfigError(ValueError):
    """A setting that cannot be honoured: what is wrong, where, and what to write instead."""


def check_counts(minimum: int = 1, **counts: int) -> None:
    """Checks that each setting is an integer of at least `minimum`.

    Args:
      minimum: the smallest value allowed.
      counts: the settings by name.

    Raises:
      ConfigError: if a setting is not an integer, or is smaller.
    """
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < minimum:
            raise ConfigError(f'{name} is {count!r}: it must be an integer >= {minimum}')


def check_seconds(**values: float) -> None:
    """Checks that each setting is a number of seconds above 0.

    Args:
      values: the settings by name.

    Raises:
      ConfigError: if a setting is not a number, or not above 0.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f'{name} is {value!r}: it must be a number of seconds > 0')


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if there is no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def describe_error(error: Exception) -> str:
    """Returns what went wrong and with which file, such as 'No space left on device: runs/a/b'."""
    if found := re.search(r"os_error_code='(\d+)'", str(error)):  # of TensorStore, with much else
        return os.strerror(int(found[1]))
    if not isinstance(error, OSError) or error.strerror is None:
        return first_line(error)
    return error.strerror if error.filename is None else f'{error.strerror}: {error.filename}'


@contextlib.contextmanager
def os_errors_as(message: str) -> Iterator[None]:
    """Raises a ConfigError in place of an OSError of the body.

    Args:
      message: the message before the reason, such as 'MODEL_DIR runs/mine cannot be written:'.

    Raises:
      ConfigError: with the message and the reason of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f'{message} {error.strerror or error}') from error


def import_optional(module: str, extra: str, user: str) -> Any:
    """Imports a module of an optional package.

    Args:
      module: the module.
      extra: the extra of meshwright that installs its package.
      user: what needs the package, for the message.

    Raises:
      ConfigError: if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split('.')[0]
        raise ConfigError(
            f"{user} needs the package {package}: pip install 'meshwright[{extra}]'"
        ) from error
