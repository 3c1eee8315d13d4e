"""The campaign that compiles the programs of the measured rows, one after another.

Each program is compiled in a process of its own, which takes one to several minutes and 1 to 3 GB.
What the compiler says is kept in a folder outside of the repository, the store, from which the
committed records are made. Programs that the store has are not compiled again.

The store has three files per program: NAME.json, what is known about it; NAME.hlo.txt.gz, its
compiled text; and NAME.jaxpr.txt.gz, the traced step.

The files of NAME.early are from before the compiler generated code, which takes most of the time of
a compilation and adds only the estimated cycles of the operations. The scheduled text and the
memory are final there. Programs that differ from another one only in the number of copies of the
model have the same cycles, so they need no more than this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ['JAX_PLATFORMS'] = 'cpu'

from benchmarks.campaigns import package_versions, parse_names
from meshwright.program.costs import mesh_axes, read_memory
from meshwright.time import find_kernel_work
from partitioning.hardware import chip_of
from partitioning.products.flops import count_flops, count_jaxpr_flops
from train.objectives.objective import make_eval_step
from train.running.programs import partition_train_step
from train.running.run import prepare

from .early import ask_for_text, compile_until_scheduled
from .rebuilding import list_programs

STORE = Path(os.environ.get('MESHWRIGHT_TRUTH', 'build/forecast_truth'))
_RECORD, _TEXT, _JAXPR, _EARLY = '.json', '.hlo.txt.gz', '.jaxpr.txt.gz', '.early'
_PACKAGES = ('jax', 'jaxlib', 'libtpu', 'jax-cuda13-plugin')


class Traced(NamedTuple):
    """A traced train step: what the store has about it, and what the compiler is given."""

    found: dict[str, Any]
    lowered: Any
    jaxpr: Any
    mesh: Any


def compile_program(name: str, early: bool = False) -> None:
    """Compiles one program in this process, and stores what the compiler says.

    If the program needs more memory than a device has, it is compiled with as many chunks of the
    vocabulary as keep the logits small, and the first error is stored too. With `early`, the
    process ends before the compiler generates code.
    """
    program, errors = list_programs()[name], {}
    folder = ask_for_text() if early else None
    save = functools.partial(_save, name + _EARLY * early, errors)
    for key, chunks in (('error_with_whole_logits', program.output_chunks), ('error', None)):
        tried = dataclasses.replace(program, output_chunks=chunks)
        try:
            _compile(tried, folder, save)
            return
        except Exception as error:
            if not _is_out_of_memory(str(error)):
                raise
            errors[key] = str(error)[:4000]
    traced = trace_program(tried)
    save(traced, '', {'fits': False})
    if early:
        os._exit(0)


def _compile(program: Any, folder: Path | None, save: Callable[..., None]) -> None:
    started = time.perf_counter()
    traced = trace_program(program)

    def finish(text: str, memory: dict[str, int]) -> None:
        limit = traced.found['memory_limit']
        # The compiler refuses TPU programs that do not fit, and no programs of GPUs.
        accepted = folder is None and traced.mesh.devices.flat[0].platform == 'tpu'
        save(
            traced,
            text,
            {
                'fits': accepted or memory['peak'] <= limit,
                'memory': memory,
                'compile_seconds': time.perf_counter() - started,
                'compile_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            },
        )

    if folder is not None:
        compile_until_scheduled(traced.lowered.compile, folder, finish)
    compiled = traced.lowered.compile()
    memory = read_memory(compiled, traced.mesh.devices.flat[0].platform)
    finish(compiled.as_text() or '', dataclasses.asdict(memory))


def trace_program(program: Any) -> Traced:
    """Traces the train step of a program, and counts what is known without a compiler."""
    config = program.train_config()
    with contextlib.redirect_stdout(sys.stderr):
        run = prepare(config)
    mesh, state, batch = config.partitioner.mesh, run.plan.abstract_state, dict(run.batch)
    step, forward = partition_train_step(run), make_eval_step(config.objective)
    jaxpr, lowered = step.trace(state, batch).jaxpr, step.lower(state, batch)
    axes, chip = mesh_axes(mesh), chip_of(mesh.devices.flat[0].device_kind)
    assert chip is not None
    sizes: dict[str, int] = {}
    for row in run.plan.rows:
        sizes[row.role] = sizes.get(row.role, 0) + row.bytes_per_device
    found = {
        'program': json.loads(json.dumps(dataclasses.asdict(program))),
        'chip': chip.name,
        'mesh': dict(axes.sizes),
        'slices': dict(axes.slices),
        'memory_limit': chip.hbm_bytes_per_device,
        'state_bytes': sizes,
        'model_flops': 3 * count_flops(forward, state.params, state.flax_mutables, batch),
        'program_flops': count_jaxpr_flops(jaxpr.jaxpr),
        'matmul_flops': count_jaxpr_flops(jaxpr.jaxpr, kernels=False) / program.num_devices,
        'kernel_work': [dataclasses.asdict(k) for k in find_kernel_work(jaxpr, mesh.size)],
        'compiler_options': run.compiler_options,
        'versions': package_versions(*_PACKAGES),
    }
    return Traced(found, lowered, jaxpr, mesh)


def compile_programs(names: Iterable[str], early: bool) -> None:
    """Compiles programs that the store does not have, each in a process of its own."""
    for name in names:
        if (STORE / f'{name}{_EARLY * early}{_RECORD}').exists():
            continue
        started = time.perf_counter()
        print(name, end=' ', flush=True)
        command = [sys.executable, '-m', 'measured_steps.compiling', name, *(['early'] * early)]
        path = [str(Path(__file__).parents[1]), os.environ.get('PYTHONPATH', '')]
        environment = os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, path))}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        print(f'{time.perf_counter() - started:.0f} s', flush=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ['no message']
            print(f'  failed: {lines[-1][:300]}', flush=True)
            STORE.mkdir(parents=True, exist_ok=True)
            (STORE / f'{name}.failed.txt').write_text(done.stderr[-20_000:])


def run_campaign(names: str | None, early: bool) -> None:
    """Compiles programs, separated by commas, by default all, and writes the committed records.

    Records of programs that the store does not have stay as they are.
    """
    from .records import make_record, read_records, write_records

    known = list_programs()
    compile_programs(parse_names(names, known, 'program'), early)
    kept = {name: record for name, record in read_records().items() if name in known}
    write_records(kept | {found['name']: make_record(found) for found in read_all()})


def read_all() -> Iterator[dict[str, Any]]:
    """Yields what the store knows about each program.

    The entry 'stored_as' is the name for `read_text`. If it ends with '.early', the text has no
    estimated cycles.
    """
    for name in list_programs():
        stored = [s for s in (name, name + _EARLY) if (STORE / f'{s}{_RECORD}').exists()]
        for stored_as in stored[:1]:
            found = json.loads((STORE / f'{stored_as}{_RECORD}').read_text())
            yield found | {'name': name, 'stored_as': stored_as}


def read_text(stored_as: str) -> str:
    """Returns the text of a compiled program of the store."""
    return gzip.decompress((STORE / f'{stored_as}{_TEXT}').read_bytes()).decode()


def _save(
    name: str, errors: dict[str, str], traced: Traced, text: str, found: dict[str, Any]
) -> None:
    STORE.mkdir(parents=True, exist_ok=True)
    for ending, content in ((_TEXT, text), (_JAXPR, str(traced.jaxpr))):
        if content:
            (STORE / f'{name}{ending}').write_bytes(gzip.compress(content.encode(), mtime=0))
    # Last, because its presence says that the program is there.
    whole = traced.found | found | errors
    (STORE / f'{name}{_RECORD}').write_text(json.dumps(whole, indent=1) + '\n')


def _is_out_of_memory(message: str) -> bool:
    return any(word in message for word in ('RESOURCE_EXHAUSTED', 'Ran out of memory', 'HbmOom'))


if __name__ == '__main__':
    compile_program(sys.argv[1], early='early' in sys.argv[2:])
