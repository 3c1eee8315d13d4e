"""What changed, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.checking.history import CommitVerdicts
from meshwright.records.verdict_text import verdict_lines, versions_text, wrapped
from meshwright.records.verdicts import Verdict
from partitioning.plan.tables import count

HOW_TO_UPDATE = 'run `meshwright check --update`, and commit the files'


def check_text(verdicts: Sequence[Verdict], width: int = 100) -> str:
    """The verdicts of all programs, each with what changed and why.

    Args:
      verdicts: the verdicts.
      width: the width of the terminal.
    """
    lines: list[str] = []
    for verdict in verdicts:
        section = [*verdict_lines(verdict, width)]
        if lines and (len(section) > 1 or lines[-1].startswith(' ')):
            lines.append('')
        lines += section
    if any(verdict.status in ('changed', 'missing') for verdict in verdicts):
        lines += ['', f'If this is intended, {HOW_TO_UPDATE}.']
    return '\n'.join(lines)


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
        lines += [f'  {line}' for line in verdict_lines(verdict, width - 2)]
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
