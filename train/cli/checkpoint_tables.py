"""What `meshwright checkpoint` prints: tables of rich, which fit a terminal of any width."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from partitioning.amounts import bytes_str
from partitioning.plan.tables import wrap_path
from partitioning.untrusted_text import printable
from train.checkpoints.offline.comparing import ArrayDifference
from train.checkpoints.offline.converting import Conversion
from train.checkpoints.offline.summary import StepSummary, Summary, shorten_reason
from train.checkpoints.steps.verifying import Verified
from train.reporting.console import SafeConsole
from train.reporting.reports import count_str, format_seconds

# A cell is as wide as its text, so control characters are replaced before it is in a table.
# In a file or a pipe, no row of a table is broken into several lines.
_WIDTH_OF_A_PIPE = 1000
_STYLES = {'good': 'green', 'damaged': 'red', 'unfinished': 'yellow'}


def show(renderable: Any) -> None:
    """Prints tables and lines to standard output."""
    console = SafeConsole()
    if console.is_terminal:
        console.print(renderable)
        return
    console.width = _WIDTH_OF_A_PIPE
    with console.capture() as text:
        console.print(renderable)
    print('\n'.join(line.rstrip() for line in text.get().splitlines()))


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal. Yields what to call with bytes since the last call."""
    bar = Progress(
        TextColumn(title),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.disable = not bar.console.is_terminal
    task = bar.add_task(title, total=total)
    with bar:
        yield lambda count: bar.advance(task, count)


class _Name:
    """The name of an array in a cell, which is wrapped after its slashes."""

    def __init__(self, name: str):
        self._name = printable(name)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text('\n'.join(wrap_path(self._name, options.max_width)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        parts = self._name.split('/')
        return Measurement(max(map(len, parts)) + len('  /'), len(self._name))


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style='bold', padding=(0, 1))
    for name in columns:
        if name in right:
            table.add_column(name, justify='right', no_wrap=True)
        else:
            table.add_column(name, overflow='fold')
    return table


def _facts(facts: dict[str, str]) -> Table:
    """Names and values in two columns. Empty values are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style='bold')
    table.add_column(overflow='fold')
    for name, value in facts.items():
        if value:
            table.add_row(name, printable(value))
    return table


def summary_tables(summary: Summary) -> Group:
    roles = [f'{role} {bytes_str(n)}' for role, n in summary.bytes_by_role.items() if n]
    dtypes = [f'{dtype} {bytes_str(size)}' for dtype, size in summary.bytes_by_dtype.items()]
    versions = [f'{package} {version}' for package, version in summary.versions.items()]
    facts = _facts(
        {
            'path': summary.path,
            'format': summary.format,
            'step': '' if summary.step is None else f'{summary.step:,}',
            'status': summary.status + (f': {summary.reason}' if summary.reason else ''),
            'files': f'{count_str(summary.num_files, "file")}, {bytes_str(summary.bytes_on_disk)}',
            'arrays': f'{count_str(summary.num_arrays, "array")}: {", ".join(roles)}',
            'parameters': f'{summary.num_parameters:,}',
            'dtypes': ', '.join(dtypes),
            'saved with': ', '.join(versions),
            'other files': ', '.join(summary.other_content),
            'interrupted': ', '.join(summary.pending),
        }
    )
    right = ('arrays', 'shape', 'size')
    table = _table('name', 'arrays', 'shape', 'dtype', 'size', right=right)
    for group in summary.arrays:
        table.add_row(
            _Name(group.name),
            f'{group.count:,}',
            'various' if group.shape is None else 'x'.join(map(str, group.shape)) or 'scalar',
            group.dtype,
            bytes_str(group.nbytes),
            style=None if group.role == 'parameters' else 'dim',
        )
    return Group(facts, '', table)


def steps_table(path: Any, steps: Sequence[StepSummary]) -> Group:
    """The steps of a run, one per row."""
    table = _table(
        'step', 'status', 'format', 'files', 'size', 'notes', right=('step', 'files', 'size')
    )
    for step in steps:
        notes = [step.reason] if step.reason else []
        if step.pending:
            notes.append(f'interrupted: {", ".join(step.pending)}')
        table.add_row(
            f'{step.step:,}',
            Text(step.status, style=_STYLES.get(step.status, '')),
            step.format,
            f'{step.num_files:,}',
            bytes_str(step.bytes_on_disk),
            printable('; '.join(notes)),
        )
    return Group(Text(f'{count_str(len(steps), "step")} in {path}', style='bold'), table)


def diff_table(found: Sequence[ArrayDifference], total: int, values: bool) -> Group:
    """The arrays that differ between two checkpoints."""
    what = 'equal' if values else 'equal in name, shape and dtype'
    equal = f'{total - len(found):,} of {count_str(total, "array")} are {what}'
    if not found:
        return Group(equal)
    right = ('values', 'largest difference', 'relative') if values else ()
    same = all(one.first == one.second for one in found)
    table = _table('name', *(['array'] if same else ['first', 'second']), *right, right=right)
    for one in found:
        arrays = [one.first or 'absent', one.second or 'absent']
        figures = [
            '' if one.count is None else f'{one.count:,}',
            '' if one.absolute is None else f'{one.absolute:.3g}',
            '' if one.relative is None else f'{one.relative:.3g}',
        ]
        table.add_row(_Name(one.name), *arrays[: 1 if same else 2], *(figures if values else ()))
    return Group(table, '', equal)


def verified_table(results: Sequence[Verified], seconds: float) -> Group:
    """The result of each checkpoint, and a line for each damaged file."""
    lines: list[RenderableType] = []
    for one in results:
        step = f'step {one.found.step:,}: ' if len(results) > 1 else f'{one.found.path}: '
        size = f'{count_str(one.num_files, "file")}, {bytes_str(one.nbytes)}'
        status = f'good ({size})' if one.status == 'good' else one.status
        lines.append(Text.assemble(step, (status, _STYLES.get(one.status, ''))))
        lines += [f'  {shorten_reason(one.found.path, reason)}' for reason in one.reasons]
    total = sum(one.nbytes for one in results)
    speed = f'{total / 1e6 / max(seconds, 1e-9):,.0f} MB/s'
    lines.append(f'read {bytes_str(total)} in {format_seconds(seconds)} ({speed})')
    return Group(*lines)


def conversion_lines(conversion: Conversion, seconds: float) -> Group:
    """What has been written, and what the source has but the result lacks."""
    size = conversion.num_bytes
    lines: list[RenderableType] = [
        f'{conversion.folder}: {count_str(len(conversion.arrays), "array")}, {bytes_str(size)} '
        f'in {format_seconds(seconds)} ({size / 1e6 / max(seconds, 1e-9):,.0f} MB/s)'
    ]
    lines += [Text(f'not carried over: {lost}', style='yellow') for lost in conversion.lost]
    return Group(*lines)
