"""The published measurements, as they are in `measured_steps.json`."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEASUREMENTS = Path(__file__).with_name('measured_steps.json')


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredRow:
    """One measured training step, and what is known about the program.

    Attributes:
      settings: the entry of the file, which says where each figure comes from.
    """

    settings: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Returns an entry of the settings, such as 'model' or 'remat'."""
        return self.settings[name]

    @property
    def name(self) -> str:
        """The identifier of the row."""
        return self.settings['id']

    @property
    def chip(self) -> str:
        """The name of the chip in `partitioning.hardware.CHIPS`."""
        return self.settings['hardware']['chip'].lower()

    @property
    def num_devices(self) -> int:
        """The number of JAX devices."""
        return self.settings['hardware']['jax_devices']

    @property
    def num_slices(self) -> int:
        """The number of TPU slices, or of GPU hosts."""
        return self.settings['hardware']['slices']

    @property
    def params_total(self) -> int:
        """The number of parameters of the measured model."""
        return self.settings['model']['params_total']

    @property
    def step_seconds(self) -> float:
        """The measured time of a step."""
        measured = self.settings['measured']
        return measured.get('step_time_refined_s') or measured['step_time_s']

    @property
    def superseded(self) -> bool:
        """Whether a later measurement of the same recipe takes its place."""
        return self.settings['superseded']


@functools.cache
def load_rows(path: Path = MEASUREMENTS) -> tuple[MeasuredRow, ...]:
    """Reads the rows, in the order of the file."""
    return tuple(MeasuredRow(entry) for entry in json.loads(path.read_text()))
