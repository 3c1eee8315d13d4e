"""The changes of a step in few words: which figures of how many programs, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.checking.radar.environments import Environment
from meshwright.checking.radar.steps import Change, ProgramStep, Radar, Step
from meshwright.records.difference import Kind, signed_share
from meshwright.records.record import Record
from partitioning.plan.tables import count

# A letter for the table, the name, and the kinds of differences that it stands for.
CATEGORIES: tuple[tuple[str, str, tuple[Kind, ...]], ...] = (
    ('e', 'exchanges', ('exchange',)),
    ('p', 'peak', ('memory', 'donation')),
    ('t', 'time', ('time',)),
    ('l', 'layouts', ('argument', 'result', 'constraint', 'rematerialization')),
    ('c', 'computation', ('machine', 'collective', 'checkpoint', 'precision', 'computation',
                          'recompilation')),
)  # fmt: skip
BROKEN, REPAIRED, MISSING, SAME = 'broke', 'works', '-', '.'
LEGEND = (
    f'{", ".join(f"{letter} {name}" for letter, name, _ in CATEGORIES)}; {SAME} the same, {BROKEN} '
    f'no longer works, {MISSING} does not work, {REPAIRED} works again'
)


def letters_of(program: ProgramStep) -> str:
    """What changed in a program, as letters; or that it broke, works again, or does not work."""
    if program.after is None:
        return BROKEN if program.broke else MISSING
    kinds = {change.difference.kind for change in program.changes}
    letters = ''.join(letter for letter, _, held in CATEGORIES if kinds & set(held))
    return letters or (REPAIRED if program.repaired else SAME)


def ordered_changes(step: Step) -> list[tuple[ProgramStep, Change]]:
    """All changes of a step: first the changes of the code, then the others, the largest first."""
    found = [(program, change) for program in step.programs for change in program.changes]
    return sorted(found, key=lambda one: (not one[1].difference.is_of_code, -one[1].weight))


def category_lines(step: Step) -> Iterator[tuple[str, str, str]]:
    """For each category: its name, in how many programs it changed and by how much, and the cause.

    The figures are what a device sends in all, its peak memory, and the time of a call.
    """
    for _, name, kinds in CATEGORIES:
        programs = [p for p in step.programs if any(c.difference.kind in kinds for c in p.changes)]
        if not programs:
            continue
        causes = dict.fromkeys(
            c.cause for p in programs for c in p.changes if c.difference.kind in kinds
        )
        by = ' / '.join(filter(None, causes))
        yield name, f'{count(len(programs), "program")}{_range(name, programs)}', by


def _range(name: str, programs: Sequence[ProgramStep]) -> str:
    shares = [share for p in programs if (share := _share(name, p.before, p.after)) is not None]
    if not shares:
        return ''
    least, most = min(shares), max(shares)
    if least == most:
        return f', {signed_share(least)}'
    return f', {signed_share(least)} to {signed_share(most)}'


def _share(name: str, before: Record | None, after: Record | None) -> float | None:
    """The relative change of the figure of a category."""
    if before is None or after is None:
        return None
    was, now = {
        'exchanges': (before.sent, after.sent),
        'peak': (before.peak, after.peak),
        'time': (before.seconds, after.seconds),
    }.get(name, (None, None))
    return now / was - 1 if was and now is not None and now != was else None


def total_line(radar: Radar) -> str:
    """What was compared and what came of it, in one line."""
    changes = sum(len(p.changes) for step in radar.steps for p in step.programs)
    programs = {p.name for step in radar.steps for p in step.programs if p.changes}
    broken = {p.name for step in radar.steps for p in step.programs if p.after is None}
    broken |= {p.name for p in radar.first if p.after is None}
    line = (
        f'{count(len(radar.programs), "program")} with {len(radar.environments)} releases: '
        f'{count(changes, "change")} in {count(len(programs), "program")}'
    )
    return (
        f'{line}; {count(len(broken), "program")} with a release that breaks it' if broken else line
    )


def short_name(environment: Environment, before: Environment) -> str:
    """What a release changes: '0.10.2' if that is jax, 'flax 0.12.8' for other packages."""
    old = dict(before.release.pins)
    new = [(p, v) for p, v in environment.release.pins if old.get(p) != v]
    jax = [v for p, v in new if p == 'jax']
    return jax[0] if jax else ', '.join(f'{p} {v}' for p, v in new) or environment.release.name
