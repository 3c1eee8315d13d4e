"""Forecasts as plain text: one table, with a column for each machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from meshwright.report.forecast_lists import lists_below, machine_name, shortened
from meshwright.report.forecasts import Forecast, MemoryForecast
from meshwright.time import TimePart
from partitioning.amounts import bytes_str, flops_str, seconds_str, share_str

WIDTH = 100  # columns of a terminal
_LABEL = 30  # characters of the labels, and of the column of a machine, at least
_LEAST = 20
_GAP = 2
_LISTED = 8  # parts of the time
_SMALL = 0.001  # smaller parts of the time are added up

Row = tuple[str, list[str]]


def forecast_table(forecasts: Sequence[Forecast], *, width: int = WIDTH) -> str:
    """Returns forecasts side by side, with what is replicated, what is largest, and notes below.

    Args:
      forecasts: the forecasts, usually of one function on several machines.
      width: the characters of a line.
    """
    at_once = max(1, (width - _LABEL) // (_LEAST + _GAP))
    blocks = []
    for start in range(0, len(forecasts), at_once):
        shown = forecasts[start : start + at_once]
        blocks += ['\n'.join(_columns(shown, width)), *lists_below(shown, width)]
    return '\n\n'.join(blocks) + '\n'


def verdict(forecast: Forecast) -> str:
    """Returns whether a function fits, in a few words: 'fits, 12.31 GiB free'."""
    memory = forecast.memory
    if memory.limit is None:
        return 'not known'
    if forecast.fits:
        return f'yes, {bytes_str(memory.limit - memory.peak)} free'
    return f'NO, lacks {bytes_str(memory.peak - memory.limit)}'


def _columns(forecasts: Sequence[Forecast], width: int) -> Iterator[str]:
    rows = _all_rows(forecasts)
    column = (width - _LABEL) // len(forecasts) - _GAP
    column = min(column, max(_LEAST, *(len(c) for _, cells in rows for c in cells)))
    labels = width - (column + _GAP) * len(forecasts)
    labels = min(labels, max(_LABEL, *(len(label) for label, _ in rows)))
    for label, cells in rows:
        shown = (shortened(cell, column).rjust(column) for cell in cells)
        line = shortened(label, labels).ljust(labels) + (' ' * _GAP).join(['', *shown])
        yield line.rstrip()
        if label and not label.startswith(' '):
            yield '-' * (labels + (_GAP + column) * len(forecasts))


def _all_rows(forecasts: Sequence[Forecast]) -> list[Row]:
    rows: list[Row] = []
    for part in (_machine, _memory, _by_formula, _flops, _wire, _time, _compilation):
        made = [row for row in part(forecasts) if any(cell not in ('', '-') for cell in row[1])]
        if len(made) > 1:  # more than the heading
            rows += [*([('', [])] if rows else []), *made]
    return rows


def _machine(forecasts: Sequence[Forecast]) -> Iterator[Row]:
    names = list(dict.fromkeys(f.function for f in forecasts))
    yield ', '.join(names), [machine_name(f) for f in forecasts]
    yield '  devices', [f'{f.num_devices:,}' for f in forecasts]
    yield '  mesh', [_mesh(f) for f in forecasts]
    yield '  fits', [verdict(f) for f in forecasts]


def _mesh(forecast: Forecast) -> str:
    axes = [f'{axis} {n}' for axis, n in forecast.mesh.items() if n > 1]
    return ' x '.join(axes) or 'one device'


def _memory(forecasts: Sequence[Forecast]) -> Iterator[Row]:
    def sizes(of: Callable[[MemoryForecast], int | None]) -> list[str]:
        return [_size(of(f.memory)) for f in forecasts]

    yield 'memory of a device', [_compiler(f) for f in forecasts]
    yield '  peak', sizes(lambda m: m.peak)
    yield '  limit', sizes(lambda m: m.limit)
    yield '  arguments', sizes(lambda m: m.arguments)
    yield '    parameters', sizes(lambda m: m.parameters)
    yield '    optimizer', sizes(lambda m: m.optimizer)
    yield '    batch', sizes(lambda m: m.batch)
    if any(f.memory.other for f in forecasts):
        yield '    other', sizes(lambda m: m.other)
    yield '  temporaries', sizes(lambda m: m.temporaries)


def _by_formula(forecasts: Sequence[Forecast]) -> Iterator[Row]:
    yield 'of it, by formula', ['jaxpr and layouts'] * len(forecasts)
    yield '  gradients', [_size(f.memory.gradients or None) for f in forecasts]
    yield '  activations', [_size(f.memory.activations or None) for f in forecasts]
    yield '  peak', [_size(f.memory.analytic_peak or None) for f in forecasts]


def _flops(forecasts: Sequence[Forecast]) -> Iterator[Row]:
    yield 'computation of a device', ['jaxpr'] * len(forecasts)
    yield '  of the model', [flops_str(f.model_flops) for f in forecasts]
    yield '  with recomputation', [flops_str(f.program_flops) for f in forecasts]


def _wire(forecasts: Sequence[Forecast]) -> Iterator[Row]:
    """The bytes that a device sends, by network, axes and kind; the largest sum comes first."""
    tables = [wire_bytes(f) for f in forecasts]
    total: dict[tuple[str, str, str], float] = {}
    for table in tables:
        for key, (waited, hidden) in table.items():
            total[key] = total.get(key, 0) + waited + hidden
    yield 'sent by a device per call', [_compiler(f) for f in forecasts]
    for key in sorted(total, key=lambda k: (-total[k], k)):
        network, axes, kind = key
        cells = [table.get(key, (0.0, 0.0)) for table in tables]
        over = f' over {axes}' if axes else ''
        yield f'  {kind}{over} ({network})', [_sent(*cell) for cell in cells]
    sums = [[sum(c[i] for c in t.values()) for i in (0, 1)] for t in tables]
    yield '  asynchronous', [_share(hidden, waited + hidden) for waited, hidden in sums]
    yield '  all', [_size(round(sum(both)) or None) for both in sums]


def wire_bytes(forecast: Forecast) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Returns the bytes that a device sends per call, as (synchronous, asynchronous).

    The keys are the network ('ICI', 'DCN', 'NVLink' or 'network'), the mesh axes and the kind.
    """
    table: dict[tuple[str, str, str], tuple[float, float]] = {}
    for collective, _ in forecast.collectives:
        key = (
            _network(forecast, collective.network, collective.axes),
            ', '.join(collective.axes),
            collective.kind,
        )
        waited, hidden = table.get(key, (0.0, 0.0))
        size = collective.total_bytes
        table[key] = (waited, hidden + size) if collective.asynchronous else (waited + size, hidden)
    return table


def _network(forecast: Forecast, network: str, axes: Iterable[str]) -> str:
    """The name of the network: that of TPUs, or of GPUs where the axes stay in a host."""
    if network == 'dcn' or forecast.chip is None or forecast.chip.platform == 'tpu':
        return network.upper() if forecast.chip is not None else 'memory'
    rings = {ring.axis: ring.network for ring in forecast.rings}
    used = {rings.get(axis, '') for axis in axes}
    return 'network' if any('network' in name for name in used) else 'NVLink'


def _time(forecasts: Sequence[Forecast]) -> Iterator[Row]:
    times = [f.time for f in forecasts]
    yield 'time of a call', ['step-time model' if t else '-' for t in times]
    yield '  forecast', [seconds_str(t.seconds) if t else '-' for t in times]
    yield (
        '  range',
        [f'{seconds_str(t.low)} to {seconds_str(t.high)}' if t else '-' for t in times],
    )
    yield '  MFU', [share_str(f.mfu) if f.mfu is not None else '-' for f in forecasts]
    names: dict[str, float] = {}
    for t in times:
        for part in t.parts if t else ():
            names[part.name] = names.get(part.name, 0) + part.exposed
    shown: list[tuple[str, list[TimePart | None]]] = []
    others: list[tuple[str, list[TimePart | None]]] = []
    for name in sorted(names, key=lambda n: (-names[n], n)):
        parts = [next((p for p in t.parts if p.name == name), None) if t else None for t in times]
        is_small = all(
            p is None or t is None or p.exposed < _SMALL * t.seconds
            for p, t in zip(parts, times, strict=True)
        )
        (others if is_small or len(shown) == _LISTED else shown).append((name, parts))
    for name, parts in shown:
        yield f'    {name}', [seconds_str(p.exposed) if p else '-' for p in parts]
    if others:
        sums = [
            sum(p.exposed for p in column if p)
            for column in zip(*(p for _, p in others), strict=True)
        ]
        yield '    everything smaller', [_short_time(total) for total in sums]


def _short_time(seconds: float) -> str:
    if seconds == 0:
        return '-'
    return seconds_str(seconds) if seconds >= 1e-6 else '<1 µs'


def _compilation(forecasts: Sequence[Forecast]) -> Iterator[Row]:
    yield 'the forecast itself', [_compiler(f) for f in forecasts]
    yield '  time', [seconds_str(f.compilation.seconds) for f in forecasts]
    yield '  memory of this process', [bytes_str(f.compilation.peak_rss) for f in forecasts]


def _compiler(forecast: Forecast) -> str:
    """The name of the compiler in a heading."""
    if forecast.back_end == 'none':
        return 'not compiled'
    return forecast.back_end_version.replace('-plugin', '').replace(' for CPUs', ' (CPU)')


def _size(nbytes: int | None) -> str:
    return '-' if nbytes is None else bytes_str(nbytes)


def _sent(waited: float, hidden: float) -> str:
    return '-' if waited + hidden == 0 else bytes_str(waited + hidden)


def _share(part: float, whole: float) -> str:
    return share_str(part / whole) if whole else '-'
