"""Which constants of the step-time model are fitted, around which usual values, for which chips."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshwright.time import ChipConstants
from partitioning.hardware import CHIPS

from .fitting import Case, Fit, Free, fit_constants

TPUS = tuple(chip.name for chip in CHIPS.values() if chip.platform == 'tpu')
GPUS = tuple(chip.name for chip in CHIPS.values() if chip.platform == 'gpu')
# Matrix units of 256 x 256 are filled by fewer products than those of 128 x 128.
WIDE = ('v6e', 'tpu7x')
NARROW = tuple(name for name in TPUS if name not in WIDE)

# 45 of 50 GB/s per link and direction, as in the scaling book; the bandwidths to the host are from
# the same table.
_TPU = ChipConstants(
    matmul_efficiency=0.9,
    cycles_factor=1.0,
    kernel_efficiency=0.3,
    memory_efficiency=0.5,
    link_efficiency=0.9,
    network_efficiency=0.8,
    hidden_share=0.5,
    hidden_network_share=0.7,
    host_bandwidth=15e9,
    host_delay=0.02,
    exchange_latency=10e-6,
    hop_latency=1e-6,
    slice_delay=0.025,
    error=0.3,
)
_GPU = dataclasses.replace(
    _TPU,
    matmul_efficiency=0.75,
    kernel_efficiency=0.5,
    memory_efficiency=0.7,
    link_efficiency=0.8,
    network_efficiency=0.7,
    hidden_share=0.6,
    hidden_network_share=0.0,
    host_bandwidth=50e9,
    host_delay=0.01,
    slice_delay=0.005,
)
_WIDE = dataclasses.replace(
    _TPU, matmul_efficiency=0.75, kernel_efficiency=0.45, host_bandwidth=32e9
)
USUAL = dict.fromkeys(NARROW, _TPU) | dict.fromkeys(WIDE, _WIDE) | dict.fromkeys(GPUS, _GPU)
# Programs of other frameworks run other code than ours on GPUs. On TPUs, they have one compiler.
SOFTWARE = {'axlearn': 1.5, 'torchtitan': 1.4, 'torchtitan without compiler': 1.5}

# A kind of chips shares a value, from which single chips differ little.
FREE = (
    Free('matmul_efficiency', 0.2, NARROW),
    Free('matmul_efficiency', 0.2, WIDE),
    Free('kernel_efficiency', 0.5, NARROW),
    Free('kernel_efficiency', 0.5, WIDE),
    Free('memory_efficiency', 0.5, TPUS),
    Free('hidden_share', 0.5, TPUS),
    Free('hidden_network_share', 0.8, TPUS),
    Free('host_delay', 0.8, TPUS),
    Free('slice_delay', 0.6, TPUS),
    *(
        Free(name, spread, (chip,))
        for chip in ('v5e', 'v5p', 'v6e', 'tpu7x')
        for name, spread in (
            ('matmul_efficiency', 0.07),
            ('kernel_efficiency', 0.15),
            ('hidden_share', 0.25),
            ('slice_delay', 0.4),
        )
    ),
    Free('matmul_efficiency', 0.2, GPUS),
    Free('kernel_efficiency', 0.3, GPUS),
    Free('memory_efficiency', 0.5, GPUS),
    Free('hidden_share', 0.5, GPUS),
    Free('network_efficiency', 0.4, GPUS),
    Free('host_delay', 0.5, GPUS),
    Free('slice_delay', 0.5, GPUS),
)
# What the estimates of the compiler are multiplied by, for which few programs were compiled.
FREE_OF_COMPILED = (
    Free('cycles_factor', 0.2, NARROW),
    Free('cycles_factor', 0.2, WIDE),
    *(Free('cycles_factor', 0.05, (chip,)) for chip in ('v5e', 'v5p', 'v6e', 'tpu7x')),
)


def fit_all(cases: Sequence[Case], start: np.ndarray | None = None) -> tuple[Fit, np.ndarray]:
    """Fits the constants of all chips; see `fit_constants`.

    Traced steps, which exist for every row, decide everything except the factor of the compiler's
    estimates.
    """
    traced = [case for case in cases if case.origin == 'jaxpr']
    compiled = [case for case in cases if case.loads.estimated_products is not None]
    fit, x = fit_constants(traced, USUAL, FREE, SOFTWARE, start)
    if compiled:
        factors, _ = fit_constants(compiled, fit.constants, FREE_OF_COMPILED, {})
        fit = Fit(factors.constants, fit.software)
    return fit, x
