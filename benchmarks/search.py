"""How good the winner of a search is: next to the best of all candidates, all of them compiled.

Each case is a run, a described machine and a space of at most 60 candidates. First, every candidate
is compiled, each in a process of its own, which takes 30 s to several minutes; results are added to
a file with what the compiler has said, so a campaign can be resumed. Then the search of
`meshwright forecast --search` runs over the same space. It may look up a quarter of the results, in
the order in which it asks for them. Step times are forecasts, computed anew from what is stored, so
a change of the step-time model needs no compilation.

With `--whole`, the search runs over all combinations that a user's search tries, and compiles what
it asks for.

Usage:
  python benchmarks/search.py [--cases=1b,8b] [--results=FILE] [--pictures=DIR] [--no_compile]
  python benchmarks/search.py --whole=FOLDER [--cases=1b,8b] [--results=FILE] [--best=8]

What it printed is in `results/search.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'

import gin
import jax
from etils.epath import Path as EPath

from benchmarks.campaigns import (
    call_in_new_process,
    measure_in_new_process,
    package_versions,
    read_results,
    write_results,
)
from benchmarks.measured_steps.records import cycles_by_kind, merge_kinds, read_collectives
from meshwright import read_costs
from meshwright.jaxpr import trace_function
from meshwright.time import KernelWork, Work, estimate_step_time, find_kernel_work, read_work
from meshwright.time.layers import describe_layers
from partitioning.hardware import CHIPS
from train.config import TrainConfig
from train.errors import first_line
from train.gin.load import find_config, load_config
from train.planning.candidates import Candidate, change_run, sizes_of
from train.planning.forecasts import PlannedStep, plan_step, predict_step
from train.planning.gin_text import write_gin
from train.planning.machines import Machine, parse_machine, stand_in
from train.planning.presets import Layout
from train.planning.search_runs import search_run
from train.planning.searching import Outcome, Prediction, search
from train.planning.space import Choices, Space, choices_for, list_space
from train.planning.tables import draw_search, summary_lines

RESULTS = 'build/search_results.json'
_WINDOWED = (('xla_jf_spmd_threshold_for_windowed_einsum_mib', None),)
_SHARE = 4  # a search may compile one in this many candidates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run, a machine and a space.

    Attributes:
      batch: the number of sequences of a step, of 2,048 tokens.
      layouts, num_microbatches, compiler_options: the values of these settings.
    """

    name: str
    topology: str
    batch: int
    layouts: tuple[Layout, ...]
    num_microbatches: tuple[int, ...] = (1,)
    compiler_options: tuple[Any, ...] = ((),)

    @property
    def files(self) -> list[str]:
        """The gin files of the run."""
        return [f'configs/{name}.gin' for name in ('runs/pretrain', f'models/{self.name}')]

    @property
    def bindings(self) -> list[str]:
        """The gin bindings of the run."""
        return ["TEXT = 'no-data-is-read'", f'BATCH_SIZE = {self.batch}']


CASES = (
    Case(
        name='1b',
        topology='v5e:4x4',
        batch=64,
        layouts=(
            Layout('fsdp'),
            Layout('fsdp_tensor', (('NUM_PARTITIONS', 2),)),
            Layout('three_d', (('FSDP_PARTITIONS', 4), ('NUM_PARTITIONS', 1))),
            Layout('zero'),
        ),
        num_microbatches=(1, 2),
    ),
    Case(
        name='8b',
        topology='v5p:4x4x4',
        batch=128,
        layouts=(
            Layout('fsdp'),
            Layout('fsdp_tensor', (('NUM_PARTITIONS', 2),)),
            Layout('fsdp_tensor', (('NUM_PARTITIONS', 4),)),
            Layout('three_d', (('FSDP_PARTITIONS', 16), ('NUM_PARTITIONS', 1))),
        ),
        compiler_options=((), _WINDOWED),
    ),
)
KNOWN = {case.name: case for case in CASES}


def space_of(case: Case) -> Space:
    """Returns the space of a case."""
    choices = Choices(
        layouts=case.layouts,
        num_microbatches=case.num_microbatches,
        remats=('full', 'dots', 'none'),
        output_chunks=(None,),
        compiler_options=case.compiler_options,
    )
    config, machine = read(case)
    return list_space(sizes_of(config, machine.num_devices), choices)


@functools.cache
def read(case: Case) -> tuple[TrainConfig, Machine]:
    """Returns the settings of the run of a case, and its machine."""
    machine = parse_machine(case.topology)
    gin.clear_config()
    load_config(case.files, case.bindings)
    with stand_in(machine):
        return find_config(), machine


def plan(case: Case, candidate: Candidate) -> PlannedStep:
    """Lays out the train step of a candidate."""
    config, machine = read(case)
    return plan_step(change_run(config, candidate, machine))


def whole_space_of(case: Case) -> Space:
    """Returns the space of a search with its defaults."""
    config, machine = read(case)
    return list_space(sizes_of(config, machine.num_devices), choices_for(machine.chip.name))


def measure(name: str, number: int, whole: bool = False) -> dict[str, Any]:
    """Compiles a candidate of a case, and returns what the compiler says about it.

    For short files, all exchanges of a kind over the same axes are one.
    """
    case = KNOWN[name]
    candidate = (whole_space_of if whole else space_of)(case).candidates[number]
    step, arguments = (planned := plan(case, candidate)).step, planned.arguments
    mesh = planned.run.config.partitioner.mesh
    jaxpr = step.trace(*arguments).jaxpr
    started = time.monotonic()
    found: dict[str, Any] = {'candidate': str(candidate)}
    try:
        costs = read_costs(step.lower(*arguments).compile(), mesh)
    # Too little memory, a fault of the compiler, or an instruction that jaxlib does not know.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return found | {'error': first_line(error), 'seconds': time.monotonic() - started}
    work = read_work(costs, jaxpr, mesh.size)
    work = dataclasses.replace(work, collectives=tuple(merge_kinds(work.collectives)))
    return found | {
        'peak': costs.memory.peak,
        'arguments': costs.memory.arguments,
        'cycles_by_kind': cycles_by_kind(costs.operations),
        'work': dataclasses.asdict(work),
        'seconds': time.monotonic() - started,
        'versions': package_versions('jax', 'libtpu'),
    }


def read_stored_work(stored: Mapping[str, Any]) -> Work:
    """Returns the work of a result."""
    kernels = tuple(KernelWork(**kernel) for kernel in stored['kernels'])
    collectives = tuple(read_collectives(stored['collectives']))
    return Work(**stored | {'kernels': kernels, 'collectives': collectives})


def outcome_of(stored: Mapping[str, Any], planned: PlannedStep, limit: int) -> Outcome:
    """Returns what a search is told about a candidate: the step time by today's model.

    Kernels and the sizes of products are counted again, in the traced step.
    """
    if 'error' in stored:
        return Outcome(fits=False, compile_seconds=stored['seconds'], error=stored['error'])
    traced = trace_function(planned.step, *planned.arguments)
    work = dataclasses.replace(
        read_stored_work(stored['work']),
        kernels=tuple(find_kernel_work(traced.jaxpr)),
        layers=describe_layers(traced),
    )
    step = estimate_step_time(work, planned.run.config.partitioner.mesh)
    assert step is not None
    return Outcome(
        fits=stored['peak'] <= limit,
        peak=stored['peak'],
        seconds=step.seconds,
        low=step.low,
        high=step.high,
        compile_seconds=stored['seconds'],
    )


def compile_all(case: Case, path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Compiles the candidates that the results lack, and adds them to the file."""
    candidates = space_of(case).candidates
    own = results.setdefault(case.name, {})
    for number, candidate in enumerate(candidates):
        if str(candidate) in own:
            continue
        stored = measure_in_new_process(measure, case.name, number)
        if stored is None:
            continue
        own[stored.pop('candidate')] = stored
        write_results(path, results)
        print(f'{case.name} {number + 1}/{len(candidates)}: {candidate}', flush=True)


def search_whole(
    case: Case, path: Path, results: dict[str, dict[str, Any]], folder: Path, best: int
) -> None:
    """Searches the whole space of a case; the folder remembers what formulas say."""
    (config, machine), own = read(case), results.setdefault(case.name, {})
    limit, candidates = machine.chip.hbm_bytes_per_device, whole_space_of(case).candidates

    def compile_candidate(candidate: Candidate) -> Outcome:
        if str(candidate) not in own:
            stored = call_in_new_process(measure, case.name, candidates.index(candidate), True)
            own[stored.pop('candidate')] = stored
            write_results(path, results)
        return outcome_of(own[str(candidate)], plan(case, candidate), limit)

    def write(candidate: Candidate, comment: Sequence[str]) -> str:
        run = sizes_of(config, machine.num_devices)
        return write_gin(candidate, run, case.files, case.bindings, comment)

    found = search_run(
        config,
        machine,
        EPath(folder) / case.name,
        best=best,
        compile_candidate=compile_candidate,
        write=write,
    )
    for one in found.result.found:
        if one.outcome and one.outcome.seconds and one.prediction:
            bound = one.prediction.bound
            print(
                f'  {one.candidate!s:60}{one.outcome.seconds:8.4f} s, bound {bound:.4f} s, '
                f'{bound / one.outcome.seconds - 1:.1%}'
            )
    print(*summary_lines(found.result), f'{time.process_time():.0f} s of formulas', sep='\n')


def search_case(case: Case, stored: Mapping[str, Any], pictures: Path | None) -> None:
    """Searches the space of a case, and prints the winner next to the best of all candidates."""
    space = space_of(case)
    limit = CHIPS[case.topology.partition(':')[0]].hbm_bytes_per_device
    started = time.monotonic()
    planned = {program: plan(case, program) for program in {c.program for c in space.candidates}}
    predictions = {program: predict_step(step) for program, step in planned.items()}
    predicting = time.monotonic() - started
    outcomes = {
        c: outcome_of(stored[str(c)], planned[c.program], limit)
        for c in space.candidates
        if str(c) in stored
    }
    best = len(space.candidates) // _SHARE
    print_all(case, space.candidates, outcomes, predictions)
    if len(outcomes) < len(space.candidates):
        print(f'{case.name}: {len(outcomes)} of {len(space.candidates)} candidates are compiled')
        return
    result = search(
        space, lambda c: predictions[c.program], lambda c: outcomes[c], limit=limit, best=best
    )
    compiling = sum(f.outcome.compile_seconds for f in result.found if f.outcome)
    optimum = min((o.seconds, str(c)) for c, o in outcomes.items() if o.fits)
    winner = result.winner
    print(f'{case.name} on {case.topology}, batch {case.batch}: {len(outcomes)} candidates')
    print(f'  best of all: {optimum[0]:.4f} s, {optimum[1]}')
    print(
        f'  the search: {winner.seconds:.4f} s, {winner.candidate}: '
        f'{winner.seconds / optimum[0] - 1:.1%} above the best, {result.num_compiled} compiled; '
        f'{predicting:.0f} s of formulas and {compiling:.0f} s of compilation'
    )
    print(*(f'  {line}' for line in summary_lines(result)[-2:]), sep='\n')
    if pictures is not None:
        file = pictures / f'search_{case.name}.png'
        draw_search(result, file, title=f'{case.name} on {case.topology}, batch {case.batch}')
        print(f'  {file}')


def print_all(
    case: Case,
    candidates: Sequence[Candidate],
    outcomes: Mapping[Candidate, Outcome],
    predictions: Mapping[Candidate, Prediction],
) -> None:
    """Prints what the compiler and the formulas say about each candidate."""
    print(f'{case.name:<52}{"step":>9}{"GiB":>8}{"formulas":>10}{"GiB":>8}{"bound":>9}{"took":>7}')
    for candidate in candidates:
        formula = predictions[candidate.program]
        text, found = f'{str(candidate)[:50]:<52}', outcomes.get(candidate)
        if found is None:
            text += f'{"-":>9}{"-":>8}'
        elif found.peak is None:
            text += f'{"-":>9}{"OOM":>8}'
        else:
            text += f'{found.seconds:>9.4f}{found.peak / 2**30:>8.2f}'
        took = '' if found is None else f'{found.compile_seconds:.0f} s'
        text += f'{formula.seconds:>10.4f}{formula.peak / 2**30:>8.2f}{formula.bound:>9.4f}'
        print(f'{text}{took:>7}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--cases', default=','.join(KNOWN), help='(all)')
    parser.add_argument('--results', type=Path, default=Path(RESULTS), help=f'({RESULTS})')
    parser.add_argument('--pictures', type=Path, help='the folder for pictures of the searches')
    parser.add_argument('--no_compile', action='store_true', help='only what the file has')
    parser.add_argument('--whole', type=Path, help='search whole spaces, and write to this folder')
    parser.add_argument('--best', type=int, default=8, help='of whole spaces: programs (8)')
    arguments = parser.parse_args()
    path = arguments.results
    results = read_results(path)
    for name in arguments.cases.split(','):
        if arguments.whole:
            search_whole(KNOWN[name], path, results, arguments.whole, arguments.best)
            continue
        if not arguments.no_compile:
            compile_all(KNOWN[name], path, results)
        search_case(KNOWN[name], results.get(name, {}), arguments.pictures)


if __name__ == '__main__':
    main()
