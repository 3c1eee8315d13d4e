"""What a device has to do in a compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.program.costs import ProgramCosts
from meshwright.time.kernels import find_kernel_work
from meshwright.time.layers import Layers
from meshwright.time.work import KernelWork, Work
from partitioning.hardware import CHIPS
from partitioning.products.flops import count_jaxpr_flops


def read_work(
    costs: ProgramCosts,
    jaxpr: Any,
    num_devices: int,
    kernels: Sequence[KernelWork] | None = None,
    layers: Layers | None = None,
) -> Work:
    """Returns the work of a compiled program on each device.

    The compiler's estimates and exchanges are in its costs. The FLOPs of matrix products and of
    kernels are counted in the jaxpr, because compilers count loops once and kernels not at all.
    Products of groups of rows, of which compilers have no usable estimate, run at the peak rate.

    Args:
      costs: the costs of the program, from `read_costs`.
      jaxpr: the ClosedJaxpr of the same function.
      num_devices: the number of devices, which share the FLOPs evenly.
      kernels: its kernels, if they have been found already.
      layers: its products, from `describe_layers`, if they are known.

    Raises:
      ValueError: if the chip is not known.
    """
    if costs.chip is None:
        raise ValueError(
            'the program was compiled for devices without data: compile for one of the chips '
            f'{", ".join(CHIPS)}'
        )
    chip = CHIPS[costs.chip]
    clock = chip.clock_hz
    of_groups = count_jaxpr_flops(jaxpr, kernels=False, dense=False) / num_devices
    matmul = sum(o.cycles for o in costs.operations if o.kind == 'matmul')
    estimated = clock is not None and costs.cycles > 0
    return Work(
        origin='compiler',
        chip=costs.chip,
        matmul_flops=count_jaxpr_flops(jaxpr, kernels=False) / num_devices,
        matmul_seconds=matmul / clock + of_groups / chip.peak_flops_per_device
        if clock and estimated
        else None,
        other_seconds=(costs.cycles - matmul) / clock if clock and estimated else None,
        other_bytes=costs.device_bytes,
        kernels=tuple(find_kernel_work(jaxpr, num_devices) if kernels is None else kernels),
        collectives=costs.collectives,
        host_bytes=costs.host_bytes,
        layers=layers,
    )
