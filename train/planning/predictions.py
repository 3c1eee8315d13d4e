"""The memory and time of a candidate by formula: it is planned and traced, but not compiled."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from meshwright.jaxpr import estimate_memory, trace_function
from meshwright.time import Work, estimate_step_time, estimate_work
from partitioning.hardware import CHIPS, chip_of
from partitioning.products.flops import count_jaxpr_flops
from train.errors import ConfigError
from train.planning.forecasts import PlannedStep
from train.planning.searching import Prediction


def predict_step(planned: PlannedStep) -> Prediction:
    """Returns what a planned step needs and takes, by formulas.

    Raises:
      ConfigError: if nothing is known about the chip.
    """
    mesh = planned.run.config.partitioner.mesh
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None:
        raise ConfigError(
            'nothing is known about the chip of the mesh, so its steps have no times: search on '
            f'one of {", ".join(CHIPS)}'
        )
    traced = trace_function(planned.step, *planned.arguments)
    work = estimate_work(traced, chip)
    even_share = count_jaxpr_flops(traced.jaxpr, kernels=False) / mesh.size
    return Prediction(
        peak=estimate_memory(traced, chip).peak,
        seconds=_seconds(work, mesh),
        bound=_seconds(least_work(work, even_share), mesh),
    )


def least_work(work: Work, even_share: float) -> Work:
    """The least that any compiled program of a traced function does, for a bound on its time.

    Its matrix products run at the peak rate of the chip, its kernels do what they do, and all other
    operations and all exchanges of data take no time. On chips whose compiler estimates nothing,
    products take what the model says, as they do for compiled programs.

    Args:
      work: the estimated work.
      even_share: the FLOPs of products of a device if nothing is computed twice over devices.
    """
    chip = CHIPS[work.chip]
    flops = min(work.matmul_flops, even_share)
    at_peak = flops / chip.peak_flops_per_device
    return dataclasses.replace(
        work,
        matmul_flops=flops,
        matmul_seconds=at_peak if chip.clock_hz else None,
        other_seconds=0.0,
        other_bytes=0.0,
        collectives=(),
        host_bytes=0.0,
    )


def _seconds(work: Work, mesh: Mesh) -> float:
    time = estimate_step_time(work, mesh)
    assert time is not None  # the chip is known
    return time.seconds
