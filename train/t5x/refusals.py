"""Settings of T5X that have no equal here: refused by name, unless they are off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train.errors import ConfigError


def off(key: str, value: Any, why: str) -> None:
    """A setting is off: None, False, zero or empty.

    Args:
      key: the setting as a gin file has it, `utils.DatasetConfig.module`.
      value: what it is.
      why: what is so here that it cannot be honoured.

    Raises:
      ConfigError: it is on.
    """
    if value is not None and value is not False and value not in (0, (), [], {}):
        raise refusal(key, value, f'{why}; leave it out')


def only(key: str, value: Any, allowed: Sequence[Any], why: str) -> None:
    """A setting has one of the values that mean something here; the first is the one to write.

    Raises:
      ConfigError: it has another one.
    """
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise refusal(key, value, f'{why}; write {key} = {allowed[0]!r}')


def number(key: str, value: Any, allowed: str) -> None:
    """A setting is a number of an interval.

    Args:
      key: the setting.
      value: what it is.
      allowed: the interval in its usual signs, such as `[0, 1)` or `(0, inf)`; `(0, 1] or None`
        takes None too.

    Raises:
      ConfigError: it is none, or outside.
    """
    interval, _, or_none = allowed.partition(' or ')
    if value is None and or_none:
        return
    least, most = (float(end) for end in interval[1:-1].split(','))
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise refusal(key, value, f'it must be a number in {allowed}')
    above = value >= least if interval[0] == '[' else value > least
    below = value <= most if interval[-1] == ']' else value < most
    if not (above and below):
        raise refusal(key, value, f'it must be a number in {allowed}')


def expect(key: str, value: Any, kind: type, written: str) -> None:
    """A setting is an object of its kind, as `written` makes it in a gin file.

    Raises:
      ConfigError: it is none, the class itself for one.
    """
    if not isinstance(value, kind):
        raise refusal(key, value, f'write {written}, with the brackets')


def expect_class(key: str, value: Any, kind: type, written: str) -> None:
    """A setting is a class, as `written` names it in a gin file.

    Raises:
      ConfigError: it is another one, or none.
    """
    if not isinstance(value, type) or not issubclass(value, kind):
        raise refusal(key, value, f'write {written}, without brackets; there is no other one')


def refusal(key: str, value: Any, why: str) -> ConfigError:
    """The error for a value that cannot be honoured."""
    shown = f'@{value.__name__}' if hasattr(value, '__name__') else repr(value)
    return ConfigError(f'{key} is {shown if len(shown) < 100 else shown[:100] + "..."}: {why}')
