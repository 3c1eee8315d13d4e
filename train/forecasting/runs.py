"""The forecast of a run on a machine that is not here."""

from __future__ import annotations

import resource
import time

from partitioning.aot import read_costs
from partitioning.aot.report import BackEnd, Compilation, Forecast, MemoryForecast
from partitioning.aot.traced.flops import count_flops
from partitioning.hardware import chip_of
from partitioning.programs.memory_limits import needed_memory
from train.config import TrainConfig
from train.forecasting.machines import Machine, move_to
from train.forecasting.step import PlannedStep, plan_step
from train.steps import make_eval_step


def forecast_run(config: TrainConfig, machine: Machine) -> Forecast:
    """Compiles the train step of a run for a machine. No data is opened, and no array is created.

    Args:
      config: the settings of the run. Its mesh is moved to the machine.
      machine: the machine, as `parse_machine` returns it.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured there.
    """
    planned = plan_step(move_to(config, machine))
    return _forecast(planned, machine)


def _forecast(planned: PlannedStep, machine: Machine) -> Forecast:
    run, mesh = planned.run, planned.run.config.partitioner.mesh
    started = time.monotonic()
    compiled = planned.step.lower(*planned.arguments).compile()
    costs = read_costs(compiled, mesh)
    device = mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    sizes = {'parameters': 0, 'optimizer': 0, 'other': 0}
    for row in run.plan.rows:
        sizes[row.role] += row.bytes_per_device
    assert costs.memory is not None
    memory = MemoryForecast(
        limit=chip.hbm_bytes_per_device if chip else None,
        peak=needed_memory(compiled, mesh),
        arguments=costs.memory.arguments,
        parameters=sizes['parameters'],
        optimizer=sizes['optimizer'],
        batch=costs.memory.arguments - sum(sizes.values()),
        other=sizes['other'],
        temporaries=costs.memory.temporaries,
        gradients=0,
        activations=0,
        analytic_peak=0,
        buffers=tuple((array, None) for array in costs.at_peak.arrays),
    )
    forward = make_eval_step(run.config.objective)
    state = run.plan.abstract_state
    flops = 3 * count_flops(forward, state.params, state.flax_mutables, dict(run.batch))
    back_end: BackEnd = device.platform
    return Forecast(
        function='train_step',
        topology=machine.topology,
        num_slices=machine.num_slices,
        chip=chip,
        num_devices=mesh.size,
        mesh=dict(mesh.shape),
        back_end=back_end,
        back_end_version='',
        memory=memory,
        model_flops=flops / mesh.size,
        program_flops=flops / mesh.size,
        time=None,
        collectives=tuple((one, None) for one in costs.collectives),
        replicated=(),
        warnings=(),
        notes=(),
        compilation=Compilation(
            seconds=time.monotonic() - started,
            peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        ),
    )
