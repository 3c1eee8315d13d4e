"""Writes a table with the translation of each setting in T5X's gin files.

What a setting means is read from the documentation of the parameter that receives it, so the table
says the same as the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from train.errors import ConfigError
from train.gin.checks import is_gone
from train.gin.configurables import parameters_of
from train.gin.parsing import Reference, Statement
from train.gin.selectors import Resolver, is_import
from train.t5x.modules import ALIASES

STYLES = {'equivalent': '', 'no effect': 'dim', 'none': 'red'}


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
      configurable: what is set, as the file writes it, with its scope.
      ours: the full name of what receives the setting here, or None.
      value: its value, as a gin file writes it.
      meaning: what it becomes here, or why it has no equivalent.
      status: 'equivalent', 'no effect' or 'none'.
    """

    configurable: str
    ours: str | None
    parameter: str
    value: str
    meaning: str
    status: str


def report_rows(statements: Sequence[Statement], allow: Sequence[str] = ()) -> list[Row]:
    """Returns a row for each setting that no later statement overrides, in the order of the files.

    `allow` has the additional packages that the user allows.
    """
    resolver = Resolver(statements, allow, ALIASES)
    macros = {s.macro: s.parsed.value for s in statements if s.macro}
    rows: dict[tuple[str, str], Row] = {}
    for statement in statements:
        if is_import(statement):
            resolver.add_import(statement)
        elif statement.is_binding:
            row = _row(statement, resolver, macros)
            rows[row.configurable, row.parameter] = row
    return list(rows.values())


def _row(statement: Statement, resolver: Resolver, macros: Mapping[str, Any]) -> Row:
    """The row of one statement, in which names may have no equivalent."""
    parsed = statement.parsed
    name = f'{parsed.scope}/{parsed.selector}' if parsed.scope else parsed.selector
    value = _format(parsed.value, macros)
    try:
        configurable = resolver.resolve(parsed.selector, statement)
        for reference in statement.references:
            if not reference.is_macro:
                resolver.resolve(reference.selector, statement)
    except ConfigError as error:
        why = str(error).removeprefix(f'{statement.place}: ')
        return Row(name, None, parsed.arg_name, value, f'no equivalent: {why}', 'none')
    if configurable is None:
        return Row(name, 'gin', parsed.arg_name, value, 'the same', 'equivalent')
    meaning, status = describe(configurable, parsed.arg_name)
    return Row(name, configurable.selector, parsed.arg_name, value, meaning, status)


def describe(configurable: Any, parameter: str) -> tuple[str, str]:
    """What a parameter means here, and the status of its row, given gin's record of what has it."""
    if why := is_gone(configurable, parameter, ALIASES):
        return f'no effect: T5X no longer has it, and {why}', 'no effect'
    if parameter not in parameters_of(configurable):
        return f'no equivalent: {configurable.selector} has no such setting', 'none'
    text = find_description(configurable.wrapped, parameter)
    if text is None:
        return 'the same', 'equivalent'
    no_effect = re.search(r'no effect(?! if| unless| when)', text)
    return text, 'no effect' if no_effect else 'equivalent'


def find_description(function: Any, parameter: str) -> str | None:
    """The description of a parameter in the documentation of a function or class, if it has one."""
    classes = function.__mro__ if isinstance(function, type) else [function]
    for documented in (*classes, getattr(function, '__init__', None)):
        lines = (inspect.getdoc(documented) or '').splitlines()
        names = re.compile(rf'\s+(\w+, )*\*?{parameter}(, \w+)*( \([^)]*\))?: (.*)')
        for number, line in enumerate(lines):
            if found := names.fullmatch(line):
                text, deeper = found.groups()[-1], ' ' * (len(line) - len(line.lstrip()) + 1)
                for other in lines[number + 1 :]:
                    if not other.startswith(deeper):
                        break
                    text = f'{text} {other.strip()}'
                return text
    return None


def _format(value: Any, macros: Mapping[str, Any]) -> str:
    """A value as a gin file writes it, with the values of its macros."""
    if isinstance(value, Reference):
        if value.is_macro:
            known = value.name in macros
            return _format(macros[value.name], macros) if known else f'%{value.name}'
        return f'@{value.name}{"()" if value.evaluate else ""}'
    if isinstance(value, dict):
        entries = (f'{_format(k, macros)}: {_format(v, macros)}' for k, v in value.items())
        return '{' + ', '.join(entries) + '}'
    if isinstance(value, list | tuple):
        inside = ', '.join(_format(part, macros) for part in value)
        return f'[{inside}]' if isinstance(value, list) else f'({inside})'
    return repr(value)


def describe_imports(statements: Sequence[Statement]) -> Iterator[str]:
    """Yields a line for each module of T5X's files that has no equivalent and is not imported."""
    modules = dict.fromkeys(s.parsed.module for s in statements if is_import(s))
    for module in modules:
        if ALIASES.covers(module) and module != '__main__' and not ALIASES.provides(module):
            yield f'{module}: not imported; name your own tasks instead of those that it adds'


def print_report(rows: Sequence[Row], notes: Sequence[str], console: Console) -> None:
    """Prints the table: settings with an equivalent, with no effect, and with no equivalent.

    The notes are lines below the table. Without a terminal, the table is plain text.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.configurable, []).append(row)
    for name, group in groups.items():
        _print_group(name, group, console)
    counts = {status: sum(row.status == status for row in rows) for status in STYLES}
    console.print(
        f'{len(rows)} settings: {counts["equivalent"]} have an equivalent, '
        f'{counts["no effect"]} have no effect, {counts["none"]} have no equivalent'
    )
    for note in notes:
        console.print(Text(note, 'red' if note.startswith('error') else ''), soft_wrap=True)


def _print_group(name: str, rows: Sequence[Row], console: Console) -> None:
    """Prints the settings of one configurable. Lines of a pipe have no spaces at their ends."""
    same = len({row.meaning for row in rows}) == 1 and rows[0].status == 'none'
    about = rows[0].meaning if same else rows[0].ours or ''
    style = STYLES['none'] if same else 'dim'
    table = Table.grid(padding=(0, 2))
    for share in (7, 8, 12):
        table.add_column(ratio=share, overflow='fold')
    table.expand = True
    for row in rows:
        cells = row.parameter, row.value, '' if same else row.meaning
        table.add_row(*(Text(cell, STYLES[row.status]) for cell in cells))
    with console.capture() as captured:
        console.print(Text.assemble((name, 'bold'), ('  ' + about, style)))
        console.print(Padding(table, (0, 0, 1, 2)))
    lines = captured.get().splitlines()
    console.out('\n'.join(line if console.is_terminal else line.rstrip() for line in lines))
