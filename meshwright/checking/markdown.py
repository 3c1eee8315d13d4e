"""What changed, as Markdown for a pull request: one table, and details that unfold."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from meshwright.checking.drawing import HOW_TO_UPDATE
from meshwright.checking.pull_request import MARKER
from meshwright.records.difference import Difference, signed_share
from meshwright.records.record import Record
from meshwright.records.verdict_text import title_of, versions_text
from meshwright.records.verdicts import Verdict
from partitioning.amounts import bytes_str, seconds_str
from partitioning.plan.tables import count

_MOST = 60_000  # characters; services refuse comments that are a little longer
_IN_CODE = frozenset('&<>|`*_[]\\~@#')
_SPECIAL = re.compile(r'([\\`*_{}\[\]<>|#~])')


def check_markdown(verdicts: Sequence[Verdict], page: str = '') -> str:
    """The verdicts as the text of a comment, which begins with a hidden marker.

    Args:
      verdicts: the verdicts.
      page: where the page of the forecasts is, a path or an address; '' if there is none.
    """
    changed = [v for v in verdicts if v.status != 'same']
    if not changed:
        return f'{MARKER}\n**Layouts:** {count(len(verdicts), "program")}, nothing changed.\n'
    parts = [
        f'{MARKER}\n### Layouts: {len(changed)} of {count(len(verdicts), "program")} changed\n',
        '\n'.join(_table(verdicts)) + '\n',
    ]
    length = sum(map(len, parts))
    for verdict in changed:
        details = '\n'.join(_details(verdict)) + '\n'
        if length + len(details) > _MOST:
            parts.append(f'The details of {plain_cell(verdict.name)} are too long for a comment.\n')
            continue
        parts.append(details)
        length += len(details)
    if page:
        shown = f'[the page]({page})' if '://' in page else f'the page `{page}`'
        parts.append(f'The forecasts of all programs are in {shown}.\n')
    if any(v.status in ('changed', 'missing') for v in verdicts):
        parts.append(f'If this is intended, {HOW_TO_UPDATE}.\n')
    return '\n'.join(parts)


def _table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield '| program | machine | | peak of a device | sent by a device | time of a call |'
    yield '|---|---|---|---|---|---|'
    for verdict in verdicts:
        cells = [verdict.name, verdict.machine, title_of(verdict), *_figures(verdict)]
        yield f'| {" | ".join(map(plain_cell, cells))} |'


def _figures(verdict: Verdict) -> list[str]:
    """The peak, the bytes that are sent, and the time, before and after."""
    before, after = verdict.before, verdict.after
    if after is None:
        return ['', '', '']
    known = before or after
    return [
        _change(known.peak, after.peak, bytes_str(known.peak), bytes_str(after.peak)),
        _change(known.sent, after.sent, bytes_str(known.sent), bytes_str(after.sent)),
        _change(known.seconds, after.seconds, _time(known), _time(after)),
    ]


def _time(record: Record) -> str:
    return '' if record.seconds is None else seconds_str(record.seconds)


def _change(was: float | None, now: float | None, before: str, after: str) -> str:
    if was is None or now is None or before == after:
        return after
    share = f' ({signed_share(now / was - 1)})' if was else ''
    return f'{before} → {after}{share}'


def _details(verdict: Verdict) -> Iterator[str]:
    yield f'<details><summary>{html.escape(verdict.name)}: {title_of(verdict)}</summary>\n'
    if verdict.message:
        yield f'{plain_cell(verdict.message)}\n'
    if verdict.versions:
        yield f'Versions: {plain_cell(versions_text(verdict.versions))}\n'
    if verdict.differences:
        yield from _differences('what changed', verdict.differences)
    if verdict.by_versions:
        yield from _differences('what the versions moved', verdict.by_versions)
    yield '</details>'


def _differences(title: str, differences: Sequence[Difference]) -> Iterator[str]:
    yield f'| {title} | before | after | why |'
    yield '|---|---|---|---|'
    for one in differences:
        cells = [one.name, one.before, change_after(one)]
        yield f'| {" | ".join(map(plain_cell, cells))} | {reasons_cell(one)} |'
    yield ''


def change_after(one: Difference) -> str:
    """What something is now, with the relative change of a number."""
    return f'{one.after} ({one.share})' if one.share else one.after


def reasons_cell(one: Difference, *more: str) -> str:
    """A cell with the line, the rule and the reason of a difference, and more lines of Markdown."""
    place = code_cell(f'{one.at.line}: {one.at.text}') if one.at.line else ''
    rule = plain_cell(f'rule {one.at.rule}') if one.at.rule else ''
    return '<br>'.join(filter(None, (place, rule, plain_cell(one.at.why), *more)))


def plain_cell(text: str) -> str:
    """Text without a meaning in Markdown, on one line; names of people are not called."""
    escaped = _SPECIAL.sub(r'\\\1', ' '.join(text.split()))
    return escaped.replace('\\<', '&lt;').replace('\\>', '&gt;').replace('@', '@\u200b')


def code_cell(text: str) -> str:
    """Text as code in a cell of a table, whatever characters it has."""
    characters = ' '.join(text.split())
    shown = ''.join(f'&#{ord(c)};' if c in _IN_CODE else c for c in characters)
    return f'<code>{shown}</code>'
