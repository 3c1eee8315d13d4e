"""Changes with which a run that does not fit into a machine may fit, the least drastic first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax.numpy as jnp

from meshwright import Forecast
from meshwright.calls.call import Call
from meshwright.calls.partitioned_call import PartitionedCall
from meshwright.changes import SettingChange
from partitioning.hardware import chip_of
from train.models.remat import Remat
from train.planning.candidates import (
    Candidate,
    RunSizes,
    change_run,
    sizes_of,
)
from train.planning.forecasts import PlannedStep, plan_step
from train.planning.gin_text import list_bindings, list_includes
from train.planning.machines import Machine
from train.planning.presets import Layout
from train.planning.space import Choices, list_space
from train.running.rematerialization import find_model_config

_CHUNKS = 16
_MOST_TENSOR = 8
_AS_IT_IS = Layout('')


def list_changes(planned: PlannedStep, machine: Machine) -> Iterator[SettingChange]:
    """Yields settings that can make a run fit into a machine, the least drastic first."""
    config, plan = planned.run.config, planned.run.plan
    mesh = config.partitioner.mesh
    remat = getattr(find_model_config(config.objective), 'remat', None)
    recomputed = remat in ('full', Remat())
    sizes = sizes_of(config, mesh.size, machine.num_slices)
    candidates = list(_list_presets(sizes, recomputed))
    chip = chip_of(mesh.devices.flat[0].device_kind)
    parameters = [row for row in plan.rows if row.role == 'parameters']
    # The gradients are at least in bfloat16.
    gradients = sum(2 * r.bytes_per_device // jnp.dtype(r.dtype).itemsize for r in parameters)
    if chip is None or plan.bytes_per_device + gradients < chip.hbm_bytes_per_device:
        same_layout = _list_settings(sizes, config.num_microbatches, recomputed)
        candidates = [*same_layout, *candidates]

    def call(candidate: Candidate) -> Call:
        step = plan_step(change_run(config, candidate, machine))
        return PartitionedCall(step.step, step.arguments)

    for candidate in candidates:
        setting = '; '.join([*list_includes(candidate), *list_bindings(candidate, sizes)])
        yield SettingChange(setting, functools.partial(call, candidate))


def keep_helpful(forecast: Forecast) -> Forecast:
    """Returns a forecast without the changes that save no memory, the best of the others first."""
    peak = forecast.memory.analytic_peak
    kept = [one for one in forecast.changes if one.fits or one.peak < peak]
    ordered = sorted(kept, key=lambda one: (not one.fits, one.peak))
    return dataclasses.replace(forecast, changes=tuple(ordered))


def _list_settings(sizes: RunSizes, num_microbatches: int, recomputed: bool) -> Iterator[Candidate]:
    """Settings that leave the layout as it is. They help only if a device can hold the state."""
    if sizes.model and not recomputed:
        yield Candidate(layout=_AS_IT_IS, remat='full')
    if sizes.model:
        yield Candidate(layout=_AS_IT_IS, remat='offload')
    if sizes.output:
        yield Candidate(layout=_AS_IT_IS, output_chunks=_CHUNKS)
    for factor in (2, 4):
        yield Candidate(layout=_AS_IT_IS, num_microbatches=num_microbatches * factor)


def _list_presets(sizes: RunSizes, recomputed: bool) -> Iterator[Candidate]:
    """One layout of each preset that divides the run."""
    if not sizes.model:
        return
    found = [one.layout for one in list_space(sizes, Choices.of_layouts()).candidates]
    for preset in ('fsdp', 'fsdp_tensor', 'few_kv_heads'):
        fitting = [x for x in found if x.preset == preset]
        small = [x for x in fitting if dict(x.sizes).get('NUM_PARTITIONS', 1) <= _MOST_TENSOR]
        for layout in (small or fitting)[-1:]:
            yield Candidate(layout=layout)
            if not recomputed:
                yield Candidate(layout=layout, remat='full')
