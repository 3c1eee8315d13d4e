"""Forecasts of step times next to measurements: rebuilds published training steps and compares.

Each row of `measured_steps/measured_steps.json` that the models of this project can express is
rebuilt as a train step. What the steps have to do is in `measured_steps/traced_steps.json`, from
their jaxprs, and for those that were compiled in `measured_steps/compiled_steps.json`, from the
compiler. By default, nothing is compiled. Describing the machines needs libtpu and JAX's CUDA
plugin.

    python benchmarks/forecast_truth.py           # the forecasts of left-out rows, as committed
    python benchmarks/forecast_truth.py --fit     # fits the constants and forecasts all rows again
    python benchmarks/forecast_truth.py --trace   # traces all steps again first, in some minutes
    python benchmarks/forecast_truth.py --compile [--only=v5e-256-maxtext-16b] [--early]
    python benchmarks/forecast_truth.py --rows=FILE --programs=maxtext/src [--only=NAME,...]

`--compile` compiles the steps that `build/forecast_truth` does not have yet.

The last one forecasts rows from their own programs: it runs MaxText, which is in the folder
`maxtext/src`, as `meshwright dry` does, once for each row that `build/own_programs` does not have
yet. FILE has rows in the form of `measured_steps.json`, which is the default. A row can have an
entry "command" with its own command, as a list of what stands behind `python`, and "path", the
folder of its code. Without `--programs`, nothing runs, and the table has what is there. `--keep`
records what the programs have to do in `measured_steps/own_steps.json`. From then on, they stand
for their rows in the place of rebuilt programs.

A family is all rows of one model on one chip. Every row is forecast by constants that were fitted
on all other families, and never by constants that were fitted on it. The committed constants are
fitted on all rows. The output is committed as `measured_steps/forecast_truth.txt`.
"""

from __future__ import annotations

import argparse
import collections
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.campaigns import parse_names
from benchmarks.measured_steps.cases import forecast_held, list_cases
from benchmarks.measured_steps.compiling import run_campaign
from benchmarks.measured_steps.fitted_file import read_fit, write_fit
from benchmarks.measured_steps.fitting import FREE, FREE_OF_COMPILED, SOFTWARE, Case, Fit, fit_all
from benchmarks.measured_steps.own_cases import forecast_rows, print_own
from benchmarks.measured_steps.own_programs import Programs, run_campaign as run_own
from benchmarks.measured_steps.own_records import keep_records, read_own
from benchmarks.measured_steps.records import TRACED, read_records, trace_all, write_records
from benchmarks.measured_steps.rows import load_rows
from benchmarks.measured_steps.scoring import (
    Forecasted,
    forecast_families,
    read_left_out,
    score,
    write_left_out,
)
from meshwright.time.constants import list_constants
from partitioning.hardware import CHIPS

_ORIGINS = {'jaxpr': 'traced steps', 'compiler': 'compiled steps'}
# What rows with large errors lack, as far as it is known.
LACKS = {
    'h100-256-fuji7b-v2': (
        'without the bias of its framework, its own program is 3% too fast; the bias was fitted '
        'on an older version'
    ),
    'v5e-512-fuji70b-v2': (
        'our program computes more again than its own, whose forecast is 0.4% off without the bias '
        'of its framework'
    ),
    'v5e-256-gala85m': (
        'half of the step is a cost of the framework that does not depend on its size, which one '
        'other family shows'
    ),
    'h100-512-fuji7b-v1': (
        'half the tokens per GPU took 63% of the time: costs that do not depend on tokens, in a '
        'framework that is rebuilt as ours'
    ),
    'v5e-1024-fuji7b-v2': (
        'its source states an MFU of 46%, and its time gives at most 43.4%: the time may belong to '
        'another batch'
    ),
    **dict.fromkeys(
        ('tpu7x-64-gpt-oss-120b-8k-bf16', 'tpu7x-64-gpt-oss-120b-8k-bf16-r2511a'),
        '108 sums of 327,680 rows into 128 take 4.7 ms each by the instructions of libtpu, which '
        'is a seventh of what is missing',
    ),
    'v6e-256-gpt3-175b-int8': (
        'by libtpu, products take 0.61 of their time in bfloat16 in place of half, and their '
        'operands and random bits are written to the memory: 2.7 of the missing 3.2 s'
    ),
    'v5p-128-llama4-maverick': (
        'the traced program needs 178 of 95.7 GiB by libtpu: another program or compiler ran'
    ),
    'v5p-2048-maxtext-1024b-s2': (
        'twice the chips with the same work each took 15% less, so that one of both is an outlier'
    ),
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
    parser.add_argument('--keep', action='store_true', help='record the own programs, to fit them')
    parser.add_argument('--again', action='store_true', help='run those again that failed')
    options = parser.parse_args()
    if options.rows or options.programs:
        forecast_own(options)
        return
    if options.compile:
        run_campaign(options.only, options.early)
    if options.trace:
        write_records(dict(trace_all()), TRACED)
    cases, reasons = list_cases(read_records(TRACED), read_records(), read_own())
    if options.fit:
        dense = [case for case in cases if case.dense]
        others = [case for case in cases if not case.dense]
        left_out = forecast_families(dense, fit_all, others)
        write_left_out(left_out)
        write_fit(fit_all(dense)[0], dense, left_out)
    print_forecasts(cases, reasons)


def forecast_own(options: argparse.Namespace) -> None:
    """Dry-runs the programs of rows if their folder is given, and prints their forecasts."""
    rows = load_rows(Path(options.rows)) if options.rows else load_rows()
    chosen = parse_names(options.only, [row.name for row in rows], 'row')
    rows = tuple(row for row in rows if row.name in chosen)
    if options.programs:
        programs = Programs(Path(options.programs), options.python or sys.executable, options.mode)
        run_own(rows, programs, again=options.again)
    if options.keep:
        keep_records(rows)
    print_own(*forecast_rows(rows))


def print_forecasts(cases: Sequence[Case], reasons: Mapping[str, str]) -> None:
    """Prints the committed forecasts of left-out rows, and the committed constants."""
    left_out = read_left_out(cases)
    _print_table(left_out, reasons, left_out)
    _print_held()
    _print_worst([f for f in left_out if f.case.origin == 'jaxpr'])
    _print_constants(read_fit())


def _print_table(
    forecasts: Sequence[Forecasted], reasons: Mapping[str, str], ranges: Sequence[Forecasted]
) -> None:
    """Prints rows and scores; `ranges` has the left-out forecasts that give the ranges."""
    print(f'{len({f.case.name for f in forecasts})} rows are forecast, {len(reasons)} are not.\n')
    _print_rows(forecasts)
    for origin, title in _ORIGINS.items():
        chosen = [f for f in forecasts if f.case.origin == origin]
        alike = [f for f in ranges if f.case.origin == origin]
        _print_scores(f'Errors of forecasts of {title}, each by other families', chosen, alike)
    by_formula = [f for f in forecasts if f.case.origin == 'jaxpr']
    own = [f for f in by_formula if f.case.is_own]
    _print_scores('Of these, from the programs that were measured', own, by_formula)
    for dense, title in (True, 'dense models in bfloat16'), (False, 'others, which fit nothing'):
        alike = [f for f in own if f.case.dense == dense]
        _print_scores(f'Of these, {title}', alike, by_formula)
    _print_frameworks([f for f in forecasts if f.case.origin == 'jaxpr' and f.case.dense])
    print('\nRows that are not forecast')
    for name, reason in reasons.items():
        print(f'  {name:42} {reason}')


def _print_rows(forecasts: Sequence[Forecasted]) -> None:
    columns = ''.join(f'{title:>18}' for title in _ORIGINS.values())
    print(f'{"row":42} {"measured":>9}{columns} {"naive":>7}')
    rows: dict[str, dict[str, Forecasted]] = collections.defaultdict(dict)
    for f in sorted(forecasts, key=lambda f: (list(CHIPS).index(f.case.chip), f.case.family)):
        rows[f.case.name][f.case.origin] = f
    for name, both in rows.items():
        cells = [
            f'{both[o].seconds:8.2f} s {both[o].error:+7.1%}' if o in both else f'{"-":>18}'
            for o in _ORIGINS
        ]
        f = next(iter(both.values()))
        notes = [f.case.framework, *(['experts or 8 bits'] if not f.case.dense else [])]
        notes += ['own program'] if f.case.is_own else []
        notes += ['superseded'] if f.case.superseded else []
        print(
            f'{name:42} {f.case.seconds:7.2f} s{"".join(cells)} {f.naive_error:+7.1%}  '
            f'{", ".join(notes)}'
        )


def _print_scores(
    title: str, forecasts: Sequence[Forecasted], ranges: Sequence[Forecasted]
) -> None:
    """Prints errors per chip; `within` is the share of rows in the range that others give."""
    print(f'\n{title}')
    print(
        f'  {"":7} {"rows":>4} {"families":>8} {"mean":>6} {"median":>6} {"worst":>6} {"bias":>6} '
        f'{"naive":>6} {"ratio":>5} {"within":>6} {"rank":>6}'
    )
    for name in (*CHIPS, 'TPUs', 'all'):
        chosen = [f for f in forecasts if name in (f.case.chip, _kind_of(f), 'all')]
        if found := score(chosen, ranges):
            rank = '' if found.rank is None else f'{found.rank:6.3f}'
            print(
                f'  {name:7} {found.rows:4} {found.families:8} {found.mean:6.1%} '
                f'{found.median:6.1%} {found.worst:6.1%} {found.bias:+6.1%} {found.naive:6.1%} '
                f'{found.mean / found.naive:5.2f} {found.within:6.0%} {rank}'
            )


def _print_frameworks(forecasts: Sequence[Forecasted]) -> None:
    """Prints which part of the errors is the framework's.

    A program of ours has no bias. What is left after the bias of the framework, which comes from
    its rows in other families, is the error of the model.
    """
    print('\nErrors by framework and version, without and with the bias of the framework')
    print(f'  {"":34} {"rows":>4} {"without":>8} {"mean":>7} {"with":>7} {"mean":>7}')
    groups = collections.defaultdict(list)
    for f in forecasts:
        name, platform = f.case.framework, '' if f.case.platform == 'tpu' else ' (GPUs)'
        groups[f'{name.split()[0]}{platform}, all versions'].append(f)
        groups[f'{name}{platform}'].append(f)
    for name, members in sorted(groups.items()):
        without = [math.log(f.unbiased / f.case.seconds) for f in members]
        left = [math.log(f.seconds / f.case.seconds) for f in members]
        figures = ' '.join(
            f'{math.expm1(statistics.fmean(x)):+8.1%} {statistics.fmean(map(abs, x)):7.1%}'
            for x in (without, left)
        )
        print(f'  {name:34} {len(members):4} {figures}')


def _kind_of(forecast: Forecasted) -> str:
    return 'TPUs' if forecast.case.platform == 'tpu' else 'GPUs'


def _print_worst(forecasts: Sequence[Forecasted]) -> None:
    print('\nThe five worst rows, and what their forecasts lack')
    for f in sorted(forecasts, key=lambda f: -abs(f.error))[:5]:
        print(f'  {f.case.name:42} {f.error:+7.1%}  {LACKS.get(f.case.name, "not known")}')


def _print_held() -> None:
    print('\nSteps of this project on one h100, which fit nothing, by the committed constants')
    found = list(forecast_held())
    for traced, compiled in zip(found[::2], found[1::2], strict=True):
        cells = ''.join(
            f'{1e3 * h.time.seconds:7.1f} ms {h.error:+7.1%}' for h in (traced, compiled)
        )
        print(f'  {traced.name:40} {1e3 * traced.measured:6.1f} ms{cells}')
    errors = [abs(h.error) for h in found]
    inside = statistics.fmean(h.inside for h in found)
    print(f'  {"mean and worst error, within":40} {statistics.fmean(errors):9.1%}', end='')
    print(f'{max(errors):10.1%}{inside:10.0%}')


def _print_constants(constants: Fit) -> None:
    free = len(FREE) + len(FREE_OF_COMPILED)
    biases = sum((b.factor != 1) + (b.seconds != 0) for b in SOFTWARE.values())
    print(f'\nConstants: {free} are fitted, and {biases} biases of frameworks. All are bounded:')
    print('efficiencies and shares by 0 and 1, all others by 0.')
    for name, chip in CHIPS.items():
        print(f'  {name}')
        for c in list_constants(chip):
            print(f'    {c.name:22} {c.value:12.4g} {c.unit:8} {c.source}')
    for name, bias in constants.software.items():
        more = f' and {bias.seconds:.3f} s more' if bias.seconds else ''
        print(f'  {name}: steps take {bias.factor:.2f} times as long as ours{more}')


if __name__ == '__main__':
    main()
