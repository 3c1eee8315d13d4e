"""The constants of the step-time model of each chip, each with its unit and its source."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from partitioning.hardware import Chip

# Written by `python benchmarks/forecast_truth.py --fit`.
FITTED = Path(__file__).with_name('fitted_constants.json')
_UNITS = {
    'host_bandwidth': 'bytes/s',
    'network_latency': 's',
    'exchange_latency': 's',
    'hop_latency': 's',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the step-time model.

    Attributes:
      name: its name, a field of `ChipConstants`.
      value: its value, in `unit`.
      unit: its unit, such as 'bytes/s'; '' for a ratio.
      source: where it comes from, for example a page, or the rows that it was fitted on.
    """

    name: str
    value: float
    unit: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipConstants:
    """The constants of one chip.

    Shares and efficiencies are between 0 and 1. `benchmarks/measured_steps/fitting.py` says which
    of them are fitted.

    Attributes:
      matmul_efficiency: the share of the peak rate that matrix products reach while they compute.
      product_traffic: the share of the traffic of their operands and results, and those of kernels,
        with the memory that does not overlap with their computation.
      cycles_factor: the time of operations, as a multiple of the compiler's estimate.
      kernel_efficiency: the share of the peak rate that hand-written kernels reach.
      memory_efficiency: the share of the memory's bandwidth that other operations reach.
      link_efficiency: the share of the bandwidth of fast links that exchanges reach.
      network_efficiency: the same for the network between slices or hosts.
      hidden_share: the share of the exchanges over fast links that computation hides.
      hidden_network_share: the same for exchanges between slices or hosts.
      host_bandwidth: the bandwidth between a chip and the memory of its host.
      host_interference: the share of the copies to and from the host that delays computation,
        which they overlap with.
      exchange_latency: what the start of each exchange takes in addition.
      hop_latency: what each link on its way takes in addition.
      network_latency: what each phase of a ring between slices or hosts takes in addition.
      speed_spread: by how much the time of a step varies from TPU slice to slice, or from GPU to
        GPU, as a share. All wait for the slowest one.
      error: the relative error on measured steps that nine in ten forecasts by formula stay below.
      compiled_error: the same for forecasts of compiled programs.
    """

    matmul_efficiency: float
    product_traffic: float
    cycles_factor: float
    kernel_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    network_efficiency: float
    hidden_share: float
    hidden_network_share: float
    host_bandwidth: float
    host_interference: float
    exchange_latency: float
    hop_latency: float
    network_latency: float
    speed_spread: float
    error: float
    compiled_error: float


@functools.cache
def read_fitted() -> dict[str, dict[str, Any]]:
    """The file of fitted constants: for each chip, and its domain of measured steps."""
    return json.loads(FITTED.read_text())


@functools.cache
def constants_of(chip: Chip) -> ChipConstants:
    """The constants of a chip, fitted on measured steps of this chip or of similar chips."""
    entry = read_fitted()[chip.name]
    return ChipConstants(**{name: figure['value'] for name, figure in entry.items()})


def list_constants(chip: Chip, constants: ChipConstants | None = None) -> tuple[Constant, ...]:
    """Lists the constants of a chip with their sources.

    Args:
      chip: the chip.
      constants: values that replace the ones of `constants_of`, with the caller as their source.
    """
    entry = read_fitted()[chip.name]
    own = dataclasses.asdict(constants_of(chip))
    chosen = dataclasses.asdict(constants) if constants else own
    return tuple(
        Constant(
            name=name,
            value=value,
            unit=_UNITS.get(name, ''),
            source=entry[name]['source'] if value == own[name] else 'given by the caller',
        )
        for name, value in chosen.items()
    )
