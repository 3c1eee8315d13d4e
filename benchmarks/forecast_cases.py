"""Forecasts of shipped configurations, next to counts by hand. Nothing runs on the machines.

Each case is forecast twice, in processes of their own, which takes one to several minutes. Then the
forecast is compared with the figures of `hand_counts`:

- arguments: 12 bytes per parameter (float32, with two moments of AdamW), the counters, the batch.
- peak: the compiler's, next to the arguments plus the arrays that were found in its program (within
  1%), and next to the peak by formula, without a compiler (within 10%).
- wire: the bytes that a device sends, by kind and mesh axes, next to a count of the weights that
  are gathered, of the gradients that are summed, and of the activations that are exchanged.
- two runs: whether their JSON is equal, apart from "compilation".
- seconds and memory of the forecast: at most 90 s and 3 GB on two cores that do nothing else.

Results are added to a file. Cases that it has are not forecast again, so a campaign can be resumed.

Usage:
  python benchmarks/forecast_cases.py [--cases=1b,8b_fsdp] [--results=FILE] [--again] [--list]
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'

from hand_counts import (
    Case,
    count_data_parallel,
    count_dcn,
    count_fsdp,
    count_fsdp_tensor,
    count_tensor,
)
from shipped_runs import RUNS

from benchmarks.campaigns import measure_in_new_process, run_named
from meshwright import forecast
from meshwright.report.figures import sent_by_label, sum_exchanges
from train.gin.load import find_config, load_config
from train.planning.forecasts import plan_step

_TENSOR: dict[str, Any] = {'wire': count_fsdp_tensor, 'tensor': 8, 'chunks': 16_384}


def _case(name: str, shards: int, norm_shards: int, row_shards: int, **counts: Any) -> Case:
    shared = {'shards': shards, 'norm_shards': norm_shards, 'row_shards': row_shards}
    return Case(**vars(RUNS[name]), **shared, **counts)


# The name of a run, and the numbers of devices that share matrices, scales of norms, and rows.
CASES = (
    _case('125m', 4, 4, 4, wire=count_fsdp, rounds=(4,), chunks=32_768),
    _case('125m_data_parallel', 1, 1, 4, wire=count_data_parallel),
    _case('125m_tensor', 4, 1, 1, wire=count_tensor, tensor=4),
    _case('1b', 16, 16, 16, wire=count_fsdp, rounds=(4, 4), chunks=32_768, sums_to_gather=False),
    _case('8b_fsdp', 64, 64, 64, wire=count_fsdp, rounds=(16, 4), chunks=8 * 16_128),
    _case('8b_fsdp8_tensor8', 64, 8, 8, **_TENSOR),
    _case('70b_v5p', 512, 64, 64, **_TENSOR),
    _case('70b_v6e', 256, 32, 32, **_TENSOR),
    _case('8b_two_slices', 256, 256, 512, wire=count_dcn),
    _case('8b_h100', 8, 8, 8),
    _case('8b_data_parallel', 1, 1, 64, fits=False),
)
KNOWN = {case.name: case for case in CASES}
ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS, MOST_BYTES = 90, 3e9


def measure(name: str) -> dict[str, Any]:
    """Forecasts a case, and returns its figures and the text of its JSON without times."""
    load_config(KNOWN[name].files, KNOWN[name].all_bindings)
    config = find_config()
    planned = plan_step(config)
    made = forecast(planned.step, *planned.arguments)
    used = resource.getrusage(resource.RUSAGE_SELF)
    held = made.as_dict()
    del held['compilation']
    memory = made.memory
    return {
        'fits': made.fits,
        'back_end': made.back_end_version,
        'mesh': dict(made.mesh),
        'memory': {k: v for k, v in held['memory'].items() if k != 'buffers'},
        'buffers': [
            [array.array, array.nbytes, array.source.removeprefix(f'{ROOT}/')]
            for array, _ in memory.buffers[:5]
        ],
        'wire': dict(sorted(sent_by_label(made, sum_exchanges(made)).items())),
        'model_flops': made.model_flops,
        'program_flops': made.program_flops,
        'time': made.time.seconds if made.time else None,
        'mfu': made.mfu,
        'notes': list(made.notes),
        'warnings': list(made.warnings),
        'seconds': made.compilation.seconds,
        'cpu_seconds': used.ru_utime + used.ru_stime,
        'peak_rss': made.compilation.peak_rss,
        'json': json.dumps(held),
    }


def measure_twice(name: str) -> dict[str, Any] | None:
    """Forecasts a case in two processes; returns None if one fails."""
    first = measure_in_new_process(measure, name)
    second = first and measure_in_new_process(measure, name)
    if first is None or second is None:
        return None
    equal = first.pop('json') == second.pop('json')
    fastest = {k: min(first[k], second[k]) for k in ('seconds', 'cpu_seconds')}
    return first | fastest | {'two_runs_are_equal': equal}


def print_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints each case with its counts; a figure that misses its mark has a '!'."""
    for case in CASES:
        if (found := results.get(case.name)) is None:
            continue
        memory, counted = found['memory'], case.count_arguments()
        print(f'{case.name}: {case.model} {case.preset} on {case.topology}, batch {case.batch}')
        marked(f'  fits: {found["fits"]}, by {found["back_end"]}', found['fits'] == case.fits)
        marked(
            f'  arguments: {memory["arguments"]:,} bytes, by hand {counted:,}',
            memory['arguments'] == counted,
        )
        print(f'  peak by the compiler: {memory["peak"]:,}')
        for name, most in (('live', 0.01), ('analytic_peak', 0.1)):
            if memory[name]:
                off = memory[name] / memory['peak'] - 1
                marked(f'  {name}: {memory[name]:,} ({off:+.2%})', abs(off) <= most)
        for line, is_right in compare_wire(case, found['wire']):
            marked(f'  {line}', is_right)
        marked(
            f'  forecast in {found["seconds"]:.0f} s ({found["cpu_seconds"]:.0f} s of CPU), '
            f'{found["peak_rss"] / 1e9:.2f} GB',
            found['seconds'] <= MOST_SECONDS and found['peak_rss'] <= MOST_BYTES,
        )
        marked(f'  two runs are equal: {found["two_runs_are_equal"]}', found['two_runs_are_equal'])


def marked(line: str, is_right: bool) -> None:
    """Prints a line, with a mark if it misses its aim."""
    print(line if is_right else f'{line} !')


def compare_wire(case: Case, found: Mapping[str, float]) -> list[tuple[str, bool]]:
    """Returns a line for each kind of exchange, and whether it is as counted."""
    counted = {} if case.wire is None else case.wire(case)
    lines = []
    for key in sorted({*found, *counted}, key=lambda k: -found.get(k, 0)):
        line = f'{key}: {found.get(key, 0):,.0f} bytes'
        if key not in counted:
            lines.append((line, True))
            continue
        off = found.get(key, 0) / counted[key] - 1
        lines.append((f'{line}, by hand {counted[key]:,.0f} ({off:+.2%})', abs(off) <= 1e-3))
    return lines


def main() -> None:
    listed = {case.name: f'{case.topology:<12}batch {case.batch}' for case in CASES}
    print_results(run_named(__doc__, 'case', listed, 'build/forecast_cases.json', measure_twice))


if __name__ == '__main__':
    main()
