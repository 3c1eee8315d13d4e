"""Errors of runs of several processes, and a table of the settings in which processes differ."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from train.errors import ConfigError
from train.processes.signals import RESTARTABLE

_LONGEST_VALUE = 60  # characters of a value in the table
_MOST_ROWS = 20


class NotTogether(ConnectionError):
    """The processes of a run have not found each other in time; starting again may help."""

    exit_code = RESTARTABLE


class Disagreement(ConfigError):
    """The processes of a run differ in what they must have in common, by the table `details`."""

    def __init__(self, message: str, details: str = ''):
        super().__init__(message)
        self.details = details


def raised_everywhere(error: BaseException) -> bool:
    """Whether all processes raise an error together. Then no process has to tell the others."""
    return bool(getattr(error, 'raised_everywhere', False))


def note_raised_everywhere(error: BaseException) -> None:
    """Notes that all processes raise an error together."""
    error.raised_everywhere = True  # type: ignore[attr-defined]


def digest(value: Any) -> str:
    """A short text that differs between different JSON values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def differences(values: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """The items whose values are not the same on all processes.

    `values` are the values of the items by name, for each process. Returns the processes with each
    value of an item, by the item and the value as text. An item that a process lacks has the value
    '(none)' there.
    """
    names = dict.fromkeys(name for one in values for name in one)
    found: dict[str, dict[str, list[int]]] = {}
    for name in names:
        processes: dict[str, list[int]] = {}
        for process, one in enumerate(values):
            text = str(one[name]) if name in one else '(none)'
            processes.setdefault(text, []).append(process)
        if len(processes) > 1:
            found[name] = processes
    return found


def disagreement(
    found: Mapping[str, Mapping[str, Sequence[int]]], count: int, advice: str
) -> Disagreement:
    """The error with what `differences` returns, at least one item, as a table."""
    table = Table('item', 'value', 'processes', box=None, pad_edge=False)
    rows = [(name, value, who) for name, of in found.items() for value, who in of.items()]
    before = None
    for name, value, who in rows[:_MOST_ROWS]:
        value = ' '.join(value.split())
        shown = value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 3] + '...'
        table.add_row('' if name == before else name, shown, _numbers(who))
        before = name
    out = io.StringIO()
    Console(file=out, width=160, markup=False, highlight=False, emoji=False).print(table)
    more = f'... and {len(rows) - _MOST_ROWS} rows more' if len(rows) > _MOST_ROWS else ''
    few = list(found)[:3]
    names = ', '.join(few) + (f' and {len(found) - len(few)} more' if len(found) > 3 else '')
    odd = sorted({p for _, _, who in rows if 2 * len(who) < count for p in who})
    which = f'process{"es" if len(odd) > 1 else ""} {_numbers(odd)}' if odd else 'the processes'
    differs = 'differs from the others' if len(odd) == 1 else 'differ'
    return Disagreement(f'{which} {differs} in {names}: {advice}', out.getvalue() + more)


def _numbers(processes: Sequence[int]) -> str:
    """Such as '0-2, 5'."""
    parts: list[list[int]] = []
    for process in sorted(processes):
        if parts and process == parts[-1][1] + 1:
            parts[-1][1] = process
        else:
            parts.append([process, process])
    return ', '.join(str(a) if a == b else f'{a}-{b}' for a, b in parts)
