"""Whether a model fits into a machine, and the settings with which it is fastest, by formula."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from partitioning.aot import Forecast
from train.errors import first_line
from train.fitting.tasks import Task
from train.forecasting import Machine, PlannedStep, forecast_step, move_to, plan_step
from train.searching import Candidate, Choices, Layout, RunSizes, list_space
from train.searching.candidate import RematChoice
from train.searching.gin_file import bindings_of, files_of, write_gin
from train.searching.predicting import read_config

Progress = Callable[[str], None]

_PRESETS = ('', 'fsdp', 'fsdp_tensor', 'few_kv_heads', 'three_d')  # the plainest first
_MICROBATCHES = (2, 4, 8, 16, 32, 64)
_MOST_LAYOUTS = 4
# Other layouts are tried where exchanges of data take more than this share of a step.
_MUCH = 0.1


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


def fit_machine(task: Task, machine: Machine, progress: Progress | None = None) -> Fit:
    """Finds the settings with which a run is fastest on a machine, among those that fit.

    Nothing is compiled. If nothing fits, it returns the settings that need the least memory.

    Args:
      task: what is to be trained.
      machine: the machine.
      progress: receives a text when something is tried.
    """
    say = progress or (lambda text: None)
    sizes = task.sizes_on(machine)
    problems: list[str] = []

    def evaluate(candidate: Candidate) -> Fit | None:
        say(f'trying {candidate}')
        try:
            planned = plan_candidate(task, sizes, candidate, machine)
            forecast = forecast_step(planned, compile=False, alternatives=None)
        except ValueError as error:
            problems.append(first_line(error))
            return None
        return Fit(machine=machine, sizes=sizes, candidate=candidate, forecast=forecast)

    layouts, dropped = _list_layouts(sizes)
    best: Fit | None = None
    for layout in layouts[:_MOST_LAYOUTS]:
        found = _fit_layout(layout, sizes, evaluate)
        best = found if best is None or (found and _is_better(found, best)) else best
        if best is not None and best.fits and not _exchanges_much(best):
            break
    if best is not None:
        return best
    return Fit(machine=machine, sizes=sizes, problem=(problems or [dropped])[0])


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
    layout: Layout, sizes: RunSizes, evaluate: Callable[[Candidate], Fit | None]
) -> Fit | None:
    """The fastest settings of a layout that fit, or those that need the least memory."""

    def attempt(remat: RematChoice, microbatches: int) -> Fit | None:
        changes: dict[str, Any] = {'remat': remat} if sizes.model else {}
        return evaluate(Candidate(layout=layout, num_microbatches=microbatches, **changes))

    whole = attempt('full', 1)
    if whole is None:
        return None
    if whole.fits:
        for remat in ('none', 'dots') if sizes.model else ():
            faster = attempt(remat, 1)
            if faster is not None and faster.fits:
                return faster
        return whole
    numbers = list(_possible_microbatches(layout, sizes))
    least = attempt('full', numbers[-1]) if numbers and not _is_state_too_large(whole) else None
    if least is None or not least.fits:
        return least or whole
    # What the batch needs is divided by the number of microbatches, and the rest stays.
    one, most, limit = _peak(whole), _peak(least), _limit(whole)
    of_batch = (one - most) / (1 - 1 / numbers[-1])
    for number in numbers[:-1]:
        if one - of_batch * (1 - 1 / number) <= limit:
            found = attempt('full', number)
            if found is not None and found.fits:
                return found
    return least


def _possible_microbatches(layout: Layout, sizes: RunSizes) -> Iterator[int]:
    """The numbers of microbatches that divide the batch."""
    for number in _MICROBATCHES:
        choices = Choices(
            layouts=(layout,), num_microbatches=(number,), remats=('full',), output_chunks=(None,)
        )
        if list_space(sizes, choices).candidates:
            yield number


def _is_state_too_large(fit: Fit) -> bool:
    """Whether a device cannot hold the state and the gradients, which no microbatch changes."""
    assert fit.forecast is not None
    memory = fit.forecast.memory
    return memory.parameters + memory.optimizer + memory.gradients > _limit(fit)


def _peak(fit: Fit) -> int:
    assert fit.forecast is not None
    return fit.forecast.memory.peak


def _limit(fit: Fit) -> float:
    assert fit.forecast is not None
    limit = fit.forecast.memory.limit
    return math.inf if limit is None else limit


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


def can_fit(task: Task, machine: Machine, progress: Progress | None = None) -> bool:
    """Whether a run fits into a machine with the settings that need the least memory."""
    say, sizes = progress or (lambda text: None), task.sizes_on(machine)
    for layout in _list_layouts(sizes)[0][:1]:
        most = max(_possible_microbatches(layout, sizes), default=1)
        changes: dict[str, Any] = {'remat': 'full'} if sizes.model else {}
        candidate = Candidate(layout=layout, num_microbatches=most, **changes)
        say(f'trying {candidate}')
        with contextlib.suppress(ValueError):
            planned = plan_candidate(task, sizes, candidate, machine)
            if forecast_step(planned, compile=False, alternatives=None).fits:
                return True
    return False


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
    forecast = forecast_step(planned, alternatives=None, progress=progress)
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
        f'{memory.peak / 2**30:.2f} GiB per device{step}, by forecast.',
        '',
        '  meshwright train THIS_FILE --gin.TEXT="\'corpus/**/*.txt\'"',
        f'  meshwright forecast THIS_FILE --topology={fit.machine}',
    ]
    lines = [f'# {line}'.rstrip() for line in head]
    preset = [f'include {file!r}' for file in files_of(fit.candidate)]
    changes = bindings_of(fit.candidate, fit.sizes)
    return '\n'.join([*lines, task.text.rstrip(), '', *preset, *changes, ''])
