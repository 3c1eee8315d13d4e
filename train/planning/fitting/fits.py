"""Whether a model fits into a machine, and the settings with which it is fastest, by formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from meshwright import Forecast
from partitioning.amounts import bytes_str
from partitioning.hardware import parse_topology
from train.errors import first_line
from train.planning.fitting.bounds import bytes_of_batch, expected_peak, least_peak
from train.planning.fitting.tasks import Task
from train.planning.forecasting import (
    Machine,
    NotInstalledError,
    PlannedStep,
    forecast_step,
    move_to,
    plan_step,
)
from train.planning.searching import Candidate, Choices, Layout, RunSizes, list_space
from train.planning.searching.candidate import RematChoice
from train.planning.searching.gin_file import bindings_of, files_of, write_gin
from train.planning.searching.predicting import read_config

Progress = Callable[[str], None]

_PRESETS = ('', 'fsdp', 'fsdp_tensor', 'few_kv_heads', 'three_d')  # the plainest first
_MICROBATCHES = (2, 4, 8, 16, 32, 64)
_MOST_LAYOUTS = 4
# Other layouts are tried where exchanges of data take more than this share of a step.
_MUCH = 0.1
# A machine that is expected to need this much more than it has is not tried.
_FAR = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """How a model runs on a machine.

    Attributes:
      machine: the machine.
      sizes: the sizes of the run there.
      candidate: the layout and the settings of memory, or None if no layout is possible.
      forecast: the forecast with them, or None.
      problem: why no layout is possible, or ''.
    """

    machine: Machine
    sizes: RunSizes
    candidate: Candidate | None = None
    forecast: Forecast | None = None
    problem: str = ''

    @property
    def num_devices(self) -> int:
        """The number of devices of the machine."""
        return self.sizes.num_devices * self.sizes.num_slices

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a device."""
        return self.forecast is not None and self.forecast.fits is True

    @property
    def seconds(self) -> float | None:
        """The time of a step, if it is known."""
        return self.forecast.time.seconds if self.forecast and self.forecast.time else None


# What has been tried, so that it is not tried again.
Known = dict[tuple[Machine, Candidate], Fit]
_Evaluate = Callable[[Candidate], Fit | None]


def fit_machine(
    task: Task, machine: Machine, progress: Progress | None = None, known: Known | None = None
) -> Fit:
    """Finds the settings with which a run is fastest on a machine, among those that fit.

    Nothing is compiled. If nothing fits, it returns the settings that need the least memory.

    Args:
      task: what is to be trained.
      machine: the machine.
      progress: receives a text when something is tried.
      known: what has been tried before for this task; it receives what is tried here.

    Raises:
      NotInstalledError: if the compiler that describes the machine is not installed.
    """
    sizes, limit = task.sizes_on(machine), limit_of(machine)
    problems: list[str] = []
    known = {} if known is None else known
    evaluate = _evaluating(task, machine, progress, known, problems)
    layouts, dropped = _list_layouts(sizes)
    best: Fit | None = None
    for layout in layouts[:_MOST_LAYOUTS]:
        found = _fit_layout(layout, task, machine, evaluate, known)
        best = found if best is None or (found and _is_better(found, best)) else best
        if best is not None and best.fits and not _exchanges_much(best):
            break
        if not can_fit(task, sizes, limit):  # one layout is enough to say what is needed
            break
    if best is not None:
        return best
    return Fit(machine=machine, sizes=sizes, problem=(problems or [dropped])[0])


def _evaluating(
    task: Task, machine: Machine, progress: Progress | None, known: Known, problems: list[str]
) -> _Evaluate:
    """The function that forecasts a candidate; None and an entry in `problems` if impossible."""
    sizes = task.sizes_on(machine)

    def evaluate(candidate: Candidate) -> Fit | None:
        key = machine, candidate
        if key not in known:
            if progress is not None:
                progress(f'trying {candidate}')
            try:
                planned = plan_candidate(task, sizes, candidate, machine)
                forecast = forecast_step(
                    planned, machine, compile=False, alternatives=None, explain=False
                )
            except NotInstalledError:
                raise
            except ValueError as error:
                problems.append(first_line(error))
                return None
            known[key] = Fit(machine=machine, sizes=sizes, candidate=candidate, forecast=forecast)
        return known[key]

    return evaluate


def plan_candidate(
    task: Task, sizes: RunSizes, candidate: Candidate, machine: Machine
) -> PlannedStep:
    """Plans the train step of a run with the settings of a candidate.

    Raises:
      ConfigError, ValueError: if the settings are not possible on the machine.
    """
    source = task.source
    file = task.folder / 'candidate.gin'
    file.write_text(write_gin(candidate, sizes, source.files, source.bindings))
    there = dataclasses.replace(source, files=[str(file)])
    return plan_step(move_to(read_config(there, machine), machine))


def _list_layouts(sizes: RunSizes) -> tuple[list[Layout], str]:
    """The layouts that divide the run, the plainest first, and why others do not."""
    space = list_space(
        sizes, Choices(num_microbatches=(1,), remats=('full',), output_chunks=(None,))
    )
    found = [candidate.layout for candidate in space.candidates]
    ordered = [layout for name in _PRESETS for layout in found if layout.preset == name]
    return ordered, ', '.join(sorted(space.dropped))


def _fit_layout(
    layout: Layout, task: Task, machine: Machine, evaluate: _Evaluate, known: Known
) -> Fit | None:
    """The fastest settings of a layout that fit, or those that need the least memory."""
    sizes, limit = task.sizes_on(machine), limit_of(machine)

    def attempt(remat: RematChoice, microbatches: int) -> Fit | None:
        changes: dict[str, Any] = {'remat': remat} if sizes.model else {}
        return evaluate(Candidate(layout=layout, num_microbatches=microbatches, **changes))

    numbers = _list_microbatches(layout, sizes)
    possible = [n for n in numbers if least_peak(task, sizes, n) <= limit] or numbers[-1:]
    of_batch = _of_similar(layout, task, machine, known)
    number = _first_enough(possible, task, sizes, limit, of_batch or 0.0)
    tried: dict[int, Fit] = {}
    while number not in tried:
        found = attempt('full', number)
        if found is None or found.forecast is None:
            return None
        tried[number] = found
        of_batch = bytes_of_batch(task, sizes.num_devices, number, found.forecast.memory.peak)
        possible = [n for n in possible if (n <= number if found.fits else n > number)] or [number]
        number = _first_enough(possible, task, sizes, limit, of_batch)
    fit = tried[number]
    if not fit.fits or number > 1 or not sizes.model:
        return fit
    # What fits is faster if it recomputes less.
    if least_peak(task, sizes, 1, keeps_products=True) <= limit:
        for remat in ('none', 'dots'):
            faster = attempt(remat, 1)
            if faster is not None and faster.fits:
                return faster
    return fit


def _first_enough(
    numbers: Sequence[int], task: Task, sizes: RunSizes, limit: float, of_batch: float
) -> int:
    """The smallest number of microbatches that is expected to suffice, or the last."""
    for number in numbers:
        if expected_peak(task, sizes.num_devices, number, of_batch) <= limit:
            return number
    return numbers[-1]


def _of_similar(layout: Layout, task: Task, machine: Machine, known: Known) -> float | None:
    """What a device needs for its part of a batch, by what was tried on a machine of its kind."""
    platform, sizes = parse_topology(machine.topology)[0].platform, task.sizes_on(machine)
    for (other, candidate), fit in known.items():
        alike = candidate.layout.preset == layout.preset and candidate.remat in ('full', None)
        same = parse_topology(other.topology)[0].platform == platform
        if alike and same and fit.forecast is not None and candidate.num_microbatches:
            peak, number = fit.forecast.memory.peak, candidate.num_microbatches
            there = bytes_of_batch(task, fit.sizes.num_devices, number, peak)
            return there * fit.num_devices / (sizes.num_devices * sizes.num_slices)
    return None


def is_too_small(task: Task, machine: Machine, known: Known) -> bool:
    """Whether a machine is too small by far, by what was tried on a larger one of its kind."""
    sizes, limit = task.sizes_on(machine), limit_of(machine)
    layouts, _ = _list_layouts(sizes)
    of_batch = _of_similar(layouts[0], task, machine, known) if layouts else None
    if of_batch is None:
        return False
    numbers = _list_microbatches(layouts[0], sizes)
    least = min(expected_peak(task, sizes.num_devices, n, of_batch) for n in numbers)
    return least > _FAR * limit


def _list_microbatches(layout: Layout, sizes: RunSizes) -> list[int]:
    """The numbers of microbatches that divide the batch, with 1."""
    choices = Choices(
        layouts=(layout,),
        num_microbatches=_MICROBATCHES,
        remats=('full',),
        output_chunks=(None,),
    )
    found = [candidate.num_microbatches for candidate in list_space(sizes, choices).candidates]
    return [1, *(n for n in found if n is not None)]


def limit_of(machine: Machine) -> int:
    """Returns the memory that a program can use on a device of a machine, in bytes."""
    return parse_topology(machine.topology)[0].hbm_bytes_per_device


def can_fit(task: Task, sizes: RunSizes, limit: int) -> bool:
    """Whether a run may fit by the lower bound, with some number of microbatches."""
    return any(least_peak(task, sizes, number) <= limit for number in (1, *_MICROBATCHES))


def _is_better(one: Fit, other: Fit) -> bool:
    """Whether settings fit, or are faster, or need less memory if none fit."""
    assert one.forecast is not None and other.forecast is not None
    if one.fits != other.fits:
        return one.fits
    if one.fits and one.seconds is not None and other.seconds is not None:
        return one.seconds < other.seconds
    return one.forecast.memory.peak < other.forecast.memory.peak


def _exchanges_much(fit: Fit) -> bool:
    """Whether exchanges of data that nothing hides take much of a step."""
    time = fit.forecast.time if fit.forecast else None
    if time is None:
        return False
    exposed = sum(part.exposed for part in time.parts if ' over ' in part.name)
    return exposed > _MUCH * time.seconds


def confirm(task: Task, fit: Fit, progress: Progress | None = None) -> Fit:
    """Returns the same settings with the figures of the compiler.

    Args:
      task: what is to be trained.
      fit: the settings.
      progress: receives a text when a stage begins.
    """
    if fit.candidate is None:
        return fit
    planned = plan_candidate(task, fit.sizes, fit.candidate, fit.machine)
    forecast = forecast_step(planned, fit.machine, alternatives=None, progress=progress)
    return dataclasses.replace(fit, forecast=forecast)


def fastest(fits: Sequence[Fit]) -> Fit | None:
    """Returns the first of the fits with the shortest step, or None if nothing fits."""
    fitting = [fit for fit in fits if fit.fits]
    return min(fitting, key=lambda fit: fit.seconds or math.inf, default=None)


def write_fit(task: Task, fit: Fit) -> str:
    """Returns the text of the gin file that trains a run with the settings of a fit."""
    assert fit.candidate is not None and fit.forecast is not None
    memory, time = fit.forecast.memory, fit.forecast.time
    name = task.model.kind
    step = f', {time.seconds:.3g} s per step' if time else ''
    head = [
        f'{name} with {task.model.num_parameters:,} parameters, for {fit.machine}: '
        f'{bytes_str(memory.peak)} per device{step}, by forecast.',
        '',
        '  meshwright train THIS_FILE --gin.TEXT="\'corpus/**/*.txt\'"',
        f'  meshwright forecast THIS_FILE --topology={fit.machine}',
    ]
    lines = [f'# {line}'.rstrip() for line in head]
    preset = [f'include {file!r}' for file in files_of(fit.candidate)]
    changes = bindings_of(fit.candidate, fit.sizes)
    return '\n'.join([*lines, task.text.rstrip(), '', *preset, *changes, ''])
