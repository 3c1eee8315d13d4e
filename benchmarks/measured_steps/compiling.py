"""The campaign that compiles the programs of the measured rows, one after another.

Each program is compiled in a process of its own, which takes one to several minutes and 1 to 3 GB.
What the compiler says is kept in a folder outside of the repository, see `store`, from which the
committed records are made. Programs that the folder has are not compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'

STORE = Path(os.environ.get('MESHWRIGHT_TRUTH', 'build/forecast_truth'))
TEXT, RECORD, JAXPR = '.hlo.txt.gz', '.json', '.jaxpr.txt.gz'


def compile_program(name: str, store: Path) -> None:
    """Compiles one program in this process, and stores what the compiler says."""
    from .rebuilding import list_programs

    program = list_programs()[name]
    found, text, jaxpr = measure(program)
    store.mkdir(parents=True, exist_ok=True)
    for ending, content in ((TEXT, text), (JAXPR, jaxpr)):
        if content:
            (store / f'{name}{ending}').write_bytes(gzip.compress(content.encode(), mtime=0))
    # Last, because its presence says that the program is there.
    (store / f'{name}{RECORD}').write_text(json.dumps({'name': name} | found, indent=1) + '\n')


def measure(program: Any) -> tuple[dict[str, Any], str, str]:
    """Compiles a program. Returns what is known about it, its text, and its jaxpr.

    If it needs more memory than a device has, it is compiled again with as many chunks of the
    vocabulary as keep the logits small, and the first error is recorded.
    """
    try:
        return _measure(program)
    except Exception as error:
        message = str(error)
        if not _is_out_of_memory(message):
            raise
        if program.output_chunks is None:
            return {'program': describe(program), 'fits': False, 'error': message[:4000]}, '', ''
    found, text, jaxpr = measure(dataclasses.replace(program, output_chunks=None))
    return found | {'error_with_whole_logits': message[:4000]}, text, jaxpr


def _is_out_of_memory(message: str) -> bool:
    return any(word in message for word in ('RESOURCE_EXHAUSTED', 'Ran out of memory', 'HbmOom'))


def _measure(program: Any) -> tuple[dict[str, Any], str, str]:
    from .tracing import find_products, find_traced_kernels
    from partitioning.aot.compiled.costs import mesh_axes, read_memory
    from partitioning.aot.timing import find_kernel_work
    from partitioning.aot.traced.flops import count_flops, count_jaxpr_flops
    from partitioning.hardware import chip_of
    from train.run import prepare
    from train.start import partition_train_step
    from train.steps import make_eval_step

    started = time.perf_counter()
    _describe_cudnn()
    config = program.train_config()
    with contextlib.redirect_stdout(sys.stderr):
        run = prepare(config)
    mesh, state, batch = config.partitioner.mesh, run.plan.abstract_state, dict(run.batch)
    step = partition_train_step(run)
    jaxpr = step.trace(state, batch).jaxpr
    lowered = step.lower(state, batch)
    traced = time.perf_counter() - started
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    device, axes = mesh.devices.flat[0], mesh_axes(mesh)
    memory = read_memory(compiled, device.platform)
    chip = chip_of(device.device_kind)
    forward = count_flops(
        make_eval_step(config.objective), state.params, state.flax_mutables, batch
    )
    sizes: dict[str, int] = {}
    for row in run.plan.rows:
        sizes[row.role] = sizes.get(row.role, 0) + row.bytes_per_device
    found = {
        'program': describe(program),
        'fits': memory.peak <= chip.hbm_bytes_per_device,
        'chip': chip.name,
        'mesh': dict(axes.sizes),
        'slices': dict(axes.slices),
        'memory': dataclasses.asdict(memory),
        'memory_limit': chip.hbm_bytes_per_device,
        'state_bytes': sizes,
        'model_flops': 3 * forward,
        'program_flops': count_jaxpr_flops(jaxpr.jaxpr),
        'matmul_flops': count_jaxpr_flops(jaxpr.jaxpr, kernels=False) / program.num_devices,
        'kernel_work': [dataclasses.asdict(k) for k in find_kernel_work(jaxpr)],
        'products': [dataclasses.asdict(p) for p in find_products(jaxpr.jaxpr)],
        'kernels': [dataclasses.asdict(k) for k in find_traced_kernels(jaxpr.jaxpr)],
        'compiler_options': run.compiler_options,
        'trace_seconds': traced,
        'compile_seconds': seconds,
        'compile_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        'versions': {p: _version(p) for p in ('jax', 'libtpu', 'jax-cuda13-plugin')},
    }
    return found, compiled.as_text() or '', str(jaxpr)


def _describe_cudnn() -> None:
    """Lets programs use the attention of a cuDNN that is not installed here."""
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 91300


def describe(program: Any) -> dict[str, Any]:
    """Returns the settings of a program as JSON can have them."""
    return json.loads(json.dumps(dataclasses.asdict(program)))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compile_programs(names: Sequence[str], store: Path = STORE, again: bool = False) -> None:
    """Compiles programs that the store does not have, each in a process of its own."""
    for i, name in enumerate(names):
        if not again and (store / f'{name}{RECORD}').exists():
            continue
        started = time.perf_counter()
        print(f'[{i + 1}/{len(names)}] {name}', end=' ', flush=True)
        command = [sys.executable, '-m', 'measured_steps.compiling', f'--program={name}']
        environment = os.environ | {'MESHWRIGHT_TRUTH': str(store)}
        path = [str(Path(__file__).parents[1]), environment.get('PYTHONPATH', '')]
        environment['PYTHONPATH'] = os.pathsep.join(part for part in path if part)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        seconds = time.perf_counter() - started
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ['no message']
            print(f'failed after {seconds:.0f} s: {lines[-1][:400]}', flush=True)
            store.mkdir(parents=True, exist_ok=True)
            (store / f'{name}.failed.txt').write_text(done.stderr[-20000:])
            continue
        print(f'{seconds:.0f} s', flush=True)


def stored(store: Path = STORE) -> Iterator[dict[str, Any]]:
    """Yields what the store has about each program, see `_measure`."""
    for path in sorted(store.glob(f'*{RECORD}')):
        yield json.loads(path.read_text())


def read_text(name: str, store: Path = STORE) -> str:
    """Returns the text of a compiled program of the store."""
    return gzip.decompress((store / f'{name}{TEXT}').read_bytes()).decode()


if __name__ == '__main__':
    arguments = sys.argv[1:]
    if arguments and arguments[0].startswith('--program='):
        compile_program(arguments[0].partition('=')[2], STORE)
    else:
        from .rebuilding import list_programs

        chosen = arguments or list(list_programs())
        compile_programs(chosen)
