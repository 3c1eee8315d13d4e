"""Calls in processes of their own, and files from which interrupted campaigns continue."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

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


def complete(
    path: Path, names: Iterable[str], measure: Callable[[str], Any], again: bool = False
) -> dict[str, Any]:
    """Returns the result of each name, from a file of JSON or measured and added to the file.

    A name whose result is None is left out. With `again`, everything is measured again.
    """
    names, results = list(names), read_results(path)
    for name in names:
        if again or name not in results:
            found = measure(name)
            if found is not None:
                results[name] = found
                write_results(path, results)
    return {name: results[name] for name in names if name in results}


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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the results of a file of JSON lines; there are none without a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_line(path: Path, result: Mapping[str, Any]) -> None:
    """Adds a result to a file of JSON lines."""
    with path.open('a') as file:
        file.write(json.dumps(result) + '\n')


def call_command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Returns the command that calls a function of a script in this folder.

    Its last line is what the function returns, as JSON, which must also have the arguments.
    """
    script = Path(function.__code__.co_filename).stem
    return [sys.executable, __file__, script, function.__name__, json.dumps(arguments)]


def measure_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function returns in a process of its own.

    If it fails, its last line of errors is printed, and None is returned.
    """
    done = subprocess.run(call_command(function, *arguments), capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ['no message']
        print(f'{":".join(map(str, arguments))} failed: {lines[-1][:400]}', flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


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
