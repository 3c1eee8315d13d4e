"""The smallest machine of a kind of chip into which a run fits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from partitioning.hardware import Chip
from train.planning.fitting.fits import (
    Fit,
    Known,
    Progress,
    can_fit,
    fit_machine,
    is_too_small,
    limit_of,
)
from train.planning.fitting.tasks import Task
from train.planning.forecasting import Machine

# Machines that clouds offer, from the smallest.
_PLANES = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBOIDS = (
    *('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8'),
    *('8x8x16', '8x16x16', '16x16x16'),
)
_HOSTS = ('1x1', '1x2', '1x4', '1x8', '2x8', '4x8', '8x8', '16x8', '32x8', '64x8', '128x8')


def find_smallest(
    task: Task, chip: Chip, progress: Progress | None = None, known: Known | None = None
) -> Fit | None:
    """Returns how a run fits into the smallest machine of a chip, or None if it fits into none.

    Machines have one slice. Those that are too small by a lower bound are not tried.

    Args:
      task: what is to be trained.
      chip: the chip.
      progress: receives a text when something is tried.
      known: what has been tried before for this task; it receives what is tried here.
    """
    say, known = progress or (lambda text: None), {} if known is None else known
    for machine in list_machines(task, chip):
        if is_too_small(task, machine, known):
            continue

        def about(text: str, machine: Machine = machine) -> None:
            say(f'{machine}: {text}')

        fit = fit_machine(task, machine, about, known)
        if fit.fits:
            return fit
    return None


def list_machines(task: Task, chip: Chip) -> Iterator[Machine]:
    """Yields the machines of a chip that a lower bound does not exclude, from the smallest."""
    for shape in {0: _HOSTS, 2: _PLANES, 3: _CUBOIDS}[chip.dimensions]:
        machine = Machine(f'{chip.name}:{shape}')
        devices = math.prod(map(int, shape.split('x'))) * chip.devices
        if can_fit(task, task.sizes_of(devices), limit_of(machine)):
            yield machine
