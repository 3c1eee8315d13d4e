"""What a dry run found, in the words of its report."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from meshwright.calls.differences import list_differences
from meshwright.dry.compiling import CompiledFunction
from meshwright.dry.script import DryRun
from meshwright.user_lines import short_source
from partitioning.amounts import bytes_str, flops_str, seconds_str
from partitioning.values import value_str

_LISTED = 5
_MEMORY = 2**33  # less than any chip has: the unit is as in the tables of forecasts
_ENDINGS = {
    'steps': 'the run ended after {calls} of {name}, its largest {kind}',
    'waited': 'the run ended at {message}: nothing new was compiled for long (--wait=SECONDS)',
    'refused': 'the run ended at a call that cannot be imitated',
    'script': 'the script came to its end',
    'exit': 'the script ended with {status}',
    'memory': 'the run ended at {name}: it needs more memory than a device has',
    'error': 'the script failed',
}


def summarize(run: DryRun) -> str:
    """What happened, the functions, and what had to be imitated."""
    sections = [
        [_ending(run)],
        list(_table(run)),
        list(compiled_again(run.functions)),
        list(_list('read as zeros, because nothing was computed', run.reads)),
        list(_list('imitated', run.imitated)),
        list(_list('started, and run on this machine as it is', run.programs)),
        list(_list('not written', _by_folder(run.refused), 'files')),
    ]
    return '\n\n'.join('\n'.join(lines) for lines in sections if lines)


def _ending(run: DryRun) -> str:
    at = run.ended_at
    calls = sum(one.calls for one in run.functions if at is not None and one.source == at.source)
    text = _ENDINGS[run.ending].format(
        calls='1 call' if calls == 1 else f'{calls} calls',
        name=at.name if at else '',
        kind='training step' if at and at.trains else 'function',
        status=_status(run),
        message=short_source(run.message),
    )
    return text if run.functions else f'{text}; it compiled nothing for the machine'


def _status(run: DryRun) -> str:
    """The status of a script that ended itself, or what it said instead: sys.exit('no data')."""
    code = getattr(run.error, 'code', '')
    return f'exit status {code}' if isinstance(code, int) else f'sys.exit({value_str(code)})'


def _table(run: DryRun) -> Iterator[str]:
    """A line for each function, without those that are small."""
    large = [one for one in run.functions if one.flops or one.seconds > 1 or one.out_of_memory]
    rest = len(run.functions) - len(large)
    if not run.functions:
        return
    head = ('function', 'calls', 'compiled in', 'FLOPs', 'peak of a device')
    rows = [head, *map(_row, large)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield '  '.join(cells).rstrip()
    if rest:
        seconds = sum(one.seconds for one in run.functions if one not in large)
        yield f'and {rest} small ones, compiled in {seconds_str(seconds)}'


def _row(one: CompiledFunction) -> tuple[str, ...]:
    needed = one.out_of_memory.needed if one.out_of_memory else one.peak
    flops = flops_str(one.flops) if one.flops else '-'
    peak = bytes_str(needed, _MEMORY)
    return (one.name, f'{one.calls:,}', seconds_str(one.seconds), flops, peak)


def compiled_again(functions: Sequence[CompiledFunction]) -> Iterator[str]:
    """Says which functions were compiled more than once, and which argument differed."""
    for first, second in itertools.combinations(functions, 2):
        if first.name != second.name or not second.flops or not second.calls:
            continue
        if first.source != second.source or first.is_operation:
            continue
        changes = list(list_differences(first.call, second.call))
        if changes:
            more = f', and {len(changes) - 1} more' if len(changes) > 1 else ''
            yield f'{second.name} was compiled again: {changes[0]}{more}'


def _by_folder(paths: Sequence[str]) -> dict[str, int]:
    """Paths without those that are in folders of the same list, and how many they stand for."""
    found: dict[str, int] = {}
    for path in sorted(paths):
        above = next((folder for folder in found if path.startswith(f'{folder}/')), path)
        found[above] = found.get(above, 0) + 1
    return found


def _list(title: str, counts: Mapping[str, int], unit: str = 'times') -> Iterator[str]:
    """The first of some things, each with how often it happened."""
    if not counts:
        return
    yield f'{title}:'
    for what, count in list(counts.items())[:_LISTED]:
        times = f' ({count:,} {unit})' if count > 1 else ''
        yield f'  {short_source(what)}{times}'
    if len(counts) > _LISTED:
        yield f'  and {len(counts) - _LISTED} more'
