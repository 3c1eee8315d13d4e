"""Installs a wheel into new environments, and trains with it in a folder that has a train.py.

It builds the wheel from this checkout. Without extras, each command either works or says in one
line which extra it needs. With the trainer's packages, it runs a short quickstart, and describes
machines without their compilers. The folder contains nothing but a file train.py, which fails if
anything imports it, and a config.json. It prints the packages, megabytes and seconds of each.

python benchmarks/from_wheel.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    'train quickstart --gin.TRAIN_STEPS=2 --gin.CHECKPOINT_PERIOD=2',
    'eval runs/quickstart',
    'generate runs/quickstart --prompt import --length 12',
    'plan show runs/quickstart',
    'mesh',
    'configs',
    'fits config.json --topology=v5e:4x4 --topology=h100:1x8 --batch_tokens=64K',
    'forecast pretrain --topology=2xv5p:2x2x2 --no_compile --gin.BATCH_SIZE=64',
)
# What works without extras, and what needs the extra `train`.
PLAIN = ('mesh', 'configs', '--help')
NEEDS_TRAIN = (
    'train quickstart',
    'precompile quickstart',
    'forecast pretrain --topology=v5e:4x4',
    'fits config.json --topology=v5e:4x4',
    'eval runs/quickstart',
    'checkpoint inspect runs/quickstart',
    'launch --processes=2 -- quickstart',
)
MODEL = {
    'model_type': 'llama',
    'vocab_size': 32000,
    'hidden_size': 512,
    'num_hidden_layers': 4,
    'num_attention_heads': 8,
    'intermediate_size': 1536,
    'max_position_embeddings': 2048,
}


def run_as_user(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command without the environment of this checkout."""
    inherited = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'VIRTUAL_ENV')}
    return subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True)


def run(what: str, command: list[str], folder: Path) -> None:
    """Runs a command, and prints how long it took; ends the check if it fails."""
    started = time.perf_counter()
    done = run_as_user(command, folder)
    print(f'{time.perf_counter() - started:6.1f} s  {what}', flush=True)
    if done.returncode:
        sys.exit(f'exit status {done.returncode}\n{done.stdout}{done.stderr}')


def refuse(command: list[str], folder: Path) -> None:
    """Runs a command that needs an extra; ends the check if it does not say so in one line."""
    done = run_as_user(command, folder)
    lines = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
    told = len(lines) == 1 and "pip install 'meshwright[train]'" in lines[0]
    if done.returncode != 2 or not told or 'Traceback' in done.stderr:
        sys.exit(f'exit status {done.returncode}\n{done.stdout}{done.stderr}')
    print(f'        {" ".join(command[1:])}: {lines[0]}', flush=True)


def measure(environment: Path) -> str:
    """The number of packages of an environment, and its size."""
    packages = len(list(environment.glob('lib/python*/site-packages/*.dist-info')))
    size = sum(p.stat().st_size for p in environment.rglob('*') if p.is_file())
    return f'{packages} packages, {size / 1e6:,.0f} MB'


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        user = folder / 'user'
        user.mkdir()
        (user / 'config.json').write_text(json.dumps(MODEL))
        (user / 'train.py').write_text("raise SystemExit('imported the train.py of the user')\n")
        uv = [sys.executable, '-m', 'uv', '--quiet']
        run('build the wheel', [*uv, 'build', '--wheel', '--out-dir', str(folder), str(ROOT)], ROOT)
        [wheel] = folder.glob('*.whl')
        for name, extras in (('plain', ''), ('trainer', '[train]')):
            environment = folder / name
            run(
                f'make the {name} environment',
                [*uv, 'venv', '--python', sys.executable, name],
                folder,
            )
            python = environment / 'bin/python'
            install = [*uv, 'pip', 'install', '--link-mode=copy', '--python', str(python)]
            run(f'install the wheel{extras}', [*install, f'{wheel}{extras}'], folder)
            print(f'        {measure(environment)}', flush=True)
            program = str(environment / 'bin/meshwright')
            for command in COMMANDS if extras else PLAIN:
                run(f'meshwright {command}', [program, *command.split()], user)
            for command in () if extras else NEEDS_TRAIN:
                refuse([program, *command.split()], user)


if __name__ == '__main__':
    main()
