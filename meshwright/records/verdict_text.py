"""What changed in a program, as lines for a terminal or for the message of a test."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from meshwright.records.difference import Difference
from meshwright.records.verdicts import Verdict
from partitioning.plan.tables import count

WORDS = {
    'same': 'the same',
    'versions': 'the code is the same',
    'missing': 'new',
    'error': 'cannot be compared',
}


def title_of(verdict: Verdict) -> str:
    """What became of a program, in a few words."""
    if verdict.status == 'changed':
        return count(len(verdict.differences), 'change')
    return WORDS[verdict.status]


def versions_text(versions: Mapping[str, tuple[str, str]]) -> str:
    """The versions that changed: 'libtpu 0.0.51 -> 0.0.52'; '' if none did."""
    return ', '.join(f'{name} {a} -> {b}' for name, (a, b) in versions.items())


def verdict_lines(verdict: Verdict, width: int) -> Iterator[str]:
    """What became of a program, and below it each difference with what explains it.

    Args:
      verdict: the verdict.
      width: the width of the terminal.
    """
    machine = f' on {verdict.machine}' if verdict.machine else ''
    yield f'{verdict.name}{machine}: {title_of(verdict)}'
    if verdict.message:
        yield from wrapped(verdict.message, width, 2)
    if verdict.versions:
        yield from wrapped(f'versions: {versions_text(verdict.versions)}', width, 2)
    code = [one for one in verdict.differences if one.is_of_code]
    rest = [one for one in verdict.differences if not one.is_of_code]
    yield from _list('what the code says', code, width)
    yield from _list('what follows from it' if code else 'what the program does', rest, width)
    yield from _list('what the versions moved', verdict.by_versions, width)


def _list(title: str, differences: Sequence[Difference], width: int) -> Iterator[str]:
    if not differences:
        return
    yield f'  {title}:'
    for one in differences:
        yield from wrapped(one.line, width, 4)
        yield from wrapped(str(one.at), width, 8)


def wrapped(text: str, width: int, indent: int) -> list[str]:
    """Lines of an indented text; those after the first are indented by two characters more."""
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=' ' * indent,
        subsequent_indent=' ' * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
