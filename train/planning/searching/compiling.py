"""Compiles candidates, each in a process of its own.

`python -m train.planning.searching.compiling REQUEST ANSWER` is such a process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from etils import epath

import train
from train.errors import first_line
from train.paths import replacing
from train.planning.searching.search import Outcome

# A forecast depends on the versions of what compiles it.
_COMPILERS = ('jax', 'jaxlib', 'libtpu', 'jax-cuda13-pjrt', 'jax-cuda12-pjrt')


def versions() -> dict[str, str]:
    """The versions of the compilers that are installed."""
    found = {}
    for name in _COMPILERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def compile_in_new_process(folder: epath.Path) -> Callable[[str], Outcome]:
    """Returns a function that compiles what a request describes, in a process of its own.

    A compiler can take gigabytes, and can end its process.

    Args:
      folder: a folder for the request and the answer.
    """

    def compile_text(text: str) -> Outcome:
        folder.mkdir(parents=True, exist_ok=True)
        request, target = folder / 'request.json', folder / 'answer.json'
        request.write_text(text)
        target.unlink(missing_ok=True)
        # Without -P, a train.py in the current folder would hide this package.
        files = [os.fspath(request), os.fspath(target)]
        command = [sys.executable, '-P', '-m', 'train.planning.searching.compiling', *files]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        seconds = time.monotonic() - started
        if target.exists():
            return Outcome(**json.loads(target.read_text()) | {'compile_seconds': seconds})
        lines = done.stderr.strip().splitlines() or [f'exit status {done.returncode}']
        error = f'the process of the compiler failed: {lines[-1]}'
        return Outcome(fits=False, compile_seconds=seconds, error=error)

    return compile_text


def _environment() -> dict[str, str]:
    root = str(Path(train.__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get('PYTHONPATH')])]
    return os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': os.pathsep.join(paths)}


def outcome_of(forecast: Any) -> Outcome:
    """What a search keeps of a `meshwright.Forecast`."""
    time_of_step = forecast.time
    return Outcome(
        fits=forecast.fits is not False,
        peak=forecast.memory.peak,
        seconds=time_of_step and time_of_step.seconds,
        low=time_of_step and time_of_step.low,
        high=time_of_step and time_of_step.high,
    )


def answer(request: dict[str, Any]) -> Outcome:
    """Compiles what a request describes, in this process.

    Args:
      request: 'source', the fields of `train.planning.searching.predicting.Source`, and 'machine'.
    """
    from train.planning.forecasting import forecast_run, parse_machine
    from train.planning.searching.predicting import Source, read_config

    sys.path.append(os.getcwd())  # the packages of `allow` may be there
    try:
        source, machine = Source(**request['source']), parse_machine(request['machine'])
        return outcome_of(forecast_run(read_config(source, machine), machine))
    except ValueError as error:
        return Outcome(fits=False, error=first_line(error))


def main() -> None:
    request, target = map(epath.Path, sys.argv[1:])
    outcome = answer(json.loads(request.read_text()))
    with replacing(target) as unfinished:
        unfinished.write_text(json.dumps(dataclasses.asdict(outcome)))


if __name__ == '__main__':
    main()
