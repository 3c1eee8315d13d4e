"""The smallest machine of a kind of chip into which a run fits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from partitioning.hardware import Chip
from train.fitting.fits import Fit, Progress, can_fit, fit_machine
from train.fitting.tasks import Task
from train.forecasting import Machine

# Machines that clouds offer, from the smallest.
_PLANES = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBOIDS = (
    *('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8'),
    *('8x8x16', '8x16x16', '16x16x16'),
)
_HOSTS = ('1x1', '1x2', '1x4', '1x8', '2x8', '4x8', '8x8', '16x8', '32x8', '64x8', '128x8')
# The least that a parameter needs: itself, two moments of AdamW and its gradient, in float32.
_STATE_BYTES = 16


def find_smallest(task: Task, chip: Chip, progress: Progress | None = None) -> Fit | None:
    """Returns how a run fits into the smallest machine of a chip, or None if it fits into none.

    Machines have one slice. Those that are too small for the state alone are not tried.

    Args:
      task: what is to be trained.
      chip: the chip.
      progress: receives a text when something is tried.
    """
    say = progress or (lambda text: None)
    for machine in list_machines(chip, task.model.num_parameters * _STATE_BYTES):

        def about(text: str, machine: Machine = machine) -> None:
            say(f'{machine}: {text}')

        if can_fit(task, machine, about):
            return fit_machine(task, machine, about)
    return None


def list_machines(chip: Chip, state_bytes: int) -> Iterator[Machine]:
    """Yields the machines of a chip that can hold a state, from the smallest."""
    shapes = {0: _HOSTS, 2: _PLANES, 3: _CUBOIDS}[chip.dimensions]
    for shape in shapes:
        chips = math.prod(map(int, shape.split('x')))
        if chips * chip.hbm_bytes >= state_bytes:
            yield Machine(f'{chip.name}:{shape}')
