"""The costs of a compiled train step, for people."""

from __future__ import annotations

import os
from collections.abc import Iterator

from meshwright import ProgramCosts
from partitioning.amounts import bytes_str
from train.reporting.reports import format_seconds

_MOST = 3  # the lines of each kind


def describe_costs(costs: ProgramCosts) -> Iterator[str]:
    """Yields lines about what a program costs on each device, all from the compiler."""
    if memory := costs.memory:
        yield (
            f'memory of a device at its fullest: {bytes_str(memory.peak)}, of which arguments '
            f'{bytes_str(memory.arguments)}; the largest other arrays:'
        )
        for array in costs.at_peak.arrays[:_MOST]:
            several = f'{array.count} x ' if array.count > 1 else ''
            yield f'  {bytes_str(array.nbytes)}  {several}{array.array}{_at(array.source)}'
    if costs.compute_seconds is not None:
        yield (
            f'computation: {format_seconds(costs.compute_seconds)}, estimated without kernels and '
            'collectives; the slowest operations:'
        )
        for operation in costs.operations[:_MOST]:
            seconds = costs.compute_seconds * operation.cycles / costs.cycles
            yield f'  {format_seconds(seconds)}  {operation.kind}{_at(operation.source)}'
    for (network, axes, kind), size in costs.wire_table().items():
        over = f' over {", ".join(axes)}' if axes else ''
        yield f'each device sends {bytes_str(size)} per step: {kind}{over} ({network.upper()})'


def _at(source: str) -> str:
    return f', {os.path.basename(source)}' if source else ''
