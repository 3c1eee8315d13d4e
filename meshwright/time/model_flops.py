"""The FLOPs of a function, with its kernels."""

from __future__ import annotations

from typing import Any

from meshwright.time.kernels import find_kernel_work
from partitioning.products.flops import count_jaxpr_flops


def count_device_flops(jaxpr: Any, num_devices: int) -> tuple[float, float]:
    """Counts the FLOPs of each device: those of the model, and those of the program.

    The first are without recomputation. Kernels count without the blocks that their masks rule out.
    In the backward pass they compute some products again, so the model's count twice the forward
    pass there.

    Args:
      jaxpr: the ClosedJaxpr of a function.
      num_devices: the number of devices, which share the FLOPs evenly.
    """
    kernels = sum(k.flops for k in find_kernel_work(jaxpr))
    forward = sum(k.flops for k in find_kernel_work(jaxpr, backward=False))
    needed = 3 * forward if kernels > forward else forward
    model = count_jaxpr_flops(jaxpr.jaxpr, kernels=False, recomputed=False)
    program = count_jaxpr_flops(jaxpr.jaxpr, kernels=False)
    return model / num_devices + needed, program / num_devices + kernels
