"""What changed, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from meshwright.checking.history import CommitVerdicts
from meshwright.checking.verdicts import HOW_TO_UPDATE, Verdict
from meshwright.records.difference import Difference
from partitioning.plan.tables import count

WORDS = {
    'same': 'the same',
    'versions': 'the code is the same',
    'missing': 'new',
    'error': 'cannot be compared',
}


def check_text(verdicts: Sequence[Verdict], width: int = 100) -> str:
    """The verdicts of all programs, each with what changed and why.

    Args:
      verdicts: the verdicts.
      width: the width of the terminal.
    """
    lines: list[str] = []
    for verdict in verdicts:
        section = [*_section(verdict, width)]
        if lines and (len(section) > 1 or lines[-1].startswith(' ')):
            lines.append('')
        lines += section
    if any(verdict.status in ('changed', 'missing') for verdict in verdicts):
        lines += ['', f'If this is intended, {HOW_TO_UPDATE}.']
    return '\n'.join(lines)


def title_of(verdict: Verdict) -> str:
    """What became of a program, in a few words."""
    if verdict.status == 'changed':
        return count(len(verdict.differences), 'change')
    return WORDS[verdict.status]


def versions_text(versions: Mapping[str, tuple[str, str]]) -> str:
    """The versions that changed: 'libtpu 0.0.51 -> 0.0.52'; '' if none did."""
    return ', '.join(f'{name} {a} -> {b}' for name, (a, b) in versions.items())


def commit_text(made: CommitVerdicts, width: int = 100) -> str:
    """What a commit changed; '' if it changed nothing that counts.

    Args:
      made: its verdicts.
      width: the width of the terminal.
    """
    told = [v for v in made.verdicts if v.status != 'same' and v.name in made.recorded]
    if not told and not made.pinned:
        return ''
    commit = made.commit
    lines = wrapped(f'{commit.short} {commit.date} {commit.subject}', width, 0)
    if made.pinned:
        pins = versions_text(made.pinned)
        alone = '' if told else '; the code is the same'
        lines += wrapped(f'required versions: {pins}{alone}', width, 2)
    for verdict in told:
        lines += [f'  {line}' for line in _section(verdict, width - 2)]
    return '\n'.join(lines)


def history_summary(history: Sequence[CommitVerdicts]) -> str:
    """How many commits changed something, in one line."""
    parts = []
    changed = [made for made in history if made.changed]
    parts.append(f'{len(changed):,} changed something' if changed else 'none changed anything')
    if pinned := sum(bool(made.pinned) and not made.changed for made in history):
        parts.append(f'{pinned:,} changed only required versions')
    if broken := sum(any(v.status == 'error' for v in made.verdicts) for made in history):
        parts.append(f'{broken:,} could not be recorded')
    if apart := sum(not made.recorded for made in history):
        parts.append(f'{apart:,} changed no file of a program')
    return f'{count(len(history), "commit")}: {", ".join(parts)}'


def _section(verdict: Verdict, width: int) -> Iterator[str]:
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
