"""The time of a step: its computation, and everything else that does not overlap with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from meshwright.time.constants import ChipConstants, Constant, constants_of, list_constants
from meshwright.time.domain import domain_of, find_distance
from meshwright.time.links import Machine, describe_machine
from meshwright.time.loads import Loads, find_loads
from meshwright.time.work import Work
from partitioning.hardware import CHIPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimePart:
    """A part of the time of a step.

    Attributes:
      name: what takes the time, for example 'matrix products' or 'all-gather over fsdp (ICI)'.
      seconds: how long it takes by itself.
      exposed: the part that is not overlapped. The exposed times add up to the time of the step.
    """

    name: str
    seconds: float
    exposed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The forecast time of a step, with its range and its parts.

    Attributes:
      seconds: the forecast.
      low, high: its range in seconds, from the errors that the model made on measured steps of the
        chip, and from the distance to them.
      parts: what the time is made of, the largest exposed part first.
      constants: the constants that the model used.
      outside: in what the step differs from all measured ones, so that its range is wider.
    """

    seconds: float
    low: float
    high: float
    parts: tuple[TimePart, ...]
    constants: tuple[Constant, ...]
    outside: tuple[str, ...] = ()


def estimate_step_time(
    work: Work, machine: Machine | Mesh, constants: ChipConstants | None = None
) -> StepTime | None:
    """Estimates how long a step takes, or returns None if the model does not know the chip.

    Args:
      work: what each device has to do.
      machine: where the devices are, from `describe_machine`, or the mesh of the step.
      constants: the constants of the chip, by default those fitted on measured steps.
    """
    if isinstance(machine, Mesh):
        described = describe_machine(machine)
        if described is None:
            return None
        machine = described
    loads = find_loads(work, machine)
    chosen = constants or constants_of(machine.chip)
    domain = domain_of(machine.chip)
    parts = busy_parts(loads, chosen)
    busy = math.fsum(part.exposed for part in parts)
    parts.append(wait_for_slowest(loads, chosen, busy))
    distance = find_distance(domain, loads, busy, work.layers)
    usual = chosen.compiled_error if work.origin == 'compiler' else chosen.error
    error = (1 + usual) * math.exp(domain.growth * distance.doublings) - 1
    kept = sorted((p for p in parts if p.seconds > 0), key=lambda part: -part.exposed)
    seconds = math.fsum(part.exposed for part in kept)
    return StepTime(
        seconds=seconds,
        low=seconds / (1 + error),
        high=seconds * (1 + error),
        parts=tuple(kept),
        constants=list_constants(machine.chip, chosen),
        outside=distance.reasons,
    )


WAITING = 'waiting for the slowest slice or GPU'  # the name of a part
# The mean of the largest of n numbers with a normal distribution, of variance 1 and mean 0.
_LARGEST_OF = {
    **{1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766, 32: 2.070, 64: 2.344, 128: 2.595},
    **{256: 2.826, 512: 3.037, 1024: 3.234},
}


def wait_for_slowest(loads: Loads, constants: ChipConstants, busy: float) -> TimePart:
    """What a step that takes `busy` seconds waits for the slowest slice or GPU.

    Their times vary around a mean, as with the clock that the temperature of a GPU allows, and
    nobody is faster than the slowest of them.
    """
    counts = list(_LARGEST_OF)
    most = np.interp(math.log2(loads.num_separate), np.log2(counts), [*_LARGEST_OF.values()])
    seconds = busy * constants.speed_spread * float(most)
    return TimePart(name=WAITING, seconds=seconds, exposed=seconds)


def busy_parts(loads: Loads, constants: ChipConstants) -> list[TimePart]:
    """The parts of a step, without what slices or GPUs wait for each other."""
    parts = [*_computing(loads, constants)]
    computing = math.fsum(part.exposed for part in parts)
    parts += _moving(loads, computing, constants)
    exchanges = loads.exchanges
    starts = sum(exchange.count for exchange in exchanges) * constants.exchange_latency
    ways = sum(exchange.hops for exchange in exchanges) * constants.hop_latency
    rings = sum(exchange.phases for exchange in exchanges) * constants.network_latency
    latency = starts + ways + rings
    parts.append(TimePart(name='latency of exchanges', seconds=latency, exposed=latency))
    return parts


def _computing(loads: Loads, constants: ChipConstants) -> Iterator[TimePart]:
    """The parts that occupy the compute units of a device.

    Where the compiler has estimates, its estimate and the formula are two estimates of one time,
    which are wrong in different ways: their geometric mean counts.
    """
    products = loads.products / constants.matmul_efficiency
    products += loads.product_memory * constants.product_traffic
    others = loads.memory / constants.memory_efficiency
    if loads.estimated_products is not None:
        products = math.sqrt(products * loads.estimated_products * constants.cycles_factor)
    if loads.estimated_others is not None:
        others = math.sqrt(others * loads.estimated_others * constants.cycles_factor)
    kernels = loads.kernels / constants.kernel_efficiency
    kernels += loads.kernel_memory * constants.product_traffic
    times = {'matrix products': products, 'other operations': others, 'kernels': kernels}
    for name, seconds in times.items():
        yield TimePart(name=name, seconds=seconds, exposed=seconds)


def _moving(loads: Loads, computing: float, constants: ChipConstants) -> Iterator[TimePart]:
    """The parts that move data, of which computation hides a share.

    What products are known to cover is hidden, and of the rest, the usual share. Copies to and from
    the host run while the device computes, which they delay a little. They end
    the step if they take longer.
    """
    for exchange in loads.exchanges:
        efficiency, hidden = constants.link_efficiency, constants.hidden_share
        if exchange.slow:
            efficiency, hidden = constants.network_efficiency, constants.hidden_network_share
        seconds = exchange.seconds / efficiency
        exposed = (seconds - exchange.covered) * (1 - hidden)
        yield TimePart(name=exchange.name, seconds=seconds, exposed=exposed)
    copying = loads.host_bytes * CHIPS[loads.chip].devices / constants.host_bandwidth
    exposed = max(0.0, copying - computing)
    exposed += constants.host_interference * min(copying, computing)
    yield TimePart(name='copies to and from the host', seconds=copying, exposed=exposed)
