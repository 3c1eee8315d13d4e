"""The published measurements, as they are in `measured_steps.json`."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partitioning.hardware import CHIPS

MEASUREMENTS = Path(__file__).with_name('measured_steps.json')
_RATES = {'Gb': 1e9 / 8, 'Tb': 1e12 / 8, 'GB': 1e9}  # in bytes/s
_GPUS_PER_HOST = 8


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


def network_bandwidth_of(row: MeasuredRow) -> float | None:
    """A GPU's share of the network of its host in bytes/s, if the row says it."""
    text = row['hardware']['topology_source'] or ''
    found = re.search(r'([\d.]+) (Gb|Tb|GB)/s (?:\w+ )?a (VM|node|GPU)', text)
    if found is None or CHIPS[row.chip].platform != 'gpu':
        return None
    share = 1 if found[3] == 'GPU' else _GPUS_PER_HOST
    return float(found[1]) * _RATES[found[2]] / share
