"""The constants of the step-time model of each chip, each with its unit and its source."""

from __future__ import annotations

import dataclasses

from partitioning.aot.timing.step_time import Constant
from partitioning.hardware import Chip

_UNITS = {
    'host_bandwidth': 'bytes/s',
    'step_overhead': 's',
    'exchange_latency': 's',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipConstants:
    """The constants of one chip.

    Attributes:
      matmul_efficiency: the share of the peak rate that matrix products reach, by their FLOPs.
      cycles_factor: the time of operations, as a multiple of the compiler's estimate.
      kernel_efficiency: the share of the peak rate that hand-written kernels reach.
      memory_efficiency: the share of the memory's bandwidth that other operations reach.
      link_efficiency: the share of the bandwidth of fast links that exchanges reach.
      network_efficiency: the same for the network between slices or hosts.
      hidden_share: the share of the exchanges over fast links that computation hides.
      hidden_network_share: the same for exchanges between slices or hosts.
      host_bandwidth: the bandwidth between a chip and the memory of its host.
      step_overhead: what a step takes in addition.
      exchange_latency: what each exchange takes in addition.
      slice_delay: the share by which a step grows when the number of slices or hosts doubles,
        because all wait for the slowest.
      error: the relative error on measured steps that nine in ten forecasts stay below.
    """

    matmul_efficiency: float
    cycles_factor: float
    kernel_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    network_efficiency: float
    hidden_share: float
    hidden_network_share: float
    host_bandwidth: float
    step_overhead: float
    exchange_latency: float
    slice_delay: float
    error: float


# Not fitted yet: usual values.
_TPU = ChipConstants(
    matmul_efficiency=0.8,
    cycles_factor=1.0,
    kernel_efficiency=0.5,
    memory_efficiency=0.8,
    link_efficiency=0.9,
    network_efficiency=0.8,
    hidden_share=0.8,
    hidden_network_share=0.5,
    host_bandwidth=15e9,
    step_overhead=1e-3,
    exchange_latency=10e-6,
    slice_delay=0.01,
    error=0.3,
)
_GPU = dataclasses.replace(
    _TPU, matmul_efficiency=0.65, link_efficiency=0.75, host_bandwidth=50e9, error=0.4
)
_FITTED: dict[str, ChipConstants] = {}


def constants_of(chip: Chip) -> ChipConstants:
    """The constants of a chip: those fitted on its rows, or the defaults of its platform."""
    return _FITTED.get(chip.name, _GPU if chip.platform == 'gpu' else _TPU)


def list_constants(chip: Chip, constants: ChipConstants) -> tuple[Constant, ...]:
    """Lists the constants of a chip with their sources."""
    source = 'a usual value, not fitted'
    return tuple(
        Constant(name=name, value=value, unit=_UNITS.get(name, ''), source=source)
        for name, value in dataclasses.asdict(constants).items()
    )
