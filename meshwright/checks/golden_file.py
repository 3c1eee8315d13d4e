"""The file of a golden forecast: what a reviewer agreed to, and what differs from it.

It is JSON with one line for each exchange and each array, so that version control shows what
changed:

    {
     "format": "meshwright golden forecast 1",
     "function": "train_step",
     "topology": "v5p:4x4x4",
     "num_slices": 1,
     "mesh": {"fsdp": 16, "tensor": 4},
     "compiler": "libtpu 0.0.52",
     "fits": true,
     "peak": 8053063680,
     "collectives": [
      {"kind": "all-gather", "axes": ["fsdp"], "network": "ici", "bytes": 48000000000, "count": 96}
     ],
     "arrays": [
      {"path": "params/embedding", "shape": [128256, 4096], "dtype": "float32",
       "spec": "P('tensor', 'fsdp')", "bytes_per_device": 32833536}
     ]
    }
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from meshwright.report.figures import MEMORY, Sent, figure_of, sum_exchanges, verdict
from meshwright.report.forecasts import Forecast
from partitioning.amounts import bytes_str, share_str
from partitioning.plan.tables import shape_str, spec_or_padded_str
from partitioning.rules import describe_axes

FORMAT = 'meshwright golden forecast 1'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How much a forecast may differ from its golden file. Layouts may not differ.

    Attributes:
      peak: the share by which the peak memory may differ.
      wire: the share by which the bytes of one kind of exchange over the same axes may differ.
      count: the share by which the number of such exchanges may differ.
    """

    peak: float = 0.01
    wire: float = 0.01
    count: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenArray:
    """An array of the arguments with its layout."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes_per_device: int

    def __str__(self) -> str:
        held = bytes_str(self.bytes_per_device)
        return f'{shape_str(self.shape)} {self.dtype}, {self.spec}, {held} per device'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """What a golden file has of a forecast."""

    function: str
    topology: str
    num_slices: int
    mesh: Mapping[str, int]
    compiler: str
    fits: bool | None
    peak: int
    collectives: tuple[Sent, ...]
    arrays: tuple[GoldenArray, ...]


def golden_of(forecast: Forecast) -> Golden:
    """What the golden file of a forecast has."""
    peak = figure_of(forecast, MEMORY, 'peak').value
    assert isinstance(peak, int)
    return Golden(
        function=forecast.function,
        topology=forecast.topology,
        num_slices=forecast.num_slices,
        mesh=dict(forecast.mesh),
        compiler=forecast.back_end_version,
        fits=forecast.fits,
        peak=peak,
        collectives=tuple(
            dataclasses.replace(sent, bytes=round(sent.bytes)) for sent in sum_exchanges(forecast)
        ),
        arrays=tuple(
            GoldenArray(
                path=row.path,
                shape=tuple(row.shape),
                dtype=row.dtype,
                spec=spec_or_padded_str(row.spec),
                bytes_per_device=row.bytes_per_device,
            )
            for row in sorted(forecast.arrays, key=lambda row: row.path.split('/'))
        ),
    )


def compare_golden(golden: Golden, now: Golden, tolerances: Tolerances) -> list[str]:
    """Returns what differs, one line for each figure and array; empty if nothing does."""
    lines = []
    if golden.mesh != now.mesh:
        lines.append(f'mesh: {describe_axes(golden.mesh)} -> {describe_axes(now.mesh)}')
    if golden.fits != now.fits:
        lines.append(f'{verdict(golden.fits)} -> {verdict(now.fits)}')
    if _differs(golden.peak, now.peak, tolerances.peak):
        lines.append(f'peak memory: {_change(golden.peak, now.peak, tolerances.peak)}')
    lines += _compare_exchanges(golden.collectives, now.collectives, tolerances)
    lines += compare_arrays(golden.arrays, now.arrays)
    return lines


def _compare_exchanges(
    golden: Sequence[Sent], now: Sequence[Sent], tolerances: Tolerances
) -> Iterator[str]:
    old, new = ({_name_of(sent): sent for sent in held} for held in (golden, now))
    for name in {**old, **new}:
        if name not in new:
            yield f'- {name}: {bytes_str(old[name].bytes)} in {old[name].count:,}'
        elif name not in old:
            yield f'+ {name}: {bytes_str(new[name].bytes)} in {new[name].count:,}'
        else:
            before, after = old[name], new[name]
            changes = []
            if _differs(before.bytes, after.bytes, tolerances.wire):
                changes.append(_change(before.bytes, after.bytes, tolerances.wire))
            if _differs(before.count, after.count, tolerances.count):
                changes.append(f'executed {before.count:,} -> {after.count:,} times')
            if changes:
                yield f'~ {name}: {"; ".join(changes)}'


def compare_arrays(golden: Sequence[GoldenArray], now: Sequence[GoldenArray]) -> Iterator[str]:
    """Yields a line for each array that is missing, new, or laid out differently."""
    old, new = ({array.path: array for array in held} for held in (golden, now))
    for path in {**old, **new}:
        if path not in new:
            yield f'- {path}: {old[path]}'
        elif path not in old:
            yield f'+ {path}: {new[path]}'
        elif old[path] != new[path]:
            changes = [
                f'{field.name.replace("_", " ")} {_value_str(old[path], field.name)} -> '
                f'{_value_str(new[path], field.name)}'
                for field in dataclasses.fields(GoldenArray)
                if getattr(old[path], field.name) != getattr(new[path], field.name)
            ]
            yield f'~ {path}: {"; ".join(changes)}'


def _name_of(sent: Sent) -> str:
    """The exchanges for people: 'all-gather over fsdp (ici)'."""
    return f'{sent.kind} over {" x ".join(sent.axes) or "unnamed axes"} ({sent.network})'


def _differs(before: float, after: float, tolerance: float) -> bool:
    return abs(after - before) > tolerance * abs(before)


def _change(before: float, after: float, tolerance: float) -> str:
    """Two numbers of bytes and their difference: `7.50 GiB -> 9.00 GiB (+20%, more than 1%)`."""
    change = f'{bytes_str(before)} -> {bytes_str(after)}'
    if not before:
        return change
    share = after / before - 1
    sign = '+' if share > 0 else '-'
    return f'{change} ({sign}{share_str(abs(share))}, more than {100 * tolerance:g}%)'


def _value_str(array: GoldenArray, name: str) -> str:
    value = getattr(array, name)
    if name == 'shape':
        return shape_str(value)
    return bytes_str(value) if name == 'bytes_per_device' else str(value)
