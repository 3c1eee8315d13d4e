"""Calls in processes of their own, and files from which interrupted campaigns continue."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

# The settings of a run that campaigns disturb; it trains on the files texts/*.txt of its folder.
TINY_RUN = """
include 'configs/runs/base.gin'
include 'configs/models/tiny.gin'
include 'configs/partitioning/two_d.gin'

BATCH_SIZE = 8
SEQUENCE_LENGTH = 32
LEARNING_RATE = 0.001
TransformerConfig.num_layers = 1
TransformerConfig.embed_dim = 64
TrainConfig.task = @CausalLM()
CausalLM.source = @TextFiles()
TextFiles.pattern = 'texts/*.txt'
HeldOut.limit = 8192
"""


def run_named(
    doc: str,
    what: str,
    known: Mapping[str, str],
    path: str,
    measure: Callable[[str], Any],
    more: Sequence[argparse.ArgumentParser] = (),
) -> dict[str, Any]:
    """Returns the results that the command line asks for, from a file or measured and added to it.

    Args:
      doc: the description of the command.
      what: the word for what has a result, such as 'case'; the option is `--cases`.
      known: a description of each name, which `--list` prints.
      path: the file of JSON, unless `--results` has another one.
      measure: measures a name; None means that this has failed.
      more: parsers of other options, which the caller has read.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], parents=[*more])
    parser.add_argument(f'--{what}s', dest='names', help='separated by commas (all)')
    parser.add_argument('--results', type=Path, default=Path(path), help=f'({path})')
    parser.add_argument('--again', action='store_true', help='measure what the file has, too')
    parser.add_argument('--list', action='store_true', help=f'print the {what}s')
    options = parser.parse_args()
    names, results = parse_names(options.names, known, what), read_results(options.results)
    if options.list:
        print(*(f'{name:<28}{known[name]}' for name in names), sep='\n')
        return {}
    for name in names:
        if options.again or name not in results:
            found = measure(name)
            if found is not None:
                results[name] = found
                write_results(options.results, results)
    return {name: results[name] for name in names if name in results}


def run_trials(
    path: Path, trials: Iterable[tuple[str, Callable[[], dict[str, Any]]]]
) -> list[dict[str, Any]]:
    """Runs the trials that a file of JSON lines lacks, adds their results, and returns all lines.

    Each line has the name of its trial as 'trial'.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    done: list[dict[str, Any]] = [json.loads(line) for line in lines]
    known = {line['trial'] for line in done}
    for name, run in trials:
        if name not in known:
            done.append({'trial': name} | run())
            line = json.dumps(done[-1])
            with path.open('a') as file:
                file.write(line + '\n')
            print(line, file=sys.stderr, flush=True)
    return done


def parse_names(text: str | None, known: Iterable[str], what: str) -> list[str]:
    """Returns the names in a text, separated by commas; None has all that are known."""
    names = list(known) if text is None else text.split(',')
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f'no {what} {unknown[0]!r}: the {what}s are {", ".join(known)}')
    return names


def read_results(path: Path) -> dict[str, Any]:
    """Reads results by name; there are none without a file."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Writes results by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + '\n')


def write_texts(folder: Path, count: int) -> None:
    """Writes files of random numbers, on which TINY_RUN trains."""
    rng = np.random.default_rng(0)
    (folder / 'texts').mkdir()
    for i in range(count):
        text = ' '.join(map(str, rng.integers(0, 1000, 20_000)))
        (folder / f'texts/{i}.txt').write_text(text)


def start_run(command: list[str], folder: Path, cache: Path, **pipes: Any) -> Any:
    """Starts a command of the trainer in a folder, on CPUs, with a cache of tokens and programs."""
    environment = {
        'PYTHONPATH': str(Path(__file__).resolve().parent.parent),
        'PYTHONUNBUFFERED': '1',
        'JAX_PLATFORMS': 'cpu',
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'XDG_CACHE_HOME': str(cache),
    }
    return subprocess.Popen(command, cwd=folder, env=os.environ | environment, text=True, **pipes)


def call_command(
    function: Callable[..., Any], *arguments: Any, python: str = sys.executable
) -> list[str]:
    """Returns the command that calls a function of a script in this folder.

    Its last line is what the function returns, as JSON, which must also have the arguments.
    """
    script = Path(function.__code__.co_filename).stem
    return [python, __file__, script, function.__name__, json.dumps(arguments)]


def call_in_new_process(
    function: Callable[..., Any], *arguments: Any, python: str = sys.executable
) -> Any:
    """Returns what a function returns in a process of its own, of another Python if one is given.

    Raises:
      RuntimeError: with the last line of its errors, if it fails.
    """
    command = call_command(function, *arguments, python=python)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ['no message']
        raise RuntimeError(f'{":".join(map(str, arguments))} failed: {lines[-1][:400]}')
    return json.loads(done.stdout.splitlines()[-1])


def measure_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The same, but an error is printed, and the result is None."""
    try:
        return call_in_new_process(function, *arguments)
    except RuntimeError as error:
        print(error, flush=True)
        return None


def package_versions(*packages: str) -> dict[str, str | None]:
    """Returns the versions of packages; None for those that are not installed."""
    installed = {one.name.lower(): one.version for one in metadata.distributions()}
    return {name: installed.get(name) for name in packages}


def reset_peak() -> int:
    """Forgets the peak memory of this process, and returns its memory now, in bytes."""
    Path('/proc/self/clear_refs').write_text('5')
    return _memory('VmRSS')


def peak_memory() -> int:
    """Returns the peak memory of this process since `reset_peak`, in bytes.

    Unlike ru_maxrss, it does not count the memory of the process that started this one.
    """
    return _memory('VmHWM')


def _memory(field: str) -> int:
    status = Path('/proc/self/status').read_text()
    return int(status.partition(f'{field}:')[2].split()[0]) * 1024


if __name__ == '__main__':
    script, name, arguments = sys.argv[1:]
    function = getattr(importlib.import_module(script), name)
    print(json.dumps(function(*json.loads(arguments))))
