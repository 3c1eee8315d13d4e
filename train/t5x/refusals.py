"""Checks that refuse settings of T5X that have no equivalent here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train.errors import ConfigError


def check_off(key: str, value: Any, why: str) -> None:
    """Checks that a setting is off: None, False, zero or empty.

    Args:
      key: the setting as written in a gin file, such as `utils.DatasetConfig.module`.
      value: its value.
      why: the reason why it cannot be honoured.

    Raises:
      ConfigError: if the setting is on.
    """
    if value is not None and value is not False and value not in (0, (), [], {}):
        raise refusal(key, value, f'{why}; leave it out')


def check_one_of(key: str, value: Any, allowed: Sequence[Any], why: str) -> None:
    """Checks that a setting has one of the supported values.

    Args:
      key: the setting.
      value: its value.
      allowed: the supported values. The message recommends the first one.
      why: the reason why other values cannot be honoured.

    Raises:
      ConfigError: if the setting has another value.
    """
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise refusal(key, value, f'{why}; write {key} = {allowed[0]!r}')


def check_number(key: str, value: Any, allowed: str) -> None:
    """Checks that a setting is a number in an interval.

    Args:
      key: the setting.
      value: its value.
      allowed: the interval in the usual notation, such as `[0, 1)` or `(0, inf)`. With
        `(0, 1] or None`, None is allowed too.

    Raises:
      ConfigError: if the value is not a number or lies outside the interval.
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
    """Checks that a setting is an instance of a class.

    Args:
      key: the setting.
      value: its value.
      kind: the class.
      written: how a gin file writes such an instance, for the message.

    Raises:
      ConfigError: if it is not, for example if it is the class itself.
    """
    if not isinstance(value, kind):
        raise refusal(key, value, f'write {written}, with the parentheses')


def expect_class(key: str, value: Any, kind: type, written: str) -> None:
    """Checks that a setting is a class.

    Args:
      key: the setting.
      value: its value.
      kind: the class, which may be subclassed.
      written: how a gin file names the class, for the message.

    Raises:
      ConfigError: if it is not.
    """
    if not isinstance(value, type) or not issubclass(value, kind):
        raise refusal(key, value, f'write {written}, without parentheses')


def refusal(key: str, value: Any, why: str) -> ConfigError:
    """The error for a value that cannot be honoured."""
    shown = f'@{value.__name__}' if hasattr(value, '__name__') else repr(value)
    return ConfigError(f'{key} is {shown if len(shown) < 100 else shown[:100] + "..."}: {why}')
