"""Dry-runs a script, and stores what the compiler says about its largest training step.

    python -m benchmarks.measured_steps.recording TOPOLOGY STORE/NAME MODE -- python -m module

It is `meshwright dry`, with a record in place of a report. The record is two files: NAME.json, with
the forecast and all that is counted in the traced step, and NAME.hlo.txt.gz, the compiled text. A
step that does not fit has no text.

The mode 'whole' is what `meshwright dry` does. With 'early', the process ends before the compiler
of TPUs generates code, which takes most of the time, see `early`; the text has no estimated cycles
then. With 'traced', it ends before the step is compiled, and everything is by formula.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
from jax.sharding import Mesh, Sharding

from benchmarks.campaigns import package_versions
from meshwright import jax_private
from meshwright.calls.target import target_of_mesh
from meshwright.dry.command import check
from meshwright.dry.compiling import CompiledFunction, Compiling
from meshwright.dry.machine import Machine
from meshwright.dry.reporting import find_steps, forecast_function, mesh_of
from meshwright.dry.script import DryRun, Script, run_script
from meshwright.jax_private import TracedCall
from meshwright.jaxpr import estimate_memory, lay_out_trace
from meshwright.program.costs import mesh_axes, read_memory, read_text
from meshwright.report.answers import answer_of
from meshwright.report.plain_values import to_plain
from meshwright.time import estimate_work, find_kernel_work
from meshwright.time.layers import describe_layers
from partitioning.hardware import Chip, describe_topology
from partitioning.hardware.topology import split_slices
from partitioning.products.flops import count_jaxpr_flops

from .early import ask_for_text, compile_until_scheduled

Mode = Literal['whole', 'early', 'traced']

_open = open  # what a script writes by the function of this name is removed at its end
_WAIT = 3600.0
_EMPTY = '_of_no_work'
RECORD, TEXT = '.json', '.hlo.txt.gz'
_PACKAGES = ('jax', 'jaxlib', 'libtpu', 'jax-cuda13-plugin', 'flax')


def record_script(topology: str, path: Path, arguments: Sequence[str], mode: Mode) -> str:
    """Dry-runs a script, and stores the record of its largest training step.

    The arguments are '--' and the command of the script, and the path of the files to write has no
    ending. The modes 'early' and 'traced' end this process at the first training step. Returns ''
    if there is a record, or one line that says why there is none.
    """
    # The flags were tried by the campaign.
    options, script = check([topology, *arguments], 'recording')
    if mode != 'whole':
        _end_early(topology, path, mode)
    name, slices = split_slices(topology)
    machine = Machine(topology=describe_topology(name, num_slices=slices), process=None)
    wait = max(options.wait, _WAIT)  # the campaign ends what takes too long
    run = run_script(machine, Script(**script), steps=1, wait=wait)
    if not any(one.trains for one in find_steps(run.functions)):
        return _why(run)
    step = max((one for one in run.functions if one.trains), key=lambda one: one.flops)
    seconds = {'compile': step.seconds, 'run': _cpu_seconds()}
    found = describe(step) | {'ending': run.ending}
    found['functions'] = [[one.name, one.calls, one.seconds] for one in run.functions]
    started = time.process_time()
    found['forecast'] = to_plain(answer_of(forecast_function(step)))
    seconds['report'] = time.process_time() - started
    text = '' if step.executable is None else read_text(step.executable)
    _store(topology, path, found, seconds, text)
    return ''


def _end_early(topology: str, path: Path, mode: Mode) -> None:
    """Ends this process when the first training step of a script is scheduled, or traced."""
    folder = ask_for_text('step|train|update') if mode == 'early' else Path()
    original = Compiling._compile

    def compile_early(self: Any, computation: Any, options: Any, compile_now: Any) -> Any:
        call = self._lowered.get(computation)
        devices = jax_private.devices_of(computation)
        if call is None or not self._machine.has(devices[0]):
            return original(self, computation, options, compile_now)
        step = CompiledFunction(
            call=call,
            executable=None,
            out_of_memory=None,
            devices=devices,
            consumed=frozenset(),
            seconds=0.0,
        )
        if step.flops and step.trains:
            started = time.process_time()

            def finish(text: str, memory: dict[str, int] | None) -> None:
                seconds = {'compile': time.process_time() - started}
                found = describe(step) | {'ending': mode, 'memory': memory}
                peak = memory['peak'] if memory else found['peak_by_formula']
                found['fits'] = peak <= found['memory_limit']
                _store(topology, path, found, seconds, text)
                print('recording: stored', file=sys.stderr, flush=True)

            if mode == 'traced':
                finish('', None)
                os._exit(0)

            def until_scheduled() -> Any:
                module = f'jit_{step.name}'
                compile_until_scheduled(compile_now, folder, finish, module, too_large=True)

            return original(self, computation, options, until_scheduled)
        if call.name == _EMPTY or not _can_be_empty(call):
            return original(self, computation, options, compile_now)
        return original(self, computation, options, lambda: _compile_empty(call))

    Compiling._compile = compile_early  # type: ignore[method-assign]


def _can_be_empty(call: TracedCall) -> bool:
    """Whether the results of a call are known without compiling it, as for an init."""
    arrays = [*call.jaxpr.in_avals, *call.jaxpr.out_avals]
    return all(isinstance(s, Sharding) for s in call.results) and all(
        not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in arrays
    )


def _compile_empty(call: TracedCall) -> Any:
    """Compiles a function with the arguments and results of another one, which has no work."""
    results = [(x.shape, x.dtype) for x in call.jaxpr.out_avals]

    def empty(*args: Any) -> list[Any]:
        return [jax.numpy.zeros(*result) for result in results]

    empty.__name__ = _EMPTY
    given = zip(call.jaxpr.in_avals, call.arguments, strict=True)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in given]
    jitted = jax.jit(empty, out_shardings=list(call.results), keep_unused=True)
    return jitted.lower(*args).compile()._executable


def _store(
    topology: str, path: Path, found: dict[str, Any], seconds: dict[str, float], text: str
) -> None:
    def write(ending: str, content: bytes) -> None:
        with _open(path.with_name(path.name + ending), 'wb') as file:
            file.write(content)

    if text:
        write(TEXT, gzip.compress(text.encode(), mtime=0))
    seconds['all'] = _cpu_seconds()
    # Last, because its presence says that the program is there.
    whole = found | {'topology': topology, 'seconds': seconds}
    write(RECORD, (json.dumps(whole) + '\n').encode())


def describe(step: CompiledFunction) -> dict[str, Any]:
    """What is known about a step from its trace and its compiler, as the store has it."""
    mesh, jaxpr = mesh_of(step), step.call.jaxpr
    chip, axes = _chip_of(mesh), mesh_axes(mesh)
    kernels = find_kernel_work(jaxpr, mesh.size)
    laid_out = lay_out_trace(step.call, mesh, target_of_mesh(mesh).slices or None)
    layers = describe_layers(laid_out)
    work = estimate_work(laid_out, chip, kernels, layers)
    memory = None
    if step.executable is not None:
        memory = read_memory(step.executable, step.devices[0].platform)
    exceeded = step.out_of_memory
    flops = count_jaxpr_flops(jaxpr, kernels=False)
    return {
        'function': step.name,
        'chip': chip.name,
        'mesh': dict(axes.sizes),
        'slices': dict(axes.slices),
        'device_ids': [device.id for device in mesh.devices.ravel().tolist()],
        'num_devices': mesh.size,
        'fits': exceeded is None and (memory is None or memory.peak <= chip.hbm_bytes_per_device),
        'memory': memory and dataclasses.asdict(memory),
        'needed': exceeded and exceeded.needed,
        'memory_limit': exceeded.available if exceeded else chip.hbm_bytes_per_device,
        'matmul_flops': flops / mesh.size,
        'group_flops': count_jaxpr_flops(jaxpr, kernels=False, dense=False) / mesh.size,
        'kernel_work': [dataclasses.asdict(kernel) for kernel in kernels],
        'layers': layers and dataclasses.asdict(layers),
        'parameters': _count_parameters(step),
        'work': to_plain(work),
        'peak_by_formula': estimate_memory(laid_out, chip).peak,
        'versions': package_versions(*_PACKAGES),
    }


def _chip_of(mesh: Mesh) -> Chip:
    chip = target_of_mesh(mesh).chip
    if chip is None:
        raise ValueError(f'no data about {mesh.devices.flat[0].device_kind}')
    return chip


def _count_parameters(step: CompiledFunction) -> int:
    """The elements of the arguments that are named as parameters."""
    named = zip(step.call.argument_names, step.call.jaxpr.in_avals, strict=True)
    return sum(x.size for name, x in named if _is_parameter(name))


def _is_parameter(name: str) -> bool:
    return ('params' in name or '.model' in name or "['model']" in name) and 'opt' not in name


def _why(run: DryRun) -> str:
    if run.error is not None:
        traceback.print_exception(run.error)
        return _first_line(run.error)
    return f'it ended ({run.ending}) before its training step {run.message}'.strip()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or ['']
    return f'{type(error).__name__}: {text[0][:1000]}'


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _main(arguments: Sequence[str]) -> int:
    topology, path, mode, *rest = arguments
    try:
        why = record_script(topology, Path(path).absolute(), rest, cast(Mode, mode))
    except Exception as error:
        traceback.print_exc()
        why = _first_line(error)
    print(f'recording: {why or "stored"}', file=sys.stderr, flush=True)
    return 1 if why else 0


if __name__ == '__main__':
    status = _main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of the script may never end
