"""Forecasts of step times next to measurements: rebuilds published training steps and compares.

Each row of `measured_steps/measured_steps.json` that the models of this project can express is
rebuilt as a train step. What the steps have to do is in `measured_steps/traced_steps.json`, from
their jaxprs, and for those that were compiled in `measured_steps/compiled_steps.json`, from the
compiler. By default, nothing is compiled. Describing the machines needs libtpu and JAX's CUDA
plugin.

    python benchmarks/forecast_truth.py           # forecasts with the constants as they are
    python benchmarks/forecast_truth.py --fit     # fits the constants and writes them first
    python benchmarks/forecast_truth.py --trace   # traces all steps again first, in some minutes
    python benchmarks/forecast_truth.py --compile [--only=v5e-256-maxtext-16b] [--early]
    python benchmarks/forecast_truth.py --rows=FILE --programs=maxtext/src [--only=NAME,...]

The one with `--compile` compiles the steps that `build/forecast_truth` does not have yet.

The last one forecasts rows from their own programs: it runs MaxText, which is in the folder
`maxtext/src`, as `meshwright dry` does, once for each row that `build/own_programs` does not have
yet. FILE has rows in the form of `measured_steps.json`, which is the default. A row can have an
entry "command" with its own command, as a list of what stands behind `python`, and "path", the
folder of its code. Without `--programs`, nothing runs, and the table has what is there.

A third of the groups of rows is left out of the fit (`scoring.is_left_out`). In addition, each
family of rows, which is a model on a chip, is left out once and forecast by all other families.
The output is committed as `measured_steps/forecast_truth.txt`.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.campaigns import parse_names
from benchmarks.measured_steps.cases import list_cases
from benchmarks.measured_steps.compiling import run_campaign
from benchmarks.measured_steps.fitting import Case, Fit, fit_all
from benchmarks.measured_steps.own_cases import forecast_rows
from benchmarks.measured_steps.own_programs import Programs, run_campaign as run_own
from benchmarks.measured_steps.own_report import print_own
from benchmarks.measured_steps.records import TRACED, read_records, trace_all, write_records
from benchmarks.measured_steps.rows import load_rows
from benchmarks.measured_steps.scoring import (
    Forecasted,
    forecast_families,
    forecast_with,
    is_left_out,
    read_fit,
    score,
    write_fit,
)
from meshwright.time.constants import list_constants
from partitioning.hardware import CHIPS

_ORIGINS = {'jaxpr': 'traced steps', 'compiler': 'compiled steps'}
_FRAMEWORKS = 'one factor per framework, and its rows before were 37% slower with as many tokens'
_LARGEST = (
    'the same work per chip was measured 9% faster on twice the chips: exchanges along the tensor '
    'axis of 16 are hardly hidden in these rows, and mostly hidden along axes of 4 and 8'
)
_SLICES = 'delays grow faster than by doublings: 10% on 16 slices, 21% on 32; 7% and 11% for 32B'
_NARROW = 'products of width 4,096 are less efficient than wider ones, which FLOPs do not show'
_EXPERTS = (
    'products of the rows of experts, and the sorting of rows, have no constants of their own'
)
# What rows with large errors lack, as far as it is known.
LACKS = {
    'v5e-32-honeycrisp85m': 'the cycles of the compiled step, with which the forecast is 1% off',
    'v5p-2048-honeycrisp3b': (
        '4 times the chips took 32% of the time, and 38% in the forecast: exchanges whose bytes do '
        'not depend on the number of chips may be hidden better'
    ),
    'tpu7x-256-qwen3-235b-a22b-4k-bf16': _EXPERTS,
    'tpu7x-256-qwen3-235b-a22b-4k-bf16-r2511a': _EXPERTS,
    'tpu7x-256-qwen3-235b-a22b-4k-bf16-r2512b': _EXPERTS,
    'h100-256-fuji7b-v2': _FRAMEWORKS,
    'h100-256-fuji7b-v1': _FRAMEWORKS,
    'h100-512-fuji7b-v1': (
        'half the tokens per GPU took 63% of the time: costs that do not depend on tokens, in a '
        'framework that is rebuilt as ours'
    ),
    'v5p-1024-maxtext-1024b-s1': _LARGEST,
    'v5p-2048-maxtext-1024b-s2': _LARGEST,
    'v5p-4096-maxtext-1024b-s2': _LARGEST,
    'v5e-512-fuji70b-v2': 'which activations it keeps on the host is not published, but assumed',
    'v5e-8192-maxtext-128b': _SLICES,
    'v5e-4096-maxtext-128b': _SLICES,
    'v5p-256-fuji7b-v1': _NARROW,
    'v5p-64-maxtext-32b-s1': 'tensor parallelism over 4 chips hides more than the mean of v5p',
    'v5p-64-maxtext-64b-s1': 'tensor parallelism over 4 chips hides more than the mean of v5p',
    'v6e-256-gemma3-12b-32k': 'kernels of local and global attention have one efficiency',
}


def main() -> None:
    """Prints forecasts, measurements, errors and constants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--fit', action='store_true', help='fit the constants first')
    parser.add_argument('--trace', action='store_true', help='trace all steps again first')
    parser.add_argument('--compile', action='store_true', help='compile programs first (an hour)')
    parser.add_argument('--early', action='store_true', help='only until their memory is known')
    parser.add_argument('--only', help='these programs or rows, separated by commas (all)')
    parser.add_argument('--rows', metavar='FILE', help='forecast the rows from their own programs')
    parser.add_argument('--programs', metavar='DIR', help='the folder that has the package maxtext')
    parser.add_argument('--python', help='the Python that has what the programs need (this one)')
    parser.add_argument(
        '--mode',
        choices=('early', 'whole', 'traced'),
        default='early',
        help='end own programs early: before code is generated (early), not, or before compiling',
    )
    parser.add_argument('--again', action='store_true', help='run those again that failed')
    options = parser.parse_args()
    if options.rows or options.programs:
        forecast_own(options)
        return
    if options.compile:
        run_campaign(options.only, options.early)
    if options.trace:
        write_records(dict(trace_all()), TRACED)
    cases, reasons = list_cases(read_records(TRACED), read_records())
    dense = [case for case in cases if case.dense]
    families = forecast_families(dense, fit_all)
    if options.fit:
        constants, _ = fit_all([case for case in cases if not is_left_out(case)])
        write_fit(constants, dense, families)
    print_forecasts(cases, reasons)
    for origin, title in _ORIGINS.items():
        chosen = [f for f in families if f.case.origin == origin]
        _print_scores(f'Errors of forecasts of {title}, each family left out in turn', chosen)


def forecast_own(options: argparse.Namespace) -> None:
    """Dry-runs the programs of rows if their folder is given, and prints their forecasts."""
    rows = load_rows(Path(options.rows)) if options.rows else load_rows()
    chosen = parse_names(options.only, [row.name for row in rows], 'row')
    rows = [row for row in rows if row.name in chosen]
    if options.programs:
        programs = Programs(Path(options.programs), options.python or sys.executable, options.mode)
        run_own(rows, programs, again=options.again)
    print_own(*forecast_rows(rows))


def print_forecasts(cases: Sequence[Case], reasons: Mapping[str, str]) -> None:
    """Prints everything that follows from the committed constants."""
    constants = read_fit()
    forecasts = forecast_with(cases, constants)
    print(f'{len({case.name for case in cases})} rows are rebuilt, {len(reasons)} are not.\n')
    _print_rows(forecasts)
    for origin, title in _ORIGINS.items():
        chosen = [f for f in forecasts if f.case.origin == origin and f.case.dense]
        _print_scores(f'Errors of forecasts of {title}, with the constants below', chosen)
    _print_scores(
        'Errors of forecasts of models with experts, which fit nothing',
        [f for f in forecasts if not f.case.dense],
    )
    _print_worst([f for f in forecasts if f.case.origin == 'jaxpr'])
    _print_constants(constants)
    print('\nRows that are not rebuilt')
    for name, reason in reasons.items():
        print(f'  {name:42} {reason}')


def _print_rows(forecasts: Sequence[Forecasted]) -> None:
    columns = ''.join(f'{title:>18}' for title in _ORIGINS.values())
    print(f'{"row":42} {"measured":>9}{columns} {"naive":>7}')
    rows: dict[str, dict[str, Forecasted]] = collections.defaultdict(dict)
    for f in sorted(forecasts, key=lambda f: (list(CHIPS).index(f.case.chip), not f.fitted)):
        rows[f.case.name][f.case.origin] = f
    for name, both in rows.items():
        cells = [
            f'{both[o].seconds:8.2f} s {both[o].error:+7.1%}' if o in both else f'{"-":>18}'
            for o in _ORIGINS
        ]
        f = next(iter(both.values()))
        part = 'fitted' if f.fitted else 'left out' if f.case.dense else 'experts, left out'
        old = ', superseded' if f.case.superseded else ''
        print(
            f'{name:42} {f.case.seconds:7.2f} s{"".join(cells)} {f.naive_error:+7.1%}  {part}{old}'
        )


def _print_scores(title: str, forecasts: Sequence[Forecasted]) -> None:
    """Prints errors per chip; rank correlations without rows that others supersede."""
    print(f'\n{title}')
    print(f'  {"":22} {"rows":>4} {"mean":>6} {"worst":>6} {"naive":>6} {"ratio":>6} {"rank":>5}')
    for name in (*CHIPS, 'TPUs', 'all'):
        chosen = [f for f in forecasts if name in (f.case.chip, _kind_of(f), 'all')]
        parts = {'fitted': [f for f in chosen if f.fitted]}
        parts['left out'] = [f for f in chosen if not f.fitted]
        for part, members in parts.items():
            if found := score(members):
                rank = '' if found.rank is None else f'{found.rank:5.2f}'
                print(
                    f'  {f"{name}, {part}":22} {found.rows:4} {found.mean:6.1%} {found.worst:6.1%} '
                    f'{found.naive:6.1%} {found.mean / found.naive:6.2f} {rank:>5}'
                )
        if name in CHIPS and chosen:
            current = score(f for f in chosen if not f.case.superseded)
            if current and current.rank is not None:
                print(f'  {name}: rank correlation of all current rows {current.rank:.2f}')


def _kind_of(forecast: Forecasted) -> str:
    return 'TPUs' if forecast.case.platform == 'tpu' else 'GPUs'


def _print_worst(forecasts: Sequence[Forecasted]) -> None:
    print('\nThe five worst rows, and what their forecasts lack')
    for f in sorted(forecasts, key=lambda f: -abs(f.error))[:5]:
        print(f'  {f.case.name:42} {f.error:+7.1%}  {LACKS.get(f.case.name, "not known")}')


def _print_constants(constants: Fit) -> None:
    print('\nConstants')
    for name, chip in CHIPS.items():
        print(f'  {name}')
        for c in list_constants(chip):
            print(f'    {c.name:22} {c.value:12.4g} {c.unit:8} {c.source}')
    for name, factor in constants.software.items():
        print(f'  {name}: steps on GPUs take {factor:.2f} times as long as ours')


if __name__ == '__main__':
    main()
