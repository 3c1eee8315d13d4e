"""Forecasts what a partitioned function needs on a machine that need not be available."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from meshwright.calls.compiling import (
    Program,
    Progress,
    compile_traced,
    peak_rss,
    trace,
)
from meshwright.calls.held import ROLES, HeldArray, find_held, free_axes
from meshwright.calls.moving import move_arguments, move_function, move_partitioner
from meshwright.calls.partitioned import Call, PartitionedLike, PartitionerLike
from meshwright.calls.target import (
    Target,
    target_of_mesh,
    target_of_topology,
    version_of,
)
from meshwright.causes import Cause, explain_estimate, explain_program
from meshwright.changes import SettingChange, list_general_changes, rank_changes
from meshwright.jaxpr import (
    MemoryEstimate,
    TracedProgram,
    estimate_memory,
    lay_out_trace,
)
from meshwright.program.collectives import Collective
from meshwright.program.costs import MemoryUse, ProgramCosts, read_costs, read_text
from meshwright.program.peak_memory import LiveArray
from meshwright.report.forecasts import Compilation, Forecast, MemoryForecast, Replicated
from meshwright.report.plain_values import map_texts
from meshwright.time import Work, estimate_step_time, estimate_work, read_work
from meshwright.time.kernels import count_device_flops, find_kernel_work
from meshwright.time.work import KernelWork
from meshwright.user_lines import shorten_sources
from partitioning.hardware import OptionValue, check_flags, parse_topology
from partitioning.mesh import axis_rings, find_placement
from partitioning.plan.audit import audit_rows

_LARGEST = 20  # how many buffers a forecast lists
# Which figures of a program for virtual CPU devices also hold for the machine of the forecast.
_STAND_IN = (
    'compiled for virtual CPU devices: the bytes of arguments and the FLOPs are exact',
    'compiled for virtual CPU devices: temporaries and the peak were seen 12 to 43% higher than on '
    'TPUs; kernels that the model chooses by device are kernels for CPUs',
    'compiled for virtual CPU devices: exchanges of bfloat16 have twice their bytes, '
    'reduce-scatters appear as all-reduces, and there is no estimate of time',
)

Exchanges = tuple[tuple[Collective, Cause | None], ...]
Buffers = tuple[tuple[LiveArray, Cause | None], ...]


def forecast(
    partitioner: PartitionerLike,
    fn: PartitionedLike,
    *abstract_args: Any,
    topology: str | None = None,
    num_slices: int = 1,
    axes: Mapping[str, int] | None = None,
    compile: bool = True,
    compiler_options: Mapping[str, OptionValue] | None = None,
    on_cpu: bool = False,
    changes: Sequence[SettingChange] | None = (),
    confirm: bool = False,
    explain: bool = True,
    on_program: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Forecasts a call of a partitioned function: memory, exchanged data, FLOPs and time.

    Nothing is allocated. A function that needs too much memory is an answer and not an error.

    Usage:
      step = partitioner.partition(train_step, (plan.specs, data_spec), (plan.specs, None))
      found = forecast(partitioner, step, plan.abstract_state, batch, topology='v5p:4x4x4')
      print(forecast_table([found]))

    Args:
      partitioner: the partitioner of the function.
      fn: what `partitioner.partition` returned.
      *abstract_args: the arguments of a call, as ShapeDtypeStructs, arrays or static values.
      topology: a machine, such as 'v5p:4x4x4', 'v5p-128' or 'h100:2x8', to which the function is
        moved; by default, the machine of the partitioner's mesh. The mesh has the same axes there.
      num_slices: the number of slices of `topology`.
      axes: the sizes of the mesh axes on `topology`, such as {'data': -1, 'model': 8}, if they
        differ from the partitioner's mesh.
      compile: whether to compile. If not, all figures are computed by formula, within seconds.
      compiler_options: options of the compiler in addition to the function's own.
      on_cpu: whether to compile for virtual CPU devices in place of the machine. This happens in
        any case if the compiler of the machine is not installed.
      changes: changes to try if the function does not fit, in addition to a smaller batch and
        more devices. None tries nothing.
      confirm: whether to compile the changes that fit by formula, until the compiler confirms one.
      explain: whether to find the causes of exchanges and buffers.
      on_program: receives the text of the compiled program, if there is one.
      progress: receives a text when a stage begins.

    Raises:
      ValueError: if the machine is not known, if the mesh or the layouts do not fit it, if an
        argument does not fit the function, if the compiler of the machine does not accept a flag of
        the environment, or if that compiler is too new for jaxlib to read its program.
    """
    say = progress or (lambda text: None)
    started = time.perf_counter()
    call = Call(partitioner, fn, abstract_args)
    if topology is None:
        target = target_of_mesh(partitioner.mesh)
        call = dataclasses.replace(call, args=move_arguments(abstract_args, target.mesh))
    else:
        say(f'describing {topology}')
        if compile and not on_cpu:
            check_flags(parse_topology(topology)[0].platform)
        source = partitioner.mesh_source  # may need more devices than there are
        target = target_of_topology(
            topology, source, num_slices=num_slices, axes=axes, on_cpu=on_cpu
        )
        call = _move(call, source, target)
        compiler_options = None if target.is_stand_in else compiler_options
    say(f'tracing {call.name}')
    program = trace(call.fn, call.args)
    held = find_held(call.boundary, call.args, call.partitioner)
    if compile:
        say(f'compiling {call.name} for {target.topology} with {target.version}')
        program = compile_traced(program, call.name, target.mesh, compiler_options)
    else:
        target = dataclasses.replace(target, back_end='none', version=version_of('none'))
    if on_program is not None and program.compiled is not None:
        on_program(read_text(program.compiled))
    result = _assemble(call, target, program, held, explain=explain)
    if result.fits is False and target.chip is not None and changes is not None:
        limit = result.memory.limit or 0
        general = list_general_changes(call, held, result.memory.gradients, target.chip, limit)
        compile_peak = functools.partial(_compile_peak, options=compiler_options)
        ranked = rank_changes(
            [*changes, *general],
            target.chip,
            limit,
            compile_peak=compile_peak if confirm else None,
            progress=progress,
        )
        result = dataclasses.replace(result, changes=ranked)
    taken = Compilation(seconds=time.perf_counter() - started, peak_rss=peak_rss())
    return dataclasses.replace(result, compilation=taken)


def _move(call: Call, source: Any, target: Target) -> Call:
    partitioner = move_partitioner(call.partitioner, target.mesh)
    with_options = not target.is_stand_in
    fn = move_function(partitioner, call.fn, source, with_options=with_options)
    return Call(partitioner, fn, move_arguments(call.args, target.mesh))


def _compile_peak(call: Call, options: Mapping[str, OptionValue] | None) -> int:
    """The peak memory of a call according to the compiler, in bytes."""
    target = target_of_mesh(call.partitioner.mesh)
    program = compile_traced(trace(call.fn, call.args), call.name, target.mesh, options)
    if program.out_of_memory is not None:
        return program.out_of_memory.needed
    costs = _read(program, target)
    assert costs is not None and costs.memory is not None
    return costs.memory.peak


def _assemble(
    call: Call, target: Target, program: Program, held: Sequence[HeldArray], *, explain: bool
) -> Forecast:
    """The forecast of a program, without suggested changes and compilation figures."""
    costs = _read(program, target)
    mesh, jaxpr = target.mesh, program.traced.jaxpr
    kernels = find_kernel_work(jaxpr)
    model_flops, program_flops = count_device_flops(jaxpr, mesh.size, kernels)
    laid_out = lay_out_trace(program.traced, call.args, mesh, target.slices or None)
    estimate = estimate_memory(laid_out, target.chip)
    work = _find_work(program, target, costs, laid_out, kernels)
    collectives, buffers = _explain(
        call, target, program, costs, held, estimate, laid_out, explain=explain
    )
    if costs is None and work is not None:
        collectives = tuple((c, None) for c in work.collectives)
    collectives = tuple(
        sorted(collectives, key=lambda c: (-c[0].total_bytes, c[0].kind, c[0].instruction))
    )
    buffers = map_texts(buffers, shorten_sources)
    memory = _memory(program, target, costs, held, estimate, buffers)
    used = costs.memory if costs else None
    return Forecast(
        function=call.name,
        topology=target.topology,
        num_slices=target.num_slices,
        chip=target.chip,
        num_devices=mesh.size,
        mesh=dict(mesh.shape),
        back_end=target.back_end,
        back_end_version=target.version,
        memory=memory,
        model_flops=model_flops,
        program_flops=program_flops,
        time=None if work is None else estimate_step_time(work, mesh),
        collectives=map_texts(collectives, shorten_sources),
        replicated=_replicated(held, mesh),
        warnings=map_texts(program.warnings, shorten_sources),
        notes=tuple(_find_notes(program, target, used, memory.arguments)),
        compilation=Compilation(seconds=0.0, peak_rss=0),
        arrays=tuple(array.row for array in held),
        rings=() if target.is_stand_in else tuple(axis_rings(mesh)),
        placement=None if target.is_stand_in else find_placement(mesh),
    )


def _read(program: Program, target: Target) -> ProgramCosts | None:
    """The costs of the compiled program, or None if there is no program."""
    if program.compiled is None:
        return None
    return read_costs(program.compiled, target.mesh, target.slices)


def _explain(
    call: Call,
    target: Target,
    program: Program,
    costs: ProgramCosts | None,
    held: Sequence[HeldArray],
    estimate: MemoryEstimate,
    laid_out: TracedProgram,
    *,
    explain: bool,
) -> tuple[Exchanges, Buffers]:
    """The exchanges of a compiled program and its largest buffers, each with its cause if asked.

    Without a program there are no exchanges, and the buffers are by formula.
    """
    if not explain:
        exchanges = costs.collectives if costs else ()
        largest = (costs.at_peak.arrays if costs else estimate.buffers)[:_LARGEST]
        return tuple((c, None) for c in exchanges), tuple((array, None) for array in largest)
    known: dict[str, Any] = {
        'rows': [array.row for array in held],
        'rules': call.partitioner.logical_axis_rules,
    }
    if costs is None or program.compiled is None:
        return (), explain_estimate(estimate, laid_out, **known)[:_LARGEST]
    text = read_text(program.compiled)
    explained = explain_program(text, program.traced.jaxpr, costs, mesh=target.mesh, **known)
    return explained.collectives, explained.buffers


def _memory(
    program: Program,
    target: Target,
    costs: ProgramCosts | None,
    held: Sequence[HeldArray],
    estimate: MemoryEstimate,
    buffers: Buffers,
) -> MemoryForecast:
    roles = {role: sum(a.nbytes for a in held if a.role == role) for role in ROLES}
    arguments = sum(roles.values())
    limit = None if target.chip is None else target.chip.hbm_bytes_per_device
    use: MemoryUse | None = costs.memory if costs else None
    peak = estimate.peak if use is None else use.peak
    if (exceeded := program.out_of_memory) is not None:
        peak, limit = exceeded.needed, exceeded.available
    return MemoryForecast(
        limit=limit,
        peak=peak,
        arguments=arguments,
        **roles,
        temporaries=None if use is None else use.temporaries,
        gradients=estimate.gradients,
        activations=estimate.activations,
        analytic_peak=estimate.peak,
        buffers=buffers,
        live=costs.at_peak.nbytes if costs else None,
        buffers_from='jaxpr' if costs is None else 'compiler',
    )


def _replicated(held: Sequence[HeldArray], mesh: Mesh) -> tuple[Replicated, ...]:
    """The arrays that are replicated along some mesh axes, the largest first."""
    costs = audit_rows([array.row for array in held], mesh).replicated if held else ()
    why = {cost.row.path: cost.reason.partition(': ')[2] for cost in costs}
    found = [
        Replicated(
            path=array.row.path,
            nbytes=array.nbytes,
            axes=free_axes(array.row, mesh),
            reason=why[array.row.path],
        )
        for array in held
        if array.row.path in why and array.nbytes
    ]
    return tuple(sorted(found, key=lambda r: (-r.nbytes, r.path)))


def _find_work(
    program: Program,
    target: Target,
    costs: ProgramCosts | None,
    laid_out: TracedProgram,
    kernels: Sequence[KernelWork],
) -> Work | None:
    """The work of a device, from the compiled program, or by formula if nothing was compiled.

    None if the chip is not known, if CPU devices stand in for it, or if its compiler failed.
    """
    if target.chip is None or target.is_stand_in or program.out_of_memory is not None:
        return None
    if costs is None:
        return estimate_work(laid_out, target.chip, kernels)
    return read_work(costs, program.traced.jaxpr, target.mesh.size, kernels)


def _find_notes(
    program: Program, target: Target, memory: MemoryUse | None, argument_bytes: int
) -> Iterator[str]:
    """What a reader must know about the figures, such as which of them are exact."""
    if target.chip is None:
        yield (
            f'no data about {target.topology} devices: their memory limit and their speed are not '
            'known'
        )
    if target.is_stand_in and program.compiled is not None:
        yield from _STAND_IN
    if program.out_of_memory is not None:
        yield (
            'the compiler made no program, because the memory does not suffice: the buffers are '
            'by formula, and exchanges and time are not known'
        )
    if memory is not None and (difference := memory.arguments - argument_bytes):
        more = difference > 0
        why = (
            'it pads arrays to whole tiles of the chip'
            if more
            else 'it leaves out arguments that the function does not use'
        )
        yield (
            f'the program holds {abs(difference):,} bytes of arguments '
            f'{"more" if more else "less"} than their layouts say: {why}'
        )
