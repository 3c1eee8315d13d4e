"""The radar as a page of Markdown, or as the part of a page between two comments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.checking.markdown import change_after, plain_cell, reasons_cell
from meshwright.checking.radar.notes import Note, notes_of_change, notes_of_error
from meshwright.checking.radar.steps import Change, ProgramStep, Radar, Step
from meshwright.checking.radar.summary import (
    LEGEND,
    category_lines,
    letters_of,
    ordered_changes,
    short_name,
    total_line,
)

BEGIN, END = '<!-- radar: begin -->', '<!-- radar: end -->'


def write_radar(radar: Radar, notes: Sequence[Note], file: Path) -> None:
    """Writes the page. A page that has the two comments keeps what is around them.

    Raises:
      ValueError: if the file cannot be written, or if it is another page.
    """
    made = f'{BEGIN}\n\n{radar_markdown(radar, notes)}\n{END}\n'
    try:
        held = file.read_text(encoding='utf-8') if file.is_file() else ''
        if held and (BEGIN not in held or END not in held):
            raise ValueError(
                f'--page={file} is another page: name a new file, or add the lines {BEGIN} and '
                f'{END} where the tables belong'
            )
        if held:
            before, _, rest = held.partition(BEGIN)
            made = before + made + rest.partition(END)[2].removeprefix('\n')
        else:
            made = f'# What releases changed\n\n{made}'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made, encoding='utf-8')
    except OSError as error:
        raise ValueError(f'--page={file} cannot be written: {error.strerror}') from error


def radar_markdown(radar: Radar, notes: Sequence[Note]) -> str:
    """The tables: all programs, and what each release changed."""
    parts = [f'{total_line(radar)}.\n', *_releases(radar), '', *_programs(radar), '']
    for step in radar.steps:
        parts += _step(step, notes)
    return '\n'.join(parts)


def _releases(radar: Radar) -> Iterator[str]:
    yield '| from | to | programs that changed | what changed |'
    yield '|---|---|---|---|'
    for step in radar.steps:
        changed = [p for p in step.programs if p.changes]
        old, new = (
            ', '.join(f'{name} {pair[i]}' for name, pair in step.moved.items()) for i in (0, 1)
        )
        what = [f'{name}: {figures}' for name, figures, _ in category_lines(step)]
        broken = [p.name for p in step.programs if p.broke]
        what += [f'no longer works: {", ".join(broken)}'] if broken else []
        what += [step.after.error] if step.after.error else []
        cells = [old, new, f'{len(changed)} of {len(step.programs)}']
        yield f'| {" | ".join(map(plain_cell, cells))} | {"<br>".join(map(plain_cell, what))} |'


def _programs(radar: Radar) -> Iterator[str]:
    names = [short_name(step.after, step.before) for step in radar.steps]
    yield f'| program | machine | {" | ".join(map(plain_cell, names))} |'
    yield '|---' * (2 + len(names)) + '|'
    cells = [{p.name: letters_of(p) for p in step.programs} for step in radar.steps]
    same = []
    for program in radar.programs:
        letters = [column[program.name] for column in cells]
        if {*letters} == {'.'}:
            same.append(program.name)
            continue
        yield f'| {" | ".join(map(plain_cell, [program.name, program.machine, *letters]))} |'
    yield ''
    yield f'{LEGEND}.'
    if same:
        yield f'\nThe same with all releases: {", ".join(map(plain_cell, same))}.'


def _step(step: Step, notes: Sequence[Note]) -> Iterator[str]:
    broken = [p for p in step.programs if p.broke]
    found = ordered_changes(step)
    if not broken and not found:
        return
    yield f'## {step.title or step.after.release.name}\n'
    if broken:
        yield '| no longer works | why |'
        yield '|---|---|'
        by_error = dict[str, list[str]]()
        for program in broken:
            why = [plain_cell(program.error), *map(_linked, notes_of_error(step, program, notes))]
            by_error.setdefault('<br>'.join(why), []).append(plain_cell(program.name))
        for text, names in by_error.items():
            yield f'| {", ".join(names)} | {text} |'
        yield ''
    if found:
        yield '| program | what | before | after | by | line and reason |'
        yield '|---|---|---|---|---|---|'
        for program, change in found:
            yield _change(step, program, change, notes)
        yield ''


def _change(step: Step, program: ProgramStep, change: Change, notes: Sequence[Note]) -> str:
    one = change.difference
    since = f' (since {program.since})' if program.since else ''
    after = change_after(one) or 'none'
    cells = [program.name + since, one.name, one.before or 'none', after, change.cause]
    why = reasons_cell(one, *map(_linked, notes_of_change(step, change, notes)))
    return f'| {" | ".join(map(plain_cell, cells))} | {why} |'


def _linked(note: Note) -> str:
    title = plain_cell(f'{note.package} {note.release}')
    return f'{f"[{title}]({note.link})" if note.link else title}: {plain_cell(note.text)}'
