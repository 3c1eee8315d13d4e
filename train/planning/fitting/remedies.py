"""Settings of a run with which its step needs less memory, as lines of gin files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from meshwright import Forecast
from meshwright.remedies import Alternative, Call
from partitioning.hardware import chip_of
from train.config import TrainConfig
from train.planning.forecasting import Machine, PlannedStep, plan_on
from train.planning.searching import Candidate, Choices, Layout, RunSizes, list_space
from train.planning.searching.gin_file import bindings_of, files_of
from train.planning.searching.predicting import Source, read_config
from train.planning.searching.run_sizes import sizes_of

_CHUNKS = 16
_MOST_TENSOR = 8
_AS_IT_IS = Layout('')


def list_remedies(source: Source, machine: Machine, planned: PlannedStep) -> Iterator[Alternative]:
    """Yields settings that can make a run fit into a machine, the least drastic first.

    Args:
      source: the gin settings of the run.
      machine: the machine.
      planned: the step that does not fit.
    """
    config = planned.run.config
    sizes = sizes_of(config, config.partitioner.mesh.size, machine.num_slices)
    candidates = list(_list_presets(sizes, _is_recomputed(config)))
    limit = _memory_limit(planned)
    if limit is None or _least_state(planned) < limit:
        same_layout = _list_settings(sizes, config.num_microbatches, _is_recomputed(config))
        candidates = [*same_layout, *candidates]
    for candidate in candidates:
        lines = bindings_of(candidate, sizes)
        files = files_of(candidate)
        setting = '; '.join([*(f'include {file!r}' for file in files), *lines])
        changed = dataclasses.replace(
            source, files=[*source.files, *files], bindings=[*source.bindings, *lines]
        )

        def build(changed: Source = changed) -> Call:
            step = plan_on(machine, lambda: read_config(changed, machine))
            return Call(step.run.config.partitioner, step.step, step.arguments)

        yield Alternative(setting, build)


def helping(forecast: Forecast) -> Forecast:
    """Returns a forecast without the remedies that save no memory, the best of the others first."""
    peak = forecast.memory.analytic_peak
    kept = [one for one in forecast.remedies if one.fits or one.peak < peak]
    ordered = sorted(kept, key=lambda one: (not one.fits, one.peak))
    return dataclasses.replace(forecast, remedies=tuple(ordered))


def _is_recomputed(config: TrainConfig) -> bool:
    """Whether the layers of a model recompute everything already."""
    model = getattr(getattr(config.objective, 'model', None), 'config', None)
    return getattr(model, 'remat', None) == 'full'


def _least_state(planned: PlannedStep) -> int:
    """The state and its gradients on a device, in bytes, if these are in bfloat16."""
    rows = [row for row in planned.run.plan.rows if row.role == 'parameters']
    gradients = sum(2 * row.bytes_per_device // jnp.dtype(row.dtype).itemsize for row in rows)
    return planned.run.plan.bytes_per_device + gradients


def _memory_limit(planned: PlannedStep) -> int | None:
    """What a program can use on a device of the machine, in bytes, if it is known."""
    chip = chip_of(planned.run.config.partitioner.mesh.devices.flat[0].device_kind)
    return None if chip is None else chip.hbm_bytes_per_device


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
    only = Choices(num_microbatches=(1,), remats=('full',), output_chunks=(None,))
    found = [candidate.layout for candidate in list_space(sizes, only).candidates]
    for preset in ('fsdp', 'fsdp_tensor', 'few_kv_heads'):
        fitting = [x for x in found if x.preset == preset]
        small = [x for x in fitting if dict(x.sizes).get('NUM_PARTITIONS', 1) <= _MOST_TENSOR]
        for layout in (small or fitting)[-1:]:
            yield Candidate(layout=layout)
            if not recomputed:
                yield Candidate(layout=layout, remat='full')
