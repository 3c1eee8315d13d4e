"""The radar as text for a terminal: a table of all programs, and what each release changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.checking.radar.notes import Note, notes_of_change, notes_of_error
from meshwright.checking.radar.steps import Radar, Step
from meshwright.checking.radar.summary import (
    LEGEND,
    category_lines,
    letters_of,
    ordered_changes,
    short_name,
    total_line,
)
from meshwright.records.verdict_text import wrapped
from partitioning.plan.tables import count

_LISTED = 8  # changes of a step; --page and --json have all
_GAP = 2

Column = tuple[str, dict[str, str]]  # the title of a step, and the cells of the programs


def radar_text(radar: Radar, notes: Sequence[Note], width: int = 100) -> str:
    """What each release changed.

    Args:
      radar: the answer.
      notes: what release notes say.
      width: the width of the terminal.
    """
    lines = [*wrapped(total_line(radar), width, 0), '', *_table(radar, width)]
    for step in radar.steps:
        lines += ['', *_step(step, notes, width)]
    return '\n'.join(lines)


def _table(radar: Radar, width: int) -> Iterator[str]:
    """A row for each program and a column for each step, in blocks that fit the width."""
    columns = [
        (short_name(step.after, step.before), {p.name: letters_of(p) for p in step.programs})
        for step in radar.steps
    ]
    label = min(max(len('program'), *(len(p.name) for p in radar.programs)), width // 2)
    while columns:
        shown: list[Column] = []
        used = label
        while columns and (not shown or used + _GAP + _width(columns[0]) <= width):
            used += _GAP + _width(columns[0])
            shown.append(columns.pop(0))
        yield _row('program', label, [(name, _width(c)) for c in shown for name in [c[0]]])
        yield '-' * used
        for program in radar.programs:
            cells = [(c[1][program.name], _width(c)) for c in shown]
            yield _row(program.name, label, cells)
        yield ''
    yield from wrapped(LEGEND, width, 0)


def _width(column: Column) -> int:
    return max(len(column[0]), *map(len, column[1].values()))


def _row(label: str, size: int, cells: Sequence[tuple[str, int]]) -> str:
    name = label if len(label) <= size else f'{label[: size - 1]}\u2026'
    return ''.join([name.ljust(size), *(' ' * _GAP + text.ljust(w) for text, w in cells)]).rstrip()


def _step(step: Step, notes: Sequence[Note], width: int) -> Iterator[str]:
    changed = sum(bool(p.changes) for p in step.programs)
    title = step.title or step.after.release.name
    yield from wrapped(
        f'{title}: {changed} of {count(len(step.programs), "program")} changed', width, 0
    )
    if step.after.error:
        yield from wrapped(f'{step.after.release.name} {step.after.error}', width, 2)
        for note in notes_of_error(step, step.programs[0], notes):
            yield from _note(note, width)
        return
    for name, figures, cause in category_lines(step):
        yield from wrapped(
            f'{name}: {figures} (by {cause})' if cause else f'{name}: {figures}', width, 2
        )
    for program in step.programs:
        if program.broke:
            yield from wrapped(f'{program.name} no longer works: {program.error}', width, 2)
            for note in notes_of_error(step, program, notes):
                yield from _note(note, width)
    found = ordered_changes(step)
    for program, change in found[:_LISTED]:
        since = f' since {program.since}' if program.since else ''
        by = f', by {change.cause}' if change.cause else ''
        yield from wrapped(f'{program.name}{since}: {change.difference.line}{by}', width, 4)
        yield from wrapped(str(change.difference.at), width, 8)
        for note in notes_of_change(step, change, notes):
            yield from _note(note, width)
    if len(found) > _LISTED:
        yield f'    and {len(found) - _LISTED} more: --page=FILE or --json'


def _note(note: Note, width: int) -> list[str]:
    link = f' ({note.link})' if note.link else ''
    return wrapped(f'{note.package} {note.release}: {note.text}{link}', width, 8)
