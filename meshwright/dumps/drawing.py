"""A dumped program as plain text."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from meshwright.dumps.program import DumpedProgram
from meshwright.program.collectives import Collective
from meshwright.user_lines import short_source
from partitioning.amounts import bytes_str

_LISTED = 8
_LABEL = 34
_CELL = 14
_STAGES = {
    'compiled': 'compiled',
    'partitioned': 'partitioned, and not optimized',
    'not partitioned': 'not partitioned yet',
}


def dump_table(program: DumpedProgram) -> str:
    """Returns what a dump says about a program: its memory, its exchanges and its layouts."""
    sections = [
        list(_head(program)),
        list(_memory(program)),
        list(_sent(program)),
        list(_arguments(program)),
        list(_largest(program)),
        list(_buffers(program)),
        list(_list('notes', [f'  {note}' for note in program.notes])),
        list(_modules(program)),
    ]
    return '\n\n'.join('\n'.join(lines) for lines in sections if lines) + '\n'


def _head(program: DumpedProgram) -> Iterator[str]:
    devices = f'{program.num_devices:,} {program.back_end.upper()}'.strip()
    plural = 'devices' if program.num_devices > 1 else 'device'
    yield f'{program.name}: {_STAGES[program.stage]}, for {devices} {plural}'
    yield f'read from {program.file}'
    if program.mesh is None:
        if program.num_devices > 1:
            yield 'mesh not known: name its axes, as in --mesh=data=4,model=2'
        return
    axes = ' x '.join(f'{name} {size}' for name, size in program.mesh.sizes.items())
    origin = {'given': 'as given', 'the dump': 'from the dump'}.get(program.mesh_from)
    inferred = 'inferred from groups of devices; name its axes with --mesh=data=4,model=2'
    yield f'mesh {axes}, {origin or inferred}'


def _memory(program: DumpedProgram) -> Iterator[str]:
    peak, limit = program.peak, program.limit
    if peak is None:
        origin = 'by layouts' if program.arguments else 'by its text'
        yield from _heading('memory of a device', origin)
        yield _row('arguments', program.arguments_bytes)
        return
    origin = 'live ranges' if program.memory is None else 'the compiler'
    yield from _heading('memory of a device', origin)
    yield _row('peak', peak)
    if limit is not None and program.chip is not None:
        free = limit - peak
        fits = f'yes, {bytes_str(free)} free' if free >= 0 else f'NO, lacks {bytes_str(-free)}'
        yield _row(f'limit of {program.chip.name}', limit)
        yield _text_row('fits', fits)
    yield _row('arguments', program.arguments_bytes)
    if program.memory is not None:
        yield _row('results', program.memory.outputs)
        if program.memory.aliased:
            yield _row('in place of arguments', program.memory.aliased, depth=2)
        yield _row('temporaries', program.memory.temporaries)


def _sent(program: DumpedProgram) -> Iterator[str]:
    """The bytes and executions of exchanges by kind and axes, and their sum."""
    if not program.collectives:
        yield _why_nothing(program)
        return
    asked = program.stage == 'not partitioned'
    yield from _heading('sent by a device per call', 'bytes', 'executions')
    groups: dict[str, list[Collective]] = collections.defaultdict(list)
    for collective in program.collectives:
        groups[_name_of(collective)].append(collective)
    sums = {name: sum(c.total_bytes for c in group) for name, group in groups.items()}
    for name in sorted(groups, key=lambda n: -sums[n]):
        yield _row(name, sums[name], sum(c.count for c in groups[name]))
    yield _row('all', sum(sums.values()), sum(c.count for c in program.collectives))
    hidden = sum(c.total_bytes for c in program.collectives if c.asynchronous)
    if hidden:
        yield _row('next to other operations', hidden, depth=2)
    if asked:
        yield (
            '  only what the program itself asks for: the partitioner has not added its exchanges '
            'yet'
        )


def _why_nothing(program: DumpedProgram) -> str:
    if program.num_devices == 1:
        return 'It runs on one device, and sends nothing.'
    if program.stage == 'not partitioned':
        return (
            'It has no exchanges yet: the partitioner adds them when the program is compiled. Read '
            'the module after_optimizations, or compile it with `meshwright.forecast`.'
        )
    return 'Its devices exchange nothing.'


def _arguments(program: DumpedProgram) -> Iterator[str]:
    if not program.arguments:
        return
    whole = [
        a for a in program.arguments if a.layout is None or max(a.layout.counts, default=1) < 2
    ]
    sharded = len(program.arguments) - len(whole)
    constraints = f', and {program.constraints:,} constraints' if program.constraints else ''
    yield f'{sharded:,} of {len(program.arguments):,} arguments are sharded{constraints}:'
    shown = sorted(program.arguments, key=lambda a: -a.bytes_per_device)
    for one in shown[:_LISTED]:
        layout = 'no layout' if one.layout is None else str(one.layout)
        yield f'  {bytes_str(one.bytes_per_device):>10}  {one.name} {one.array}, {layout}'
    if len(shown) > _LISTED:
        yield f'  and {len(shown) - _LISTED:,} more'


def _largest(program: DumpedProgram) -> Iterator[str]:
    """A line for all exchanges of the same arrays at the same place; the largest sum first."""
    groups: dict[str, list[Collective]] = collections.defaultdict(list)
    for one in program.collectives:
        others = f' and {len(one.arrays) - 1} more' if len(one.arrays) > 1 else ''
        of = f' of {one.arrays[0]}{others}' if one.arrays else ''
        operation = _operation(one.op_name)
        operation = '' if operation.replace('_', '-') == one.kind else operation
        parts = (f'{_name_of(one)}{of}', operation, short_source(one.source))
        groups[', '.join(part for part in parts if part)].append(one)
    lines = []
    for text, group in sorted(
        groups.items(), key=lambda item: -sum(c.total_bytes for c in item[1])
    ):
        count = sum(c.count for c in group)
        times = f'{count:,} x ' if count > 1 else ''
        lines.append(f'  {bytes_str(sum(c.total_bytes for c in group)):>10}  {times}{text}')
    yield from _list('largest exchanges', lines)


def _buffers(program: DumpedProgram) -> Iterator[str]:
    lines = []
    for array in program.buffers:
        several = f'{array.count} x ' if array.count > 1 else ''
        parts = (_operation(array.op_name), short_source(array.source))
        about = ', '.join(part for part in parts if part)
        lines.append(f'  {bytes_str(array.nbytes):>10}  {several}{array.array} {about}'.rstrip())
    yield from _list('largest arrays at the peak, besides arguments (live ranges)', lines)


def _modules(program: DumpedProgram) -> Iterator[str]:
    if len(program.modules) > 1:
        lines = [
            f'  {bytes_str(m.nbytes):>10}  {m.name}, {_STAGES[m.stage]}' for m in program.modules
        ]
        yield from _list('modules of the dump; read another one with --module', lines)


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield title
        yield from lines[:_LISTED]
        if len(lines) > _LISTED:
            yield f'  and {len(lines) - _LISTED:,} more'


def _name_of(collective: Collective) -> str:
    over = ', '.join(collective.axes) or f'groups of {collective.group_size}'
    network = ' (DCN)' if collective.network == 'dcn' else ''
    return f'{collective.kind} over {over}{network}'


def _operation(path: str) -> str:
    """The last operation of a path, also of the paths that the compiler joins: '(a/b:c/d)'."""
    return path.rpartition('/')[2].rpartition(':')[2].strip('()')


def _heading(*cells: str) -> Iterator[str]:
    first, *rest = cells
    line = first.ljust(_LABEL) + ''.join(cell.rjust(_CELL) for cell in rest)
    yield line
    yield '-' * len(line)


def _row(label: str, nbytes: float, count: int | None = None, depth: int = 1) -> str:
    cells = [bytes_str(nbytes), *([] if count is None else [f'{count:,}'])]
    return _text_row(label, *cells, depth=depth)


def _text_row(label: str, *cells: str, depth: int = 1) -> str:
    first, *others = cells
    start = '  ' * depth + label
    first = first.rjust(_LABEL + _CELL - len(start))
    return start + first + ''.join(cell.rjust(_CELL) for cell in others)
