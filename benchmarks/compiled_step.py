"""What train steps of the shipped configurations cost on TPUs, next to MaxText's, without a TPU.

Each row is compiled from shipped gin files for a described machine, in a process of its own, which
takes 30 s to several minutes. All figures are per device. Three are from the compiler: the peak of
the memory in GB, the estimated computation in ms (without kernels and collectives), and what a step
sends to other devices in GB. MaxText's are of the same sizes, batches, types and machines (August
2026, jax 0.12.0.1, libtpu 0.0.51). A figure above its mark has a '!'.

The next line is the forecast of the whole step by meshwright's model, with its parts in ms: they
add up to the step. Exchanges count with what nothing hides; overheads are their latency, waiting
and copies to and from the host. Of the bytes that are sent, it says how many the compiled program
sends while it computes, by its schedule.

With MaxText's code and a Python that has what it needs, such as the same jax and libtpu, rows are
compiled next to its step at its best, by `maxtext_step.py`. Both are compiled until they are
scheduled, so that the time of products is by formula.

Results are added to a file. Rows that it has are not compiled again, so a campaign can be resumed.

Usage:
  python benchmarks/compiled_step.py [--rows=1b,8b_fsdp] [--results=FILE] [--again] [--list]
      [--maxtext=PYTHON --maxtext_source=FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'

from jax.sharding import Mesh
from maxtext_step import PEERS, schedule_maxtext
from shipped_runs import RUNS, ShippedRun

from benchmarks.campaigns import measure_in_new_process, package_versions, run_named
from benchmarks.measured_steps.early import ask_for_text, compile_until_scheduled
from benchmarks.measured_steps.own_cases import mesh_of, read_stored_costs, read_stored_work
from benchmarks.measured_steps.own_programs import read_text
from meshwright.jaxpr import estimate_memory, list_collectives, trace_function
from meshwright.program.costs import ProgramCosts, costs_of_text, mesh_axes
from meshwright.time import Work, estimate_step_time, read_work
from meshwright.time.layers import describe_layers
from partitioning.hardware import CHIPS, chip_of
from train.config import TrainConfig
from train.gin.load import find_config, load_config
from train.planning.precompiling import compile_step
from train.running.programs import partition_train_step
from train.running.run import prepare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What a step costs on a device: peak GB, estimated compute ms, and wire GB per step."""

    peak: float | None = None
    compute: float | None = None
    wire: float | None = None


# The figures that a row must not exceed, and MaxText's figures. The rows '1b', '1b_128k_words' and
# '8b_fsdp' are of libtpu 0.0.52, with our compiler option for larger tiles.
MARKS = {
    '1b': Figures(peak=2.0, compute=245, wire=7.7),
    '1b_128k_words_windowed': Figures(peak=2.5, wire=12.2),
    '1b_128k_words': Figures(peak=2.5, compute=330, wire=12.2),
    '8b_fsdp': Figures(peak=4.3, compute=640, wire=44),
    '8b_fsdp_offload': Figures(peak=3.2, compute=640),
    '8b_fsdp8_tensor8': Figures(peak=4.6, compute=700, wire=86),
    '8b_fsdp16_tensor4': Figures(peak=4.3, compute=660, wire=44),
    '70b_v5p': Figures(peak=12, compute=1.35 * 2400),
    '70b_v6e': Figures(peak=10),
}
MAXTEXT = {
    '1b_dot_windowed': Figures(peak=3.19, compute=940, wire=12.9),
    '1b_windowed': Figures(peak=2.03, compute=651, wire=10.9),
    '1b': Figures(peak=2.06, compute=262, wire=8.05),
    # 2.50 / 943 / 32.1 in 8 tiles
    '1b_128k_words_windowed': Figures(peak=4.29, compute=716, wire=12.1),
    '1b_128k_words': Figures(peak=3.64, compute=315, wire=10.3),
    '8b_fsdp': Figures(peak=5.45, compute=623, wire=61.2),
    '8b_fsdp8_tensor8': Figures(peak=5.33, compute=711, wire=88.6),
    '8b_fsdp16_tensor4': Figures(peak=5.57, compute=672, wire=46.4),
}
_PEER = '_maxtext'  # the end of the names of MaxText's rows
# The runs of forecast_cases.py that nothing is compared with here.
_ONLY_FORECAST = ('125m', '125m_data_parallel', '125m_tensor', '8b_data_parallel', '8b_h100')
ROWS = {name: run for name, run in RUNS.items() if name not in _ONLY_FORECAST}


def measure(name: str) -> dict[str, Any]:
    """Compiles a row, and returns its figures, with those that are estimated without a compiler."""
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        config = _find_config(ROWS[name])
        step = compile_step(config)
    seconds = time.perf_counter() - started
    run, costs = step.run, step.costs
    started_tracing = time.perf_counter()
    traced = trace_function(step.step, run.plan.abstract_state, dict(run.batch))
    estimated = estimate_memory(traced, CHIPS[costs.chip])
    estimated_wire = sum(c.total_bytes for c in list_collectives(traced))
    estimate_seconds = time.perf_counter() - started_tracing
    mesh = config.partitioner.mesh
    work = read_work(costs, traced.jaxpr, mesh.size, layers=describe_layers(traced))
    return {
        **describe(work, mesh, costs, dataclasses.asdict(costs.memory)),
        'estimated_peak': estimated.peak / 1e9,
        'estimated_wire': estimated_wire / 1e9,
        'estimate_seconds': estimate_seconds,
        'compute': costs.compute_seconds * 1e3,
        'remat': run.remat,
        'seconds': seconds,
    }


def schedule(name: str) -> None:
    """Compiles a row until it is scheduled, prints its figures as JSON, and ends this process."""
    folder, started = ask_for_text(), time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        run = prepare(config := _find_config(ROWS[name]))
    mesh, step = config.partitioner.mesh, partition_train_step(run)
    traced = trace_function(step, run.plan.abstract_state, dict(run.batch))
    layers, chip = describe_layers(traced), chip_of(mesh.devices.flat[0].device_kind)
    assert chip is not None

    def finish(text: str, memory: Mapping[str, int]) -> None:
        costs = costs_of_text(text, mesh=mesh_axes(mesh), chip=chip.name)
        work = read_work(costs, traced.jaxpr, mesh.size, layers=layers)
        seconds = time.perf_counter() - started
        found = describe(work, mesh, costs, memory) | {'remat': run.remat, 'seconds': seconds}
        print(json.dumps(found))

    lowered = step.lower(run.plan.abstract_state, dict(run.batch))
    compile_until_scheduled(lowered.compile, folder, finish)


def measure_maxtext(name: str, python: str, source: str) -> dict[str, Any]:
    """Compiles MaxText's step of a row until it is scheduled, and returns its figures."""
    found = schedule_maxtext(ROWS[name], python, source)
    mesh = mesh_of(found)
    costs = read_stored_costs(found, read_text(found), mesh)
    described = describe(read_stored_work(found, costs), mesh, costs, found['memory'])
    return described | {'seconds': found['seconds']['all'], 'versions': found['versions']}


def _find_config(row: ShippedRun) -> TrainConfig:
    load_config(row.files, row.all_bindings)
    return find_config()


def describe(
    work: Work, mesh: Mesh, costs: ProgramCosts, memory: Mapping[str, int]
) -> dict[str, Any]:
    """Returns what a step needs, sends and takes by forecast: GB per device, and ms."""
    wire = {
        ' '.join((network, '+'.join(axes), kind)): size / 1e9
        for (network, axes, kind), size in costs.wire_table().items()
    }
    return {
        'mesh': dict(mesh.shape),
        'chip': costs.chip,
        **{name: memory[name] / 1e9 for name in ('peak', 'arguments', 'temporaries')},
        'wire': costs.wire_bytes() / 1e9,
        'wire_by_axes': wire,
        **forecast_parts(work, mesh, costs),
        'versions': package_versions('jax', 'libtpu'),
    }


# The words for the parts of a step that no exchange makes; all others are overheads.
_PARTS = {'matrix products': 'products', 'kernels': 'kernels', 'other operations': 'others'}


def forecast_parts(work: Work, mesh: Mesh, costs: ProgramCosts) -> dict[str, Any]:
    """Returns the forecast of a step and its parts in ms, and how much is sent asynchronously."""
    step = estimate_step_time(work, mesh)
    assert step is not None  # the chips of all rows are known
    parts = dict.fromkeys((*_PARTS.values(), 'exchanges', 'overheads'), 0.0)
    for part in step.parts:
        is_exchange = ' over ' in part.name
        name = _PARTS.get(part.name, 'exchanges' if is_exchange else 'overheads')
        parts[name] += part.exposed * 1e3
    sent = sum(c.total_bytes for c in costs.collectives if c.asynchronous)
    return {
        'step': step.seconds * 1e3,
        'parts': parts,
        'at_peak': work.matmul_flops / CHIPS[work.chip].peak_flops_per_device * 1e3,
        'sent_asynchronously': sent / 1e9,
    }


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the figures of each row next to MaxText's, and the marks that it misses."""
    print(f'{"peak GB / compute ms / wire GB":<25}{"ours":>24}{"mark":>24}{"MaxText":>24}')
    for row in ROWS:
        if (found := results.get(row)) is None:
            continue
        marks, peer = (dataclasses.asdict(of.get(row, Figures())) for of in (MARKS, MAXTEXT))
        ours = {name: found[name] for name in marks}
        print(f'{row:<25}{_show(ours, marks):>24}{_show(marks):>24}{_show(peer):>24}')
        if 'step' in found:
            parts = ', '.join(f'{name} {ms:.0f}' for name, ms in found['parts'].items())
            print(
                f'  forecast of the step {found["step"]:.0f} ms: {parts}; products at the peak '
                f'rate {found["at_peak"]:.0f} ms; {found["sent_asynchronously"]:.1f} GB are sent '
                'while it computes'
            )
        print(
            f'  arguments {found["arguments"]:.2f} GB, temporaries {found["temporaries"]:.2f} GB; '
            + ', '.join(
                f'{key} {size:.2f} GB'
                for key, size in found['wire_by_axes'].items()
                if size >= 0.005
            )
        )
        if 'estimated_peak' in found:
            print(
                f'  without a compiler: peak {found["estimated_peak"]:.2f} GB, wire '
                f'{found["estimated_wire"]:.1f} GB, in {found["estimate_seconds"]:.1f} s'
            )


def _show(figures: Mapping[str, float | None], marks: Mapping[str, float | None] = {}) -> str:
    if not any(figures.values()):
        return ''
    parts = []
    for name, digits in (('peak', 2), ('compute', 0), ('wire', 1)):
        value, mark = figures[name], marks.get(name)
        missed = value is not None and mark is not None and round(value, digits) > mark
        parts.append('-' if value is None else f'{value:.{digits}f}' + '!' * missed)
    return ' / '.join(parts)


def print_comparison(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints our steps next to MaxText's, with the parts of both and the ratio of the steps."""
    print('peak GB / sent GB / ms of the step (products + kernels + exchanges + the rest)')
    for row in PEERS:
        both = [results.get(name) for name in (row, f'{row}{_PEER}')]
        for who, one in zip(('ours', 'MaxText'), both, strict=True):
            if one is not None:
                print(f'{row:<25}{who:<9}{_show_step(one)}')
        if all(both):
            print(f'{"":<25}ratio of the steps {both[0]["step"] / both[1]["step"]:.3f}')


def _show_step(found: Mapping[str, Any]) -> str:
    products, kernels, others, exchanges, overheads = (
        found['parts'][name] for name in (*_PARTS.values(), 'exchanges', 'overheads')
    )
    parts = (products, kernels, exchanges, others + overheads)
    shown = ' + '.join(f'{part:.0f}' for part in parts)
    return f'{found["peak"]:.2f} / {found["wire"]:.1f} / {found["step"]:.0f} ({shown})'


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument('--maxtext', metavar='PYTHON')
    parser.add_argument('--maxtext_source', metavar='FOLDER', help='with the package maxtext')
    python = (options := parser.parse_known_args()[0]).maxtext
    listed = {
        row.name: f'{" ".join(row.files)}  {"; ".join(row.all_bindings)}' for row in ROWS.values()
    }
    if python is None:
        measure_row = functools.partial(measure_in_new_process, measure)
        path, show = 'build/compiled_step.json', print_table
    else:
        listed = {f'{row}{end}': listed[row] for row in PEERS for end in ('', _PEER)}
        path, show = 'build/compiled_step_maxtext.json', print_comparison

        def measure_row(name: str) -> Any:
            if (row := name.removesuffix(_PEER)) == name:
                return measure_in_new_process(schedule, name)
            return measure_in_new_process(measure_maxtext, row, python, options.maxtext_source)

    if results := run_named(__doc__, 'row', listed, path, measure_row, [parser]):
        show(results)


if __name__ == '__main__':
    main()
