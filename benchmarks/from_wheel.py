"""Installs a wheel into a new environment, and trains with it in a folder that has a train.py.

It builds the wheel from this checkout, installs it with the trainer's packages, and runs a short
quickstart. The folder contains nothing but a file train.py, which fails if anything imports it.

python benchmarks/from_wheel.py
"""

from __future__ import annotations

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
)


def run(what: str, command: list[str], folder: Path) -> None:
    """Runs a command, and prints how long it took; ends the check if it fails."""
    inherited = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'VIRTUAL_ENV')}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True)
    print(f'{time.perf_counter() - started:6.1f} s  {what}', flush=True)
    if done.returncode:
        sys.exit(f'exit status {done.returncode}\n{done.stdout}{done.stderr}')


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        user, environment = folder / 'user', folder / 'environment'
        user.mkdir()
        (user / 'train.py').write_text("raise SystemExit('imported the train.py of the user')\n")
        uv = [sys.executable, '-m', 'uv', '--quiet']
        run('build the wheel', [*uv, 'build', '--wheel', '--out-dir', str(folder), str(ROOT)], ROOT)
        [wheel] = folder.glob('*.whl')
        run('make an environment', [*uv, 'venv', '--python', sys.executable, 'environment'], folder)
        python = environment / 'bin/python'
        install = [*uv, 'pip', 'install', '--python', str(python), f'{wheel}[train]']
        run('install the wheel', install, folder)
        for command in COMMANDS:
            arguments = command.split()
            run(f'meshwright {command}', [str(environment / 'bin/meshwright'), *arguments], user)


if __name__ == '__main__':
    main()
