"""Forecasts of measured rows from their own programs, which `own_programs` stores, as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from meshwright.program.costs import ProgramCosts, costs_of_text, mesh_axes
from meshwright.report.plain_values import from_plain
from meshwright.time import KernelWork, Machine, Work, describe_machine, estimate_step_time
from meshwright.time.layers import Layers
from meshwright.time.step_model import StepTime
from partitioning.amounts import bytes_str
from partitioning.hardware import CHIPS, describe_topology
from partitioning.hardware.topology import split_slices

from .own_programs import read_found, read_text
from .rows import MeasuredRow, load_rows, network_bandwidth_of
from .scoring import rank_correlation, summarize_errors

_GAP = 0.01  # of parameters or FLOPs, from which a program is told as another one


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnForecast:
    """A measured row with the forecast of its own program.

    Attributes:
      row: the measured row.
      found: what the store has about its program.
      compiled: the forecast from the compiled program; None if it does not fit.
      traced: the forecast by formula.
      naive: the model's FLOPs at the median MFU of all other rows of the chip.
    """

    row: MeasuredRow
    found: Mapping[str, Any]
    compiled: StepTime | None
    traced: StepTime | None
    naive: float

    def time_by(self, origin: str) -> StepTime | None:
        """The forecast of an origin: 'compiler' or 'jaxpr'."""
        return self.compiled if origin == 'compiler' else self.traced


def forecast_rows(
    rows: Sequence[MeasuredRow],
) -> tuple[list[OwnForecast], dict[str, str]]:
    """Forecasts the rows whose programs the store has.

    Returns:
      The forecasts, and for each other row why there is none.
    """
    forecasts: list[OwnForecast] = []
    reasons: dict[str, str] = {}
    # A file of few rows says nothing about the usual MFU of a chip.
    known = {row.name: row for row in (*load_rows(), *rows)}.values()
    for row in rows:
        found = read_found(row)
        if isinstance(found, str):
            reasons[row.name] = found
            continue
        mesh = mesh_of(found)
        machine = describe_own_machine(row, mesh)
        text = read_text(found) if found['memory'] else ''
        work = read_stored_work(found, read_stored_costs(found, text, mesh)) if text else None
        compiled = estimate_step_time(work, machine) if work else None
        traced = estimate_step_time(from_plain(Work, found['work'], 'work'), machine)
        naive = naive_forecast(row, known)
        forecasts.append(
            OwnForecast(row=row, found=found, compiled=compiled, traced=traced, naive=naive)
        )
    return forecasts, reasons


def mesh_of(found: Mapping[str, Any]) -> Mesh:
    """The mesh that a stored program was compiled for."""
    name, slices = split_slices(found['topology'])
    devices = {d.id: d for d in describe_topology(name, num_slices=slices).devices}
    order = np.array([devices[i] for i in found['device_ids']], dtype=object)
    return Mesh(order.reshape(tuple(found['mesh'].values())), tuple(found['mesh']))


def read_stored_costs(found: Mapping[str, Any], text: str, mesh: Mesh) -> ProgramCosts:
    """The costs of a stored program, without its memory."""
    return costs_of_text(text, mesh=mesh_axes(mesh), chip=found['chip'])


def read_stored_work(found: Mapping[str, Any], costs: ProgramCosts) -> Work:
    """The work of a device in a stored program, as `read_work` reads it from a compiled one."""
    chip = CHIPS[found['chip']]
    products = sum(o.cycles for o in costs.operations if o.kind == 'matmul')
    clock = chip.clock_hz if costs.cycles else None
    of_groups = found['group_flops'] / chip.peak_flops_per_device
    return Work(
        origin='compiler',
        chip=chip.name,
        matmul_flops=found['matmul_flops'],
        matmul_seconds=products / clock + of_groups if clock else None,
        other_seconds=(costs.cycles - products) / clock if clock else None,
        other_bytes=costs.device_bytes,
        kernels=tuple(KernelWork(**kernel) for kernel in found['kernel_work']),
        collectives=costs.collectives,
        host_bytes=costs.host_bytes,
        layers=found['layers'] and from_plain(Layers, found['layers'], 'layers'),
    )


def describe_own_machine(row: MeasuredRow, mesh: Mesh) -> Machine:
    """Describes the machine of a row whose program has this mesh."""
    machine = describe_machine(mesh)
    assert machine is not None
    bandwidth = network_bandwidth_of(row)
    return dataclasses.replace(machine, network_bandwidth=bandwidth) if bandwidth else machine


def model_flops_of(row: MeasuredRow) -> float:
    """The FLOPs of a model per device and step, with attention as causal."""
    tokens = row['global_batch'] * row['seq_len'] / row.num_devices
    return 1e9 * row['check']['gflop_per_token']['causal_attention'] * tokens


def naive_forecast(row: MeasuredRow, rows: Iterable[MeasuredRow]) -> float:
    """The FLOPs of a model at the median MFU of the other rows of its chip, or of all chips."""
    others = [o for o in rows if o.name != row.name and o['usable_for_step_time']]
    alike = [o for o in others if o.chip == row.chip] or others
    mfu = statistics.median(
        model_flops_of(o) / (o.step_seconds * CHIPS[o.chip].peak_flops_per_device) for o in alike
    )
    return model_flops_of(row) / (CHIPS[row.chip].peak_flops_per_device * mfu)


def find_differences(forecast: OwnForecast) -> Iterator[str]:
    """In what a program differs from the measured one, as far as the row says it."""
    row, found = forecast.row, forecast.found
    if abs(found['parameters'] / row.params_total - 1) > _GAP:
        yield f'{found["parameters"]:,} parameters in place of {row.params_total:,}'


def score_own(forecasts: Sequence[OwnForecast], origin: str) -> dict[str, Any] | None:
    """Returns the fields of `Score` for forecasts from one origin, or None if there are no rows."""
    pairs = [(f, time) for f in forecasts if (time := f.time_by(origin)) is not None]
    if not pairs:
        return None
    measured = [f.row.step_seconds for f, _ in pairs]
    errors = [time.seconds / s - 1 for (_, time), s in zip(pairs, measured, strict=True)]
    naive = [f.naive / s - 1 for (f, _), s in zip(pairs, measured, strict=True)]
    within = [t.low <= s <= t.high for (_, t), s in zip(pairs, measured, strict=True)]
    rank = rank_correlation([time.seconds for _, time in pairs], measured)
    return summarize_errors(errors, naive, within) | {'rank': rank}


# The table of the forecasts.

_ORIGINS = {'jaxpr': 'by formula', 'compiler': 'of compiled programs'}
_COLUMNS = ('mean', 'median', 'worst', 'bias', 'naive', 'within')


def print_own(forecasts: Sequence[OwnForecast], reasons: Mapping[str, str]) -> None:
    """Prints a line per row, the errors by chip and by framework, and what is missing."""
    print(f'{len(forecasts)} rows are forecast from their own programs, {len(reasons)} are not.\n')
    print(
        f'{"row":42} {"measured":>9} {"compiled":>18} {"by formula":>18} {"naive":>7} '
        f'{"peak of":>10} {"limit":>10} {"fits":>4} {"cpu s":>6}'
    )
    order = list(CHIPS)
    for f in sorted(forecasts, key=lambda f: order.index(f.row.chip)):
        print(_line(f))
    used = [f for f in forecasts if f.row['usable_for_step_time']]
    for origin, title in _ORIGINS.items():
        _print_scores(f'Errors of forecasts {title}, by chip', used, origin, lambda f: f.row.chip)
        _print_scores('By framework', used, origin, lambda f: f.row['framework'].split()[0])
        _print_scores('By class', used, origin, lambda f: f.row['class'])
    _print_list('Rows that ran, and do not fit by their forecast', _unfit(forecasts))
    _print_list('Programs that differ from what was measured', _differences(forecasts))
    _print_list('Rows without a forecast', reasons.items())


def _line(f: OwnForecast) -> str:
    cells = [
        f'{"-":>18}'
        if time is None
        else f'{time.seconds:8.2f} s {time.seconds / f.row.step_seconds - 1:+7.1%}'
        for time in (f.compiled, f.traced)
    ]
    found = f.found
    peak = _peak_of(found)
    fits = 'yes' if found['fits'] else 'no'
    old = '  superseded' if f.row.superseded else ''
    return (
        f'{f.row.name:42} {f.row.step_seconds:7.2f} s {" ".join(cells)} '
        f'{f.naive / f.row.step_seconds - 1:+7.1%} {bytes_str(peak):>10} '
        f'{bytes_str(found["memory_limit"]):>10} {fits:>4} {found["seconds"]["all"]:6.0f}{old}'
    )


def _print_scores(
    title: str,
    forecasts: Sequence[OwnForecast],
    origin: str,
    kind: Callable[[OwnForecast], str],
) -> None:
    print(f'\n{title}')
    heads = ''.join(f'{name:>8}' for name in _COLUMNS)
    print(f'  {"":16} {"rows":>4}{heads} {"rank":>6}')
    for name in (*sorted({kind(f) for f in forecasts}), 'all'):
        found = score_own([f for f in forecasts if name in (kind(f), 'all')], origin)
        if found is None:
            continue
        cells = ''.join(f'{found[column]:8.1%}' for column in _COLUMNS)
        rank = '' if found['rank'] is None else f'{found["rank"]:.3f}'
        print(f'  {name:16} {found["rows"]:4}{cells} {rank:>6}')


def _unfit(forecasts: Sequence[OwnForecast]) -> Iterator[tuple[str, str]]:
    for f in forecasts:
        if not f.found['fits']:
            by = 'the compiler' if f.found['memory'] or f.found['needed'] else 'formula'
            peak, limit = bytes_str(_peak_of(f.found)), bytes_str(f.found['memory_limit'])
            yield f.row.name, f'{peak} of {limit}, by {by}'


def _peak_of(found: Mapping[str, Any]) -> int:
    if found['memory']:
        return found['memory']['peak']
    return found['needed'] or found['peak_by_formula']


def _differences(forecasts: Sequence[OwnForecast]) -> Iterator[tuple[str, str]]:
    for f in forecasts:
        for difference in find_differences(f):
            yield f.row.name, difference


def _print_list(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    found = list(pairs)
    if found:
        print(f'\n{title}')
        for name, text in found:
            print(f'  {name:42} {text}')
