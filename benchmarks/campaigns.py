"""The results of long campaigns, in a file from which an interrupted campaign continues."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def complete(
    path: Path, names: Iterable[str], measure: Callable[[str], Any], again: bool = False
) -> dict[str, Any]:
    """Returns the result of each name, from a file or measured and added to the file.

    Args:
      path: the file, a JSON object of results by name.
      names: the names of the results.
      measure: returns the result of a name, or None if it fails; the name is then left out.
      again: whether results that the file has are measured again.
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


def measure_in_new_process(script: str, name: str) -> dict[str, Any] | None:
    """Runs `script --measure=NAME`, and returns the JSON of the last line that it prints.

    If the script fails, its last line of errors is printed, and None is returned.
    """
    command = [sys.executable, script, f'--measure={name}']
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ['no message']
        print(f'{name} failed: {lines[-1][:400]}', flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])
