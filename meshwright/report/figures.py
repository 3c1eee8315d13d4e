"""The figures of a forecast, computed once; the terminal, the page and golden files draw them.

For a step on two machines, `table_rows` returns, among others:

    section               label                             v5e:4x4      v5p:4x4x4
    'memory of a device'  'peak'                            7.50 GiB     1.88 GiB
    'sent by a device'    'all-gather over fsdp (ICI)'      44.70 GiB    -

Each cell is a `Figure`, which also says where its value comes from.
"""

from __future__ import annotations

import collections
import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from meshwright.program.collectives import Collective
from meshwright.report.forecasts import FORMULA_ERROR, Forecast
from meshwright.report.time_words import bounds_of, cost_per_million, tokens_per_second
from meshwright.time import StepTime
from meshwright.time.work import Origin
from partitioning.amounts import bytes_str, flops_str, seconds_str, share_str

# 'analytic' figures are computed by a formula from the traced function and its layouts.
Source = Literal['compiler', 'analytic', 'measured']
Unit = Literal['bytes', 'FLOPs', 'seconds', 'share', 'text']

MACHINE = 'machine'
MEMORY = 'memory of a device'
FORMULA = 'estimated without the compiler'
COMPUTATION = 'computation of a device'
SENT = 'sent by a device per call'
TIME = 'time of a call'
ITSELF = 'the forecast itself'

_FORMATS = {'FLOPs': flops_str, 'seconds': seconds_str, 'share': share_str}
_VERDICTS = {True: 'fits', False: 'does not fit', None: 'limit not known'}
_LISTED = 8  # parts of the time
_SMALL = 0.001  # smaller shares of the time are added up


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of a forecast, per device and call.

    Attributes:
      section: the part of the table that it belongs to.
      label: what it is, within its section.
      value: its value; None if it is not known or does not apply.
      unit: the unit of the value.
      source: where the value comes from.
      depth: 2 or 3 if it is a part of a figure above it.
      is_addend: whether its section has a line for each part of a sum, the largest first.
      beside: the largest number of bytes in its table.
    """

    section: str
    label: str
    value: float | str | None
    unit: Unit
    source: Source = 'analytic'
    depth: int = 1
    is_addend: bool = False
    beside: float = 0.0

    @property
    def text(self) -> str:
        """The value for people: '7.50 GiB'."""
        if self.value is None or isinstance(self.value, str):
            return self.value or '-'
        if self.unit == 'seconds' and self.value < 1e-6:
            return '<1 µs' if self.value else '-'
        if self.unit == 'bytes':
            return bytes_str(self.value, self.beside)
        return _FORMATS[self.unit](self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of several forecasts; None stands for forecasts that do not have it."""

    section: str
    label: str
    depth: int
    figures: tuple[Figure | None, ...]

    @property
    def texts(self) -> list[str]:
        """The figures for people."""
        return ['-' if figure is None else figure.text for figure in self.figures]

    @property
    def numbers(self) -> list[float]:
        """The figures as numbers; those that are not known count as 0."""
        values = [None if figure is None else figure.value for figure in self.figures]
        return [0.0 if value is None or isinstance(value, str) else value for value in values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """What a device sends per call in all exchanges of one kind over the same axes.

    Attributes:
      kind: the kind: 'all-gather'.
      axes: the mesh axes.
      network: 'ici' or 'dcn'.
      bytes: the bytes.
      count: how often such an exchange is executed.
    """

    kind: str
    axes: tuple[str, ...]
    network: str
    bytes: float
    count: int


def machine_name(forecast: Forecast) -> str:
    """The name of a machine, with the number of its slices: '2 x v5e:16x16'."""
    slices = f'{forecast.num_slices} x ' if forecast.num_slices > 1 else ''
    return slices + forecast.topology


def verdict(fits: bool | None) -> str:
    """Whether a function fits, in words."""
    return _VERDICTS[fits]


def source_name(source: Source | Origin, forecast: Forecast) -> str:
    """Where a figure comes from: the name of the compiler, 'measured', or 'by formula'."""
    if source == 'compiler':
        return forecast.back_end_version
    return 'measured' if source == 'measured' else 'by formula'


def heading(section: str, forecast: Forecast) -> str:
    """Where the figures of a section come from, in a few words."""
    if section in (MEMORY, SENT, ITSELF):
        if forecast.back_end == 'none':
            return 'not compiled' if section == ITSELF else 'by formula'
        return forecast.back_end_version.replace('-plugin', '').replace(' for CPUs', ' (CPU)')
    if section == TIME:
        return 'step-time model' if forecast.time else '-'
    known = {MACHINE: machine_name(forecast), FORMULA: 'jaxpr and layouts', COMPUTATION: 'jaxpr'}
    return known[section]


def network_name(forecast: Forecast, network: str, axes: Sequence[str]) -> str:
    """The name of the network of an exchange: 'ICI', 'DCN', 'NVLink', 'network' or 'memory'."""
    if forecast.chip is None:
        return 'memory'
    if forecast.chip.platform == 'tpu':
        return network.upper()
    rings = {ring.axis: ring.network for ring in forecast.rings}
    leaves_host = any('network' in rings.get(axis, '') for axis in axes)
    return 'network' if network == 'dcn' or leaves_host else 'NVLink'


def sum_exchanges(forecast: Forecast) -> tuple[Sent, ...]:
    """The exchanges of a forecast, added up by kind, mesh axes and network."""
    return sum_collectives(collective for collective, _ in forecast.collectives)


def sum_collectives(collectives: Iterable[Collective]) -> tuple[Sent, ...]:
    """Exchanges, added up by kind, mesh axes and network."""
    groups = collections.defaultdict(list)
    for collective in collectives:
        groups[collective.kind, collective.axes, collective.network].append(collective)
    return tuple(
        Sent(
            kind=kind,
            axes=axes,
            network=network,
            bytes=sum(c.total_bytes for c in group),
            count=sum(c.count for c in group),
        )
        for (kind, axes, network), group in sorted(groups.items())
    )


def find_figures(forecast: Forecast, beside: float = 0.0) -> tuple[Figure, ...]:
    """The figures of a forecast, in the order of the table.

    `beside` is the largest number of bytes in other columns of the table.
    """
    parts = (_machine, _memory, _computation, _sent, _time, _itself)
    found = (figure for part in parts for figure in part(forecast))
    most = max(beside, forecast.most_bytes)
    return tuple(dataclasses.replace(f, beside=most) if f.unit == 'bytes' else f for f in found)


def figure_of(forecast: Forecast, section: str, label: str) -> Figure:
    """The figure of a forecast with a label."""
    found = find_figures(forecast)
    return next(f for f in found if (f.section, f.label) == (section, label))


def table_rows(forecasts: Sequence[Forecast]) -> list[Row]:
    """The figures of forecasts next to each other, without rows in which nothing is known."""
    most = max((one.most_bytes for one in forecasts), default=0.0)
    tables = [{(f.section, f.label): f for f in find_figures(one, most)} for one in forecasts]
    known: dict[tuple[str, str], Figure] = {}
    for table in tables:
        known |= table
    sections = collections.defaultdict(list)
    for (section, label), figure in known.items():
        found = tuple(table.get((section, label)) for table in tables)
        row = Row(section=section, label=label, depth=figure.depth, figures=found)
        if any(text != '-' for text in row.texts):
            sections[section].append((row, figure.is_addend))
    return [row for section, rows in sections.items() for row in _in_order(section, rows)]


def _in_order(section: str, rows: Sequence[tuple[Row, bool]]) -> list[Row]:
    """The rows of a section. Addends are sorted; many or small ones of the time are added up."""
    addends = [row for row, is_addend in rows if is_addend]
    addends.sort(key=lambda row: (-sum(row.numbers), row.label))
    others = [row for row, is_addend in rows if not is_addend]
    if section != TIME:
        return [*addends, *others]
    wholes = next((row.numbers for row in others if row.label == 'forecast'), [])
    large = [
        row
        for row in addends
        if any(n and n >= _SMALL * whole for n, whole in zip(row.numbers, wholes, strict=True))
    ][:_LISTED]
    small = [row for row in addends if row not in large]
    return [*others, *large, *([_added_up(small)] if small else [])]


def _added_up(rows: Sequence[Row]) -> Row:
    sums = [sum(column) for column in zip(*(row.numbers for row in rows), strict=True)]
    label = 'everything smaller'
    figures = tuple(Figure(TIME, label, total, 'seconds', depth=2) for total in sums)
    return Row(section=TIME, label=label, depth=2, figures=figures)


def _origin(forecast: Forecast) -> Source:
    """Where the peak and the exchanges come from."""
    return 'analytic' if forecast.back_end == 'none' else 'compiler'


def _machine(forecast: Forecast) -> Iterator[Figure]:
    axes = [f'{axis} {n}' for axis, n in forecast.mesh.items() if n > 1]
    memory, fits = forecast.memory, 'not known'
    if memory.limit is not None:
        free = memory.limit - memory.peak
        left = forecast.show_bytes(abs(free))
        fits = f'yes, {left} free' if free >= 0 else f'NO, lacks {left}'
        if forecast.is_close:
            fits = f'close: {fits.partition(", ")[2]}'
    yield Figure(MACHINE, 'devices', f'{forecast.num_devices:,}', 'text')
    yield Figure(MACHINE, 'mesh', ' x '.join(axes) or 'one device', 'text')
    yield Figure(MACHINE, 'fits', fits, 'text', _origin(forecast))


def _memory(forecast: Forecast) -> Iterator[Figure]:
    memory = forecast.memory
    yield Figure(MEMORY, 'peak', memory.peak, 'bytes', _origin(forecast))
    error = f'±{share_str(FORMULA_ERROR)}' if forecast.back_end == 'none' else None
    yield Figure(MEMORY, 'usual error', error, 'text')
    yield Figure(MEMORY, 'limit', memory.limit, 'bytes')
    yield Figure(MEMORY, 'arguments', memory.arguments, 'bytes')
    for role in ('parameters', 'optimizer', 'batch', 'other'):
        size = getattr(memory, role)
        yield Figure(MEMORY, role, size if size or role != 'other' else None, 'bytes', depth=2)
    yield Figure(MEMORY, 'temporaries', memory.temporaries, 'bytes', 'compiler')
    yield Figure(FORMULA, 'gradients', memory.gradients or None, 'bytes')
    yield Figure(FORMULA, 'activations', memory.activations or None, 'bytes')
    if forecast.back_end != 'none':  # otherwise it is the one above
        label = 'peak (the one above counts)'
        yield Figure(FORMULA, label, memory.analytic_peak or None, 'bytes')


def _computation(forecast: Forecast) -> Iterator[Figure]:
    yield Figure(COMPUTATION, 'of the model', forecast.model_flops, 'FLOPs')
    yield Figure(COMPUTATION, 'with recomputation', forecast.program_flops, 'FLOPs')


def _sent(forecast: Forecast) -> Iterator[Figure]:
    """A figure for each kind, axes and network, and their sum."""
    exchanges, origin = sum_exchanges(forecast), _origin(forecast)
    for label, size in sent_by_label(forecast, exchanges).items():
        yield Figure(SENT, label, size or None, 'bytes', origin, is_addend=True)
    total = sum(sent.bytes for sent in exchanges)
    hidden = sum(c.total_bytes for c, _ in forecast.collectives if c.asynchronous)
    is_decided = all(c.asynchronous is not None for c, _ in forecast.collectives)
    share = hidden / total if total and is_decided else None
    yield Figure(SENT, 'next to other operations', share, 'share', origin)
    is_known = exchanges or forecast.memory.temporaries is not None  # None without a program
    yield Figure(SENT, 'all', round(total) if is_known else None, 'bytes', origin)


def sent_by_label(forecast: Forecast, exchanges: Sequence[Sent]) -> Mapping[str, float]:
    """The bytes of exchanges by their names for people: 'all-gather over fsdp (ICI)'."""
    sums: dict[str, float] = collections.defaultdict(float)
    for sent in exchanges:
        over = f' over {", ".join(sent.axes)}' if sent.axes else ''
        sums[f'{sent.kind}{over} ({network_name(forecast, sent.network, sent.axes)})'] += sent.bytes
    return sums


def _time(forecast: Forecast) -> Iterator[Figure]:
    time = forecast.time
    bounds = f'{seconds_str(time.low)} to {seconds_str(time.high)}' if time else None
    yield Figure(TIME, 'forecast', time.seconds if time else None, 'seconds')
    yield Figure(TIME, 'range', bounds, 'text')
    yield Figure(TIME, 'MFU', forecast.mfu, 'share')
    rate, cost = tokens_per_second(forecast), cost_per_million(forecast)
    yield Figure(TIME, 'tokens per second', None if rate is None else f'{rate:,.0f}', 'text')
    yield Figure(TIME, 'price of a million tokens', None if cost is None else f'{cost:.3g}', 'text')
    most = next(iter(bounds_of(time).items()), None) if time else None
    yield Figure(TIME, 'most of it', f'{most[0]} {share_str(most[1])}' if most else None, 'text')
    for part in time.parts if time else ():
        yield Figure(TIME, part.name, part.exposed, 'seconds', depth=2, is_addend=True)


def hanging(width: int) -> textwrap.TextWrapper:
    """Wraps the lines of a list in a report: each is indented, and its rest more."""
    return textwrap.TextWrapper(
        width=width,
        initial_indent='  ',
        subsequent_indent='      ',
        break_long_words=False,
        break_on_hyphens=False,
    )


def outside_words(time: StepTime | None) -> str:
    """Why the range of a time is wider than the range of measured steps; '' if it is not."""
    if time is None or not time.outside:
        return ''
    return f'the range of the time is wider than for measured steps: {"; ".join(time.outside)}'


def _itself(forecast: Forecast) -> Iterator[Figure]:
    taken = forecast.compilation
    yield Figure(ITSELF, 'time', taken.seconds or None, 'seconds', 'measured')
    yield Figure(ITSELF, 'memory of this process', taken.peak_rss or None, 'bytes', 'measured')
