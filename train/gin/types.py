"""Values that have another type than their parameter: found before anything is called with them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from gin import config_parser

from train.errors import ConfigError
from train.gin.configurables import parameters_of
from train.gin.parsing import Statement, follow_macros
from train.gin.selectors import Resolver

# Words in the types of parameters that take numbers, and words of types that take texts.
_NUMBERS = {'int', 'float', 'ArrayLike', 'Numeric', 'ScalarOrSchedule', 'Scalar'}
_TEXTS = {'str', 'Any', 'Literal', 'PathLike', 'object', 'Mapping', 'dict'}


def check_types(statements: Sequence[Statement], resolver: Resolver) -> None:
    """Checks that texts and fractions are not given to parameters that take other values.

    Only what the signature of a configurable says is compared. Raises a ConfigError if a value has
    another type than its parameter. It names the file and line, or the flag, of the value.

    Args:
      statements: the statements of all files and flags.
      resolver: finds their configurables.
    """
    macros = {s.macro: s for s in statements if s.macro}
    last: dict[tuple[str, str, str], Statement] = {}
    for statement in statements:
        if statement.is_binding:
            parsed = statement.parsed
            last[parsed.scope, parsed.selector, parsed.arg_name] = statement
    for statement in last.values():
        parsed = statement.parsed
        assert isinstance(parsed, config_parser.BindingStatement)
        source = follow_macros(statement, macros)
        if not isinstance(source.parsed.value, str | float):
            continue
        configurable = resolver.resolve(parsed.selector, statement)
        parameter = parameters_of(configurable).get(parsed.arg_name) if configurable else None
        wanted = '' if parameter is None else _wanted(source.parsed.value, parameter)
        if wanted:
            raise ConfigError(
                f'{source.place}: {parsed.selector}.{parsed.arg_name} is '
                f'{source.parsed.value!r}: it must be {wanted}'
            )


def _wanted(value: str | float, parameter: inspect.Parameter) -> str:
    """What a parameter takes in place of a value, or '' if it may take the value."""
    default, hint = parameter.default, parameter.annotation
    text = '' if hint is parameter.empty else inspect.formatannotation(hint)
    words = set(re.findall(r'\w+', text))
    kinds = words - {'None', 'Optional', 'typing', 'jax', 'optax', 'base', 'chex'}
    or_none = ' or None' if 'None' in words or 'Optional' in words else ''
    if isinstance(value, float):
        return f'an integer{or_none}' if kinds == {'int'} and value % 1 else ''
    if kinds == {'bool'} or (not kinds and isinstance(default, bool)):
        return f'True or False{or_none}'
    if kinds == {'int'}:
        return f'an integer{or_none}'
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    takes_numbers = bool(kinds & _NUMBERS) if kinds else is_number
    takes_texts = isinstance(default, str) or kinds & _TEXTS
    return f'a number{or_none}' if takes_numbers and not takes_texts else ''
