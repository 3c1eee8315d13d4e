"""Steps that this project measured itself, on one GPU, to which no constant is fitted.

They have no exchanges and wait for no other device, so they show whether the constants of products
and of memory are what their names say, or hide other costs. `held_steps.json` has what the programs
of `train_step.py --forecast=h100:1x1` have to do, traced and compiled, and
`results/train_steps.md` how they were measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from meshwright.time import describe_machine, estimate_step_time
from meshwright.time.step_model import StepTime
from meshwright.time.work import Origin
from partitioning.hardware import describe_topology

from .cases import work_of

HELD = Path(__file__).with_name('held_steps.json')


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldStep:
    """A step that was measured, with its forecast.

    Attributes:
      name: the model and the loop, such as '125m plain'.
      origin: 'compiler' if the program was compiled, 'jaxpr' if it was traced.
      measured: the time of a step in seconds.
      time: the forecast by the committed constants.
    """

    name: str
    origin: Origin
    measured: float
    time: StepTime

    @property
    def error(self) -> float:
        """The relative error of the forecast."""
        return self.time.seconds / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time is in the range of the forecast."""
        return self.time.low <= self.measured <= self.time.high


def forecast_held() -> Iterator[HeldStep]:
    """Yields the forecasts of the steps: each by formula, and from its compiled program."""
    entries = json.loads(HELD.read_text())
    devices = np.array(describe_topology(entries['topology']).devices)
    machine = describe_machine(Mesh(devices, ('data',)))
    assert machine is not None
    origins: tuple[Origin, ...] = 'jaxpr', 'compiler'
    for name, entry in entries['steps'].items():
        for origin in origins:
            time = estimate_step_time(work_of(entry[origin], 1, 1, origin), machine)
            assert time is not None
            yield HeldStep(name=name, origin=origin, measured=entry['seconds'], time=time)
