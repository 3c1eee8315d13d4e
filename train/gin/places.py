"""Where the settings of this process were set, for messages about their values."""

from __future__ import annotations

import re
from collections.abc import Sequence

from partitioning.untrusted_text import printable
from train.gin.configurables import is_within
from train.gin.parsing import Reference, Statement

# The setting as written, such as `utils.DatasetConfig.pack` -> the statements that set it.
_settings: dict[str, list[Statement]] = {}
_macros: dict[str, Statement] = {}
# The packages of --gin_allow.
_allowed: list[str] = []


def remember(statements: Sequence[Statement]) -> None:
    """Notes the places of the statements of a configuration, and forgets an earlier one."""
    _settings.clear()
    _macros.clear()
    for statement in statements:
        if statement.macro:
            _macros[statement.macro] = statement
        elif statement.is_binding:
            parsed = statement.parsed
            _settings.setdefault(f'{parsed.selector}.{parsed.arg_name}', []).append(statement)


def allow_packages(packages: Sequence[str]) -> None:
    """Notes the packages that the user allows, and forgets an earlier configuration."""
    _allowed[:] = packages


def is_allowed(module: str) -> bool:
    """Whether the user allows a module whose name is the value of a setting."""
    return is_within(module, _allowed)


def find_place(message: str) -> str | None:
    """The place in the gin files of the setting that an error message is about, or None.

    `message` is a message that begins with a setting, such as `utils.DatasetConfig.pack is 3: ...`.

    Returns:
      The file and line, or the flag, or None if the message does not begin with a setting.
    """
    found = re.match(r'(?:(?P<scope>[\w/]+)/)?(?P<name>[\w.]+)(?: is (?P<value>.*))?', message)
    statements = _settings.get(found['name'], []) if found else []
    if not statements or found is None:
        return None
    for statement in reversed(statements):
        value = _value_of(statement).parsed.value
        in_scope = found['scope'] in (None, statement.parsed.scope)
        shown = None if isinstance(value, Reference) else repr(value)
        if in_scope and shown and (found['value'] or '').startswith(shown[:100]):
            return _value_of(statement).place
    return _value_of(statements[-1]).place


def _value_of(statement: Statement) -> Statement:
    """The statement with the value: if it is a macro, the statement that sets the macro."""
    value = statement.parsed.value
    while isinstance(value, Reference) and value.is_macro and value.name in _macros:
        statement = _macros[value.name]
        value = statement.parsed.value
    return statement


def print_note(line: str) -> None:
    """Tells the user about a setting that is accepted but has no effect."""
    print(f'note: {printable(line)}')
