"""The work of a device in one call of a function, from a compiled program or by formula."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from meshwright.program.collectives import Collective
from meshwright.time.layers import Layers

# 'compiler': read from the compiled program. 'jaxpr': derived from the traced function and the
# layout of its arguments, without a compiler.
Origin = Literal['compiler', 'jaxpr']


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelWork:
    """The work of one hand-written kernel, which no compiler estimates.

    Attributes:
      name: the name of the kernel.
      flops: the floating-point operations of all its executions in one call.
      nbytes: the bytes that they read and write in the device's memory.
      count: the number of executions in one call.
      forward_flops: the part of `flops` outside of the backward pass; nan if it is not known, as
        for stored work from which only a step time is computed.
      width: the smallest side of what its products keep in the matrix unit, such as the size of a
        head; 0 if it is not known.
    """

    name: str
    flops: float
    nbytes: float
    count: int
    forward_flops: float = math.nan
    width: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a device has to do in one call of a function. All figures are per device and call.

    Attributes:
      origin: where the figures come from.
      chip: the name of the chip in `partitioning.hardware.CHIPS`.
      matmul_flops: the floating-point operations of matrix products, including recomputation,
        without kernels.
      matmul_seconds: the compiler's estimate for matrix products and what is fused with them, at
        the clock of the chip; None if it has none, as on GPUs.
      other_seconds: its estimate for all other operations; None if it has none.
      other_bytes: the bytes that other operations read and write in the device's memory.
      kernels: the hand-written kernels.
      collectives: the exchanges of data with other devices.
      host_bytes: the bytes that are copied to and from the memory of the host.
      layers: the products, from which the distance to measured steps is known, or None.
    """

    origin: Origin
    chip: str
    matmul_flops: float
    matmul_seconds: float | None
    other_seconds: float | None
    other_bytes: float
    kernels: tuple[KernelWork, ...]
    collectives: tuple[Collective, ...]
    host_bytes: float
    layers: Layers | None = None
