"""Settings of a run with which its step needs less memory, as lines of gin files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from partitioning.aot import Forecast
from partitioning.aot.remedies import Alternative, Call
from train.forecasting import Machine, PlannedStep, plan_on
from train.searching import Candidate, Choices, Layout, RunSizes, list_space
from train.searching.gin_file import bindings_of, files_of
from train.searching.predicting import Source, read_config
from train.searching.run_sizes import sizes_of

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
    for candidate in _list_candidates(sizes, config.num_microbatches):
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


def _list_candidates(sizes: RunSizes, num_microbatches: int) -> Iterator[Candidate]:
    """The settings to try, in addition to a smaller batch and more devices."""
    if sizes.model:
        yield Candidate(layout=_AS_IT_IS, remat='full')
        yield Candidate(layout=_AS_IT_IS, remat='offload')
    if sizes.output:
        yield Candidate(layout=_AS_IT_IS, output_chunks=_CHUNKS)
    for factor in (2, 4):
        yield Candidate(layout=_AS_IT_IS, num_microbatches=num_microbatches * factor)
    for layout in _list_presets(sizes):
        yield Candidate(layout=layout)
        if sizes.model:
            yield Candidate(layout=layout, remat='full')


def _list_presets(sizes: RunSizes) -> Iterator[Layout]:
    """One layout of each preset that divides the run."""
    if not sizes.model:
        return
    only = Choices(num_microbatches=(1,), remats=('full',), output_chunks=(None,))
    found = [candidate.layout for candidate in list_space(sizes, only).candidates]
    for preset in ('fsdp', 'fsdp_tensor', 'few_kv_heads'):
        fitting = [x for x in found if x.preset == preset]
        small = [x for x in fitting if dict(x.sizes).get('NUM_PARTITIONS', 1) <= _MOST_TENSOR]
        yield from (small or fitting)[-1:]
