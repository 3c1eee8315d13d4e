"""The time of a step: its computation, and what it does not hide of everything else."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from jax.sharding import Mesh

from partitioning.aot.timing.constants import ChipConstants, constants_of, list_constants
from partitioning.aot.timing.exchanges import links_of, time_exchange
from partitioning.aot.timing.links import Machine, describe_machine
from partitioning.aot.timing.step_time import StepTime, TimePart
from partitioning.aot.timing.work import Work
from partitioning.hardware import CHIPS


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
    chip = machine.chip
    constants = constants or constants_of(chip)
    computing = _time_computing(work, constants)
    available = sum(part.seconds for part in computing)
    parts = list(computing)
    # What computation hides does not hide anything else.
    for part, share in _time_moving(work, machine, constants):
        hidden = min(part.seconds * share, available)
        available -= hidden
        exposed = part.seconds - hidden
        parts.append(TimePart(name=part.name, seconds=part.seconds, exposed=exposed))
    latency = constants.exchange_latency * sum(c.count for c in work.collectives)
    overhead = constants.step_overhead + latency
    busy = sum(part.exposed for part in parts) + overhead
    waiting = busy * (constants.slice_delay * (machine.num_granules - 1).bit_length())
    parts.append(TimePart(name='fixed overheads', seconds=overhead, exposed=overhead))
    parts.append(TimePart(name='waiting for other slices', seconds=waiting, exposed=waiting))
    kept = sorted((p for p in parts if p.seconds > 0), key=lambda part: -part.exposed)
    seconds = sum(part.exposed for part in kept)
    return StepTime(
        seconds=seconds,
        low=seconds / (1 + constants.error),
        high=seconds * (1 + constants.error),
        parts=tuple(kept),
        constants=list_constants(chip),
    )


def _time_computing(work: Work, constants: ChipConstants) -> list[TimePart]:
    """The parts that occupy the compute units of a device."""
    chip = CHIPS[work.chip]
    peak, bandwidth = chip.peak_flops_per_device, chip.hbm_bandwidth / chip.devices
    matmul = work.matmul_flops / (peak * constants.matmul_efficiency)
    other = work.other_bytes / (bandwidth * constants.memory_efficiency)
    if work.matmul_seconds is not None:
        matmul = work.matmul_seconds * constants.cycles_factor
    if work.other_seconds is not None:
        other = work.other_seconds * constants.cycles_factor
    kernels = sum(
        max(
            kernel.flops / (peak * constants.kernel_efficiency),
            kernel.nbytes / (bandwidth * constants.memory_efficiency),
        )
        for kernel in work.kernels
    )
    times = {'matrix products': matmul, 'other operations': other, 'kernels': kernels}
    return [TimePart(name=name, seconds=s, exposed=s) for name, s in times.items()]


def _time_moving(
    work: Work, machine: Machine, constants: ChipConstants
) -> Iterable[tuple[TimePart, float]]:
    """The parts that move data, each with the share of it that computation can hide."""
    seconds: dict[tuple[str, bool], float] = collections.defaultdict(float)
    for collective in work.collectives:
        links = links_of(collective, machine)
        slow = links.granules > 1
        efficiency = constants.network_efficiency if slow else constants.link_efficiency
        once = time_exchange(
            collective,
            links,
            machine.chip,
            network_bandwidth=machine.network_bandwidth,
            efficiency=efficiency,
        )
        fast = 'ICI' if machine.chip.platform == 'tpu' else 'NVLink'
        network = ('DCN' if machine.chip.platform == 'tpu' else 'network') if slow else fast
        axes = ', '.join(collective.axes) or f'{collective.group_size} devices'
        seconds[f'{collective.kind} over {axes} ({network})', slow] += once * collective.count
    for (name, slow), total in seconds.items():
        share = constants.hidden_network_share if slow else constants.hidden_share
        yield TimePart(name=name, seconds=total, exposed=total), share
    if work.host_bytes:
        total = work.host_bytes / (constants.host_bandwidth / machine.chip.devices)
        part = TimePart(name='copies to and from the host', seconds=total, exposed=total)
        yield part, constants.hidden_host_share
