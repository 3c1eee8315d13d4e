"""The compiled train step of a run, as files. Nothing is trained."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from meshwright import ProgramCosts, read_costs
from partitioning.amounts import bytes_str
from partitioning.hardware.compilers import own_compiler_errors
from partitioning.programs.partitioned_function import PartitionedCallable
from train.config import TrainConfig
from train.errors import os_errors_as
from train.gin.text import write_gin_text
from train.processes.activity import calling_compiler
from train.reporting.memory import check_fits, memory_advice
from train.reporting.reports import format_seconds
from train.running.programs import partition_train_step
from train.running.run import Run, prepare, report_run

LOWERED, COMPILED, MEMORY = 'train_step.stablehlo.txt', 'train_step.hlo.txt', 'memory.json'
COSTS = 'costs.json'
_MOST = 3  # the lines of each kind about the costs
# What jax's memory analysis of a program says, and its names here.
SIZES = {
    'arguments': 'argument_size_in_bytes',
    'outputs': 'output_size_in_bytes',
    'outputs_in_arguments': 'alias_size_in_bytes',
    'temporary': 'temp_size_in_bytes',
    'program': 'generated_code_size_in_bytes',
}


class CompiledStep(NamedTuple):
    """The train step of a run before and after the compiler, and what it costs on each device."""

    run: Run
    step: PartitionedCallable
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled
    costs: ProgramCosts


def compile_step(config: TrainConfig) -> CompiledStep:
    """Compiles the train step of a run, also for a described mesh.

    No array is created, and nothing is written. Raises a ConfigError or ValueError if a setting
    cannot be honoured, or if the devices have too little memory.
    """
    run = prepare(config)
    report_run(run)
    step, mesh = partition_train_step(run), config.partitioner.mesh
    with run.console.phase('compiling the train step'), calling_compiler():
        lowered = step.lower(run.plan.abstract_state, dict(run.batch))
        with memory_advice(run.plan, config.partitioner), own_compiler_errors('train_step', mesh):
            compiled = lowered.compile()
    return CompiledStep(run, step, lowered, compiled, read_costs(compiled, mesh))


def precompile(config: TrainConfig) -> dict[str, Any]:
    """Compiles the train step of a run, and writes its programs and its costs to `model_dir`.

    It writes `train_step.stablehlo.txt`, the program before the compiler; `train_step.hlo.txt`,
    the program of a device with its collectives; `memory.json`, what the compiler says about the
    memory of a device; `costs.json`, the fields of `meshwright.ProgramCosts`: estimated
    computation, collectives, and the largest arrays; and `precompile-plan.json`, the layout. No
    array is created, so the mesh may be a described one.

    Returns:
      The content of `memory.json`: sizes in bytes per device, and the devices.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured.
    """
    run, _, lowered, compiled, costs = compile_step(config)
    mesh = config.partitioner.mesh
    devices = [str(device) for device in mesh.devices.flat]  # the first is the first on every axis
    memory: dict[str, Any] = {'mesh': dict(mesh.shape), 'devices': devices}
    if (sizes := compiled.memory_analysis()) is not None:
        memory['bytes_per_device'] = {name: getattr(sizes, field) for name, field in SIZES.items()}
    files = {
        LOWERED: lowered.as_text(),
        COMPILED: compiled.as_text() or '',
        MEMORY: json.dumps(memory, indent=1) + '\n',
        COSTS: json.dumps(dataclasses.asdict(costs), indent=1) + '\n',
    }
    folder = run.directory
    with (
        run.console.phase('writing the programs'),
        os_errors_as(f'MODEL_DIR {folder} cannot be written:'),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            write_gin_text(folder, 'precompile.gin')
            for name, text in files.items():
                (folder / name).write_text(text)
            run.plan.save(folder / 'precompile-plan.json')
    for line in describe_costs(costs):
        run.console.say(line)
    run.console.files({name: folder / name for name in files})
    if mesh.devices.flat[0].platform != 'cpu':  # CPUs may stand for other devices
        check_fits(run.plan, config.partitioner, compiled)
    return memory


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
