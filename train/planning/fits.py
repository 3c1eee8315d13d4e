"""Whether a run fits into a machine, and with which settings it is fastest there, by formula."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from meshwright import Forecast
from partitioning.hardware import Chip
from train.errors import first_line
from train.planning.candidates import Candidate, RematChoice, RunSizes, Workload, change_run
from train.planning.forecasts import Progress, forecast_run
from train.planning.machines import Machine, NotInstalledError
from train.planning.presets import Layout
from train.planning.space import Choices, list_space

_PRESETS = ('', 'fsdp', 'fsdp_tensor', 'few_kv_heads', 'three_d')  # the plainest first
_MICROBATCHES = (2, 4, 8, 16, 32, 64)
_MOST_LAYOUTS = 4
# Other layouts are tried where exchanges of data take more than this share of a step.
_MUCH = 0.1
# A machine that is expected to need this much more than it has is not tried.
_FAR = 1.05
# Machines that clouds offer, from the smallest.
_PLANES = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBOIDS = (
    *('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8'),
    *('8x8x16', '8x16x16', '16x16x16'),
)
_HOSTS = ('1x1', '1x2', '1x4', '1x8', '2x8', '4x8', '8x8', '16x8', '32x8', '64x8', '128x8')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """How a run does on a machine.

    Attributes:
      candidate: the layout and the settings of memory, or None if no layout is possible.
      problem: why no layout is possible, or ''.
    """

    machine: Machine
    sizes: RunSizes
    candidate: Candidate | None = None
    forecast: Forecast | None = None
    problem: str = ''

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


def fit_machine(
    work: Workload, machine: Machine, progress: Progress | None = None, known: Known | None = None
) -> Fit:
    """Finds the settings with which a run is fastest on a machine, among those that fit.

    Nothing is compiled. If nothing fits, it returns the settings that need the least memory.

    Args:
      progress: receives a text when something is tried.
      known: what has been tried before for this run; it receives what is tried here.

    Raises:
      NotInstalledError: if the compiler that describes the machine is not installed.
    """
    known = {} if known is None else known
    return _Tries(work, machine, progress, known).find_best()


@dataclasses.dataclass(frozen=True)
class _Tries:
    """The tries of settings of a run on a machine."""

    work: Workload
    machine: Machine
    progress: Progress | None
    known: Known
    problems: list[str] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def sizes(self) -> RunSizes:
        return self.work.sizes_on(self.machine)

    @property
    def limit(self) -> int:
        """The memory that a program can use on a device, in bytes."""
        return self.machine.chip.hbm_bytes_per_device

    def find_best(self) -> Fit:
        """The fastest settings of all layouts that fit, or those that need the least memory."""
        layouts, dropped = _list_layouts(self.sizes)
        best: Fit | None = None
        for layout in layouts[:_MOST_LAYOUTS]:
            found = self.fit_layout(layout)
            best = min((fit for fit in (best, found) if fit), key=_rank, default=None)
            if best is not None and best.fits and not _exchanges_much(best):
                break
            if not can_fit(self.work, self.machine):  # one layout is enough to say what is needed
                break
        problem = (self.problems or [dropped])[0]
        return best or Fit(machine=self.machine, sizes=self.sizes, problem=problem)

    def fit_layout(self, layout: Layout) -> Fit | None:
        """The fastest settings of a layout that fit, or those that need the least memory."""
        work, sizes, limit = self.work, self.sizes, self.limit
        numbers = _list_microbatches(layout, sizes)
        possible = [n for n in numbers if work.least_peak(sizes, n) <= limit] or numbers[-1:]
        number = self.first_enough(possible, self.bytes_of_similar(layout) or 0.0)
        tried: dict[int, Fit] = {}
        while number not in tried:
            found = self.attempt(layout, 'full', number)
            if found is None or found.forecast is None:
                return None
            tried[number] = found
            of_batch = work.bytes_of_batch(sizes.num_devices, number, found.forecast.memory.peak)
            left = [n for n in possible if (n <= number if found.fits else n > number)]
            possible = left or [number]
            number = self.first_enough(possible, of_batch)
        fit = tried[number]
        if not fit.fits or number > 1 or not sizes.model:
            return fit
        # What fits is faster if it recomputes less.
        if work.least_peak(sizes, 1, keeps_products=True) <= limit:
            for remat in ('none', 'dots'):
                faster = self.attempt(layout, remat, 1)
                if faster is not None and faster.fits:
                    return faster
        return fit

    def attempt(self, layout: Layout, remat: RematChoice, num_microbatches: int) -> Fit | None:
        """The forecast of some settings, or None and an entry in `problems` if impossible."""
        changes: dict[str, Any] = {'remat': remat} if self.sizes.model else {}
        candidate = Candidate(layout=layout, num_microbatches=num_microbatches, **changes)
        key = self.machine, candidate
        if key not in self.known:
            if self.progress is not None:
                self.progress(f'trying {candidate}')
            fit = Fit(machine=self.machine, sizes=self.sizes, candidate=candidate)
            try:
                self.known[key] = forecast_fit(self.work, fit, compile=False, explain=False)
            except NotInstalledError:
                raise
            except ValueError as error:
                self.problems.append(first_line(error))
                return None
        return self.known[key]

    def first_enough(self, numbers: Sequence[int], of_batch: float) -> int:
        """The smallest number of microbatches that is expected to suffice, or the last."""
        devices = self.sizes.num_devices
        enough = (n for n in numbers if self.work.expected_peak(devices, n, of_batch) <= self.limit)
        return next(enough, numbers[-1])

    def bytes_of_similar(self, layout: Layout) -> float | None:
        """What a device needs for its part of a batch, by what was tried on similar machines."""
        for (other, candidate), fit in self.known.items():
            alike = candidate.layout.preset == layout.preset and candidate.remat in ('full', None)
            same = other.chip.platform == self.machine.chip.platform
            if alike and same and fit.forecast is not None and candidate.num_microbatches:
                peak, number = fit.forecast.memory.peak, candidate.num_microbatches
                there = self.work.bytes_of_batch(fit.sizes.num_devices, number, peak)
                return there * other.num_devices / self.machine.num_devices
        return None

    def is_hopeless(self) -> bool:
        """Whether the machine is too small by far, by what was tried on similar machines."""
        layouts, _ = _list_layouts(self.sizes)
        of_batch = self.bytes_of_similar(layouts[0]) if layouts else None
        if of_batch is None:
            return False
        numbers, devices = _list_microbatches(layouts[0], self.sizes), self.sizes.num_devices
        least = min(self.work.expected_peak(devices, n, of_batch) for n in numbers)
        return least > _FAR * self.limit


def _list_layouts(sizes: RunSizes) -> tuple[list[Layout], str]:
    """The layouts that divide the run, the plainest first, and why others do not."""
    space = list_space(sizes, Choices.of_layouts())
    found = [candidate.layout for candidate in space.candidates]
    ordered = [layout for name in _PRESETS for layout in found if layout.preset == name]
    return ordered, ', '.join(sorted(space.dropped))


def _list_microbatches(layout: Layout, sizes: RunSizes) -> list[int]:
    """The numbers of microbatches that divide the batch, with 1."""
    choices = Choices.of_layouts(layouts=(layout,), num_microbatches=_MICROBATCHES)
    found = [candidate.num_microbatches for candidate in list_space(sizes, choices).candidates]
    return [1, *(n for n in found if n is not None)]


def can_fit(work: Workload, machine: Machine) -> bool:
    """Whether a run may fit by the lower bound, with some number of microbatches."""
    sizes, limit = work.sizes_on(machine), machine.chip.hbm_bytes_per_device
    return any(work.least_peak(sizes, number) <= limit for number in (1, *_MICROBATCHES))


def _rank(fit: Fit) -> tuple[bool, float, int]:
    """The best settings are those that fit and are fastest, or else need the least memory."""
    assert fit.forecast is not None
    return not fit.fits, (fit.seconds or 0.0) if fit.fits else 0.0, fit.forecast.memory.peak


def _exchanges_much(fit: Fit) -> bool:
    """Whether exchanges of data that nothing hides take much of a step."""
    time = fit.forecast.time if fit.forecast else None
    if time is None:
        return False
    exposed = sum(part.exposed for part in time.parts if ' over ' in part.name)
    return exposed > _MUCH * time.seconds


def forecast_fit(work: Workload, fit: Fit, **settings: Any) -> Fit:
    """Returns the same settings with a forecast, by default with the figures of the compiler.

    Raises a ConfigError or ValueError if the settings are not possible on the machine.
    """
    if fit.candidate is None:
        return fit
    config = change_run(work.config, fit.candidate, fit.machine)
    forecast = forecast_run(config, fit.machine, changes=None, **settings)
    return dataclasses.replace(fit, forecast=forecast)


def find_smallest(
    work: Workload, chip: Chip, progress: Progress | None = None, known: Known | None = None
) -> Fit | None:
    """Returns how a run fits into the smallest machine of a chip, or None if it fits into none.

    Machines have one slice. Those that are too small by a lower bound are not tried.
    """
    say, known = progress or (lambda text: None), {} if known is None else known
    for machine in list_machines(work, chip):

        def about(text: str, machine: Machine = machine) -> None:
            say(f'{machine}: {text}')

        tries = _Tries(work, machine, about, known)
        if not tries.is_hopeless() and (fit := tries.find_best()).fits:
            return fit
    return None


def list_machines(work: Workload, chip: Chip) -> list[Machine]:
    """Returns the machines of a chip that a lower bound does not exclude, from the smallest."""
    shapes = {0: _HOSTS, 2: _PLANES, 3: _CUBOIDS}[chip.dimensions]
    machines = (Machine(f'{chip.name}:{shape}') for shape in shapes)
    return [machine for machine in machines if can_fit(work, machine)]
