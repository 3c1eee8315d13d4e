"""Reads the forecast of a program: its memory, exchanges with causes, FLOPs and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from meshwright.advice.advising import advise, next_to_compiled
from meshwright.advice.confirming import compile_variants
from meshwright.advice.figures import Measured, measure_costs
from meshwright.advice.needs import with_tried_changes
from meshwright.advice.searching import find_variants
from meshwright.advice.trials import Trials
from meshwright.calls.compiled_call import CompiledCall
from meshwright.calls.compiling import Program
from meshwright.calls.held import ROLES, HeldArray, free_axes
from meshwright.calls.target import Target, target_of_mesh
from meshwright.causes import Cause, explain_estimate, explain_program
from meshwright.jax_private import TracedCall
from meshwright.jaxpr import (
    MemoryEstimate,
    TracedProgram,
    estimate_memory,
    lay_out_trace,
)
from meshwright.program.collectives import Collective
from meshwright.program.costs import MemoryUse, ProgramCosts, read_costs, read_text
from meshwright.program.hlo_text import parse_hlo
from meshwright.program.peak_memory import LiveArray
from meshwright.program.products import count_dot_flops
from meshwright.report.forecasts import Compilation, Forecast, MemoryForecast, Replicated
from meshwright.report.plain_values import map_texts
from meshwright.time import Work, estimate_step_time, estimate_work, read_work
from meshwright.time.kernels import count_device_flops, find_kernel_work
from meshwright.time.layers import describe_layers
from meshwright.time.work import KernelWork
from meshwright.user_lines import shorten_sources
from partitioning.amounts import flops_str
from partitioning.mesh import axis_rings, find_placement
from partitioning.plan.audit import audit_rows
from partitioning.rules import LogicalAxisRules

_MORE = 1.1  # of an even share of the FLOPs: above it, devices compute the same
_MOST = 3  # changes that are compiled for what they save by formula
_LARGEST = 20  # how many buffers a forecast lists
# Which figures of a program for virtual CPU devices also hold for the machine of the forecast.
_STAND_IN = (
    'compiled for virtual CPU devices: the bytes of arguments are exact',
    'compiled for virtual CPU devices: temporaries and the peak were seen 12 to 43% higher than on '
    'TPUs; kernels that the model chooses by device are kernels for CPUs',
    'compiled for virtual CPU devices: exchanges of bfloat16 have twice their bytes, '
    'reduce-scatters appear as all-reduces, and there is no estimate of time',
)

_NO_TRACE = (
    'the function was compiled already, and has no trace: FLOPs are those that its compiler '
    'counts, exchanges have no causes, and there is no estimate of time'
)

Exchanges = tuple[tuple[Collective, Cause | None], ...]
Buffers = tuple[tuple[LiveArray, Cause | None], ...]


def describe_program(
    name: str,
    program: Program,
    target: Target,
    held: Sequence[HeldArray],
    rules: LogicalAxisRules = (),
    *,
    explain: bool = True,
    recompile: Callable[[TracedCall], Program] | None = None,
    thoroughly: bool = False,
    seconds: float = math.inf,
) -> Forecast:
    """The forecast of a program, without changes of settings and without what it took itself.

    Args:
      name: the name of the function.
      program: the function after tracing, or after compiling.
      target: its machine.
      held: the arrays of its arguments.
      rules: the logical axis rules under which it was traced.
      explain: whether to find the causes of exchanges and buffers.
      recompile: compiles the function with a change; None compiles no changes.
      thoroughly: whether to compile all changes that may help. If not, they are compiled until one
        helps.
      seconds: how long compiling changes may take.
    """
    costs = read_program(program, target)
    mesh, jaxpr = target.mesh, program.traced.jaxpr
    kernels = find_kernel_work(jaxpr, mesh.size)
    model_flops, program_flops = count_device_flops(jaxpr, mesh.size, kernels)
    repeated = tuple(_find_repeated(program, program_flops))
    laid_out = lay_out_trace(program.traced, mesh, target.slices or None)
    estimate = estimate_memory(laid_out, target.chip)
    work = _find_work(program, target, costs, laid_out, kernels)
    collectives, buffers = _explain(
        rules,
        target,
        program,
        costs,
        held,
        estimate,
        laid_out,
        recompile,
        explain=explain,
        seconds=seconds,
        until_first=not thoroughly,
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
        function=name,
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
        notes=(
            *_find_notes(program, target, used, memory.arguments),
            *repeated,
        ),
        compilation=Compilation(seconds=0.0, peak_rss=0),
        arrays=tuple(array.row for array in held),
        rings=() if target.is_stand_in else tuple(axis_rings(mesh)),
        placement=None if target.is_stand_in else find_placement(mesh),
    )


def describe_compiled(call: CompiledCall) -> Forecast:
    """The forecast of a program of which there is no trace: without causes, formulas and time."""
    target = target_of_mesh(call.mesh)
    costs = read_costs(call.compiled, call.mesh, target.slices)
    collectives = sorted(
        ((c, None) for c in costs.collectives), key=lambda pair: -pair[0].total_bytes
    )
    buffers = tuple((array, None) for array in costs.at_peak.arrays[:_LARGEST])
    roles: dict[str, Any] = {
        role: sum(a.nbytes for a in call.held if a.role == role) for role in ROLES
    }
    analysis = call.compiled.cost_analysis() or {}
    flops = float((analysis[0] if isinstance(analysis, list) else analysis).get('flops', 0.0))
    return Forecast(
        function=call.name,
        topology=target.topology,
        num_slices=target.num_slices,
        chip=target.chip,
        num_devices=call.mesh.size,
        mesh=dict(call.mesh.shape),
        back_end=target.back_end,
        back_end_version=target.version,
        memory=MemoryForecast(
            limit=None if target.chip is None else target.chip.hbm_bytes_per_device,
            peak=costs.memory.peak if costs.memory else costs.at_peak.nbytes,
            arguments=sum(array.nbytes for array in call.held),
            **roles,
            temporaries=costs.memory.temporaries if costs.memory else None,
            gradients=0,
            activations=0,
            analytic_peak=0,
            buffers=map_texts(buffers, shorten_sources),
            live=costs.at_peak.nbytes,
        ),
        model_flops=flops,
        program_flops=flops,
        time=None,
        collectives=map_texts(tuple(collectives), shorten_sources),
        replicated=_replicated(call.held, call.mesh),
        warnings=(),
        notes=(_NO_TRACE,),
        compilation=Compilation(seconds=0.0, peak_rss=0),
        arrays=tuple(array.row for array in call.held),
        rings=tuple(axis_rings(call.mesh)),
        placement=find_placement(call.mesh),
    )


def read_program(program: Program, target: Target) -> ProgramCosts | None:
    """The costs of the compiled program, or None if there is no program."""
    if program.compiled is None:
        return None
    return read_costs(program.compiled, target.mesh, target.slices)


def _explain(
    rules: LogicalAxisRules,
    target: Target,
    program: Program,
    costs: ProgramCosts | None,
    held: Sequence[HeldArray],
    estimate: MemoryEstimate,
    laid_out: TracedProgram,
    recompile: Callable[[TracedCall], Program] | None,
    *,
    explain: bool,
    seconds: float,
    until_first: bool,
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
        'rules': rules,
    }
    if costs is None or program.compiled is None:
        return (), explain_estimate(estimate, laid_out, **known)[:_LARGEST]
    text = read_text(program.compiled)
    explained = explain_program(text, program.traced.jaxpr, costs, mesh=target.mesh, **known)
    advised = find_variants(
        program.traced,
        laid_out,
        known['rows'],
        explained,
        target.mesh,
        chip=target.chip,
        memory=estimate,
    )
    if recompile is not None:

        def measure(call: TracedCall) -> tuple[Measured | None, float]:
            again = recompile(call)
            found = read_program(again, target)
            time = None if found is None else _seconds(again, target, found)
            return None if found is None else measure_costs(found, time), again.seconds

        before = measure_costs(costs, _seconds(program, target, costs))
        trials = Trials(measure, program.seconds, seconds)
        advised = compile_variants(
            explained, advised, before, trials, _MOST, until_first=until_first
        )
    told = advise(explained, advised)
    if costs.memory is not None:
        told = next_to_compiled(told, costs.memory.peak)
    return told, with_tried_changes(explained.buffers, told)


def _seconds(program: Program, target: Target, costs: ProgramCosts) -> float | None:
    """The forecast time of a compiled program; None if the chip has no model."""
    if target.chip is None or target.is_stand_in:
        return None
    work = read_work(costs, program.traced.jaxpr, target.mesh.size)
    time = estimate_step_time(work, target.mesh)
    return None if time is None else time.seconds


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
    layers = describe_layers(laid_out)
    if costs is None:
        return estimate_work(laid_out, target.chip, kernels, layers)
    return read_work(costs, program.traced.jaxpr, target.mesh.size, kernels, layers)


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


def _find_repeated(program: Program, shared_flops: float) -> Iterator[str]:
    """What devices multiply in addition to an even share, because several compute the same."""
    if program.compiled is None:
        return
    flops = count_dot_flops(parse_hlo(read_text(program.compiled)))
    if flops is not None and flops > _MORE * shared_flops:
        yield (
            f'as compiled, a device multiplies {flops_str(flops)}, and not the even share of '
            f'{flops_str(shared_flops)}: several devices compute the same, or parts are padded'
        )
