"""Forecasts the memory, exchanges and time of a jitted function on any machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.calls.call import Call
from meshwright.calls.compiled_call import check_no_trace_needed, is_compiled, read_compiled
from meshwright.calls.compiling import Program, Progress, compile_traced, peak_rss
from meshwright.calls.target import Target, target_of_mesh
from meshwright.changes import SettingChange, list_general_changes, rank_changes
from meshwright.describing import describe_compiled, describe_program, read_program
from meshwright.examining import Examined, examine
from meshwright.findings.program_findings import with_findings
from meshwright.jax_private import TracedCall
from meshwright.report.forecasts import Compilation, Forecast
from partitioning.hardware import OptionValue
from partitioning.tracebacks import hide_own_frames

_SECONDS = 60  # for changes that are compiled unasked


@hide_own_frames
def forecast(
    fn: Any,
    *args: Any,
    topology: str | None = None,
    num_slices: int = 1,
    axes: Mapping[str, int] | None = None,
    compile: bool = True,
    compiler_options: Mapping[str, OptionValue] | None = None,
    on_cpu: bool = False,
    changes: Sequence[SettingChange] | None = (),
    confirm: bool | None = None,
    seconds: float | None = None,
    explain: bool = True,
    on_program: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Forecasts a call of a function: memory, exchanged data, FLOPs and time.

    Nothing is allocated. A function that needs too much memory is an answer and not an error.

    Usage:
      mesh = jax.make_mesh((4, 2), ('data', 'model'))
      batch = jax.ShapeDtypeStruct((64, 128), 'float32', sharding=NamedSharding(mesh, P('data')))
      found = forecast(jax.jit(train_step), state, batch, topology='v5p:4x4x4', axes={'data': -1})
      print(forecast_table([found]))

    Args:
      fn: the function: what `jax.jit`, `nnx.jit`, `eqx.filter_jit` or `partitioner.partition`
        returned, or what its `trace`, `lower(...)` or `lower(...).compile()` returned. What is
        lowered or compiled stays on its machine, and has no trace: its exchanges have lines and no
        causes, and its time is not known.
      *args: the arguments of a call, as ShapeDtypeStructs, arrays or static values; none for a
        function that is traced, lowered or compiled already. Their shardings may be on devices that
        are here, on virtual or described ones, or on an AbstractMesh.
      topology: a machine, such as 'v5p:4x4x4', 'v5p-128' or 'h100:2x8', to which the function is
        moved; by default, the machine of the mesh of the function. The mesh has the same axes
        there.
      num_slices: the number of slices of `topology`.
      axes: the sizes of the mesh axes on `topology`, such as {'data': -1, 'model': 8}, if they
        differ from the mesh of the function.
      compile: whether to compile. If not, all figures are computed by formula, within seconds.
      compiler_options: options of the compiler in addition to the function's own.
      on_cpu: whether to compile for virtual CPU devices in place of the machine. This happens in
        any case if the compiler of the machine is not installed.
      changes: changes to try if the function does not fit, in addition to a smaller batch and
        more devices. None tries nothing.
      confirm: whether to compile changes: settings that fit by formula, until the compiler confirms
        one, and the three changes of layouts with which devices send least by formula. By default,
        changes of layouts are compiled until one helps.
      seconds: how long compiling changes may take, without waiting for other processes: 60 by
        default, and without end if `confirm` is True. Changes that would take longer, by the time
        of the function itself, are told as not tried.
      explain: whether to find the causes of exchanges and buffers.
      on_program: receives the text of the compiled program, if there is one.
      progress: receives a text when a stage begins.

    Raises:
      ValueError: if the machine is not known, if the mesh or the layouts do not fit it, if an
        argument does not fit the function, if the compiler of the machine does not accept a flag of
        the environment, or if that compiler is too new for jaxlib to read its program.
    """
    started = time.perf_counter()
    if is_compiled(fn):
        check_no_trace_needed(fn, args, topology=topology, axes=axes, compile=compile)
        result = describe_compiled(read_compiled(fn))
    else:
        examined = examine(
            fn,
            args,
            topology=topology,
            num_slices=num_slices,
            axes=axes,
            compile=compile,
            compiler_options=compiler_options,
            on_cpu=on_cpu,
            on_program=on_program,
            progress=progress,
        )
        result = forecast_examined(
            examined,
            changes=changes,
            confirm=confirm,
            seconds=seconds,
            explain=explain,
            progress=progress,
        )
    taken = Compilation(seconds=time.perf_counter() - started, peak_rss=peak_rss())
    return dataclasses.replace(result, compilation=taken)


def forecast_examined(
    examined: Examined,
    *,
    changes: Sequence[SettingChange] | None = (),
    confirm: bool | None = None,
    seconds: float | None = None,
    explain: bool = True,
    progress: Progress | None = None,
) -> Forecast:
    """The forecast of a call that was traced or compiled, without what it took itself.

    Args:
      examined: the call.
      changes, confirm, seconds, explain, progress: as for `forecast`.
    """
    call, target, held = examined.call, examined.target, examined.held
    say, options = progress or (lambda text: None), examined.compiler_options
    with _without_garbage_collection():
        result = describe_program(
            call.name,
            examined.program,
            target,
            held,
            call.rules,
            explain=explain,
            recompile=_recompile(call.name, target, options, say) if confirm is not False else None,
            thoroughly=bool(confirm),
            seconds=_time_for_changes(confirm, seconds),
        )
        traced = examined.program.traced
        result = with_findings(result, traced, target.mesh, held, examined.results)
    if result.fits is False and target.chip is not None and changes is not None:
        limit = result.memory.limit or 0
        general = list_general_changes(call, held, result.memory.gradients, target.chip, limit)
        compile_peak = functools.partial(_compile_peak, options=examined.compiler_options)
        ranked = rank_changes(
            [*changes, *general],
            target.chip,
            limit,
            compile_peak=compile_peak if confirm else None,
            progress=progress,
        )
        result = dataclasses.replace(result, changes=ranked)
    return result


def _time_for_changes(confirm: bool | None, seconds: float | None) -> float:
    if seconds is None:
        return math.inf if confirm else _SECONDS
    if not seconds >= 0:
        raise ValueError(f'seconds={seconds} must be at least 0, which compiles no change')
    return seconds


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Reads a program inside without Python's search for cycles, a fifth of the time of reading.

    What is read makes many objects, nearly all of which are in use until the end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _recompile(
    name: str, target: Target, options: Mapping[str, OptionValue] | None, say: Progress
) -> Callable[[TracedCall], Program]:
    """Compiles a changed function as the forecast compiled the function itself."""

    def recompile(traced: TracedCall) -> Program:
        say(f'compiling {name} with a change')
        return compile_traced(Program(traced=traced), name, target.mesh, options)

    return recompile


def _compile_peak(call: Call, options: Mapping[str, OptionValue] | None) -> int:
    """The peak memory of a call according to the compiler, in bytes."""
    target = target_of_mesh(call.mesh)
    program = compile_traced(Program(traced=call.trace()), call.name, target.mesh, options)
    if program.out_of_memory is not None:
        return program.out_of_memory.needed
    costs = read_program(program, target)
    assert costs is not None and costs.memory is not None
    return costs.memory.peak
