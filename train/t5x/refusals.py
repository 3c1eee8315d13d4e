"""Checks that refuse settings of T5X that have no equivalent here.

Each takes the setting as a gin file writes it, such as `utils.DatasetConfig.module`, with its
value, and raises a ConfigError that says what to write instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train.errors import ConfigError


def check_off(key: str, value: Any, why: str) -> None:
    """Checks that a setting, which cannot be honoured, is off: None, False, zero or empty."""
    if value is not None and value is not False and value not in (0, (), [], {}):
        raise refusal(key, value, f'{why}; leave it out')


def check_one_of(key: str, value: Any, allowed: Sequence[Any], why: str) -> None:
    """Checks that a setting has one of the values, of which the message recommends the first."""
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise refusal(key, value, f'{why}; write {key} = {allowed[0]!r}')


def check_bools(key: str, **values: Any) -> None:
    """Checks that settings of the class or function `key` are True or False."""
    for name, value in values.items():
        check_one_of(f'{key}.{name}', value, (True, False), 'it must be True or False')


def expect(key: str, value: Any, kind: type, written: str) -> None:
    """Checks that a setting is an instance of a class, which a gin file writes as `written`."""
    if not isinstance(value, kind):
        raise refusal(key, value, f'write {written}, with the parentheses')


def expect_class(key: str, value: Any, kind: type, written: str) -> None:
    """Checks that a setting is a class or a subclass of it, which a gin file names `written`."""
    if not isinstance(value, type) or not issubclass(value, kind):
        raise refusal(key, value, f'write {written}, without parentheses')


def refusal(key: str, value: Any, why: str) -> ConfigError:
    """The error for a value that cannot be honoured."""
    shown = f'@{value.__name__}' if hasattr(value, '__name__') else repr(value)
    return ConfigError(f'{key} is {shown if len(shown) < 100 else shown[:100] + "..."}: {why}')
