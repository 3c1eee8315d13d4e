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

Results are added to a file. Rows that it has are not compiled again, so a campaign can be resumed.

Usage:
  python benchmarks/compiled_step.py [--rows=1b,8b_fsdp] [--results=FILE] [--again] [--list]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'

from shipped_runs import RUNS

from benchmarks.campaigns import measure_in_new_process, package_versions, run_named
from meshwright.jaxpr import estimate_memory, list_collectives, trace_function
from meshwright.program.costs import ProgramCosts
from meshwright.time import Work, estimate_step_time, read_work
from meshwright.time.layers import describe_layers
from partitioning.hardware import CHIPS
from train.gin.load import find_config, load_config
from train.planning.precompiling import compile_step


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
PEERS = {
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
# The runs of forecast_cases.py that nothing is compared with here.
_ONLY_FORECAST = ('125m', '125m_data_parallel', '125m_tensor', '8b_data_parallel', '8b_h100')
ROWS = {name: run for name, run in RUNS.items() if name not in _ONLY_FORECAST}


def measure(name: str) -> dict[str, Any]:
    """Compiles a row, and returns its figures, with those that are estimated without a compiler."""
    row, started = ROWS[name], time.perf_counter()
    load_config(row.files, row.all_bindings)
    with contextlib.redirect_stdout(sys.stderr):
        config = find_config()
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
    wire = {
        ' '.join((network, '+'.join(axes), kind)): size / 1e9
        for (network, axes, kind), size in costs.wire_table().items()
    }
    return {
        'mesh': dict(config.partitioner.mesh.shape),
        'chip': costs.chip,
        'peak': costs.memory.peak / 1e9,
        'arguments': costs.memory.arguments / 1e9,
        'temporaries': costs.memory.temporaries / 1e9,
        'estimated_peak': estimated.peak / 1e9,
        'estimated_wire': estimated_wire / 1e9,
        'estimate_seconds': estimate_seconds,
        'compute': costs.compute_seconds * 1e3,
        'wire': costs.wire_bytes() / 1e9,
        'wire_by_axes': wire,
        'remat': run.remat,
        **forecast_parts(work, mesh, costs),
        'seconds': seconds,
        'versions': package_versions('jax', 'libtpu'),
    }


# The words for the parts of a step that no exchange makes; all others are overheads.
_PARTS = {'matrix products': 'products', 'kernels': 'kernels', 'other operations': 'others'}


def forecast_parts(work: Work, mesh: Any, costs: ProgramCosts) -> dict[str, Any]:
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
        marks, peer = (dataclasses.asdict(of.get(row, Figures())) for of in (MARKS, PEERS))
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


def main() -> None:
    listed = {
        row.name: f'{" ".join(row.files)}  {"; ".join(row.all_bindings)}' for row in ROWS.values()
    }
    measure_row = functools.partial(measure_in_new_process, measure)
    if results := run_named(__doc__, 'row', listed, 'build/compiled_step.json', measure_row):
        print_table(results)


if __name__ == '__main__':
    main()
