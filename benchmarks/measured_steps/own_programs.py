"""The campaign that dry-runs measured programs by their own commands, one after another.

Each program runs in a process of its own, as `recording` describes. What is known about it is kept
in a folder outside of the repository, the store, and programs that the store has do not run again.
Whoever runs the campaign fetches the code of the programs. It does not belong in the repository.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from partitioning.hardware import parse_topology
from partitioning.hardware.topology import split_slices

from .maxtext import Command, command_of, start_of
from .rows import MeasuredRow

STORE = Path(os.environ.get('MESHWRIGHT_OWN', 'build/own_programs'))
_RECORD, _TEXT, _FAILED, _LOG = '.json', '.hlo.txt.gz', '.failed.json', '.log'
_COMMANDS, _SAME = 'commands.json', 'same_as'
_REFUSED = 'refused_flags.json'
_SECONDS = 1500
_REPOSITORY = Path(__file__).parents[2]
_CHECK = 'import sys; from partitioning.hardware import check_flags; check_flags(sys.argv[1])'
_SAID = re.compile(r'^recording: (.*)$', re.MULTILINE)
_DISABLE = re.compile(r'disable it with (xla_\w+)')
_FLAG = re.compile(r'(--\S+?) in [A-Z_]+')


@dataclasses.dataclass(frozen=True)
class Programs:
    """Where the code of measured programs is, and what runs it.

    Attributes:
      source: the folder with the package `maxtext`, such as `maxtext/src`.
      python: the Python that has what the programs need.
      mode: 'whole' compiles as `meshwright dry` does. With 'early', the compiler is ended before it
        generates code for TPUs, which takes most of the time; the text then has no cycles.
        With 'traced', nothing is compiled.
    """

    source: Path
    python: str = sys.executable
    mode: str = 'early'

    def command_of(self, row: MeasuredRow) -> Command | str:
        """The command of a row, or why there is none.

        A row with an entry 'command', the list of what stands behind `python`, brings its own.
        """
        given = row.settings.get('command')
        if given is None:
            return command_of(row, self.source_of(row).absolute() / 'maxtext')
        return start_of(row, tuple(map(str, given)))

    def mode_of(self, command: Command) -> str:
        """The mode for a command: programs for GPUs are never ended early."""
        on_tpus = command.variable == 'LIBTPU_INIT_ARGS'
        return 'whole' if self.mode == 'early' and not on_tpus else self.mode

    def source_of(self, row: MeasuredRow) -> Path:
        """The folder of the code of a row: its entry 'path', or the folder of all."""
        return Path(row.settings.get('path') or self.source)


def run_campaign(rows: Iterable[MeasuredRow], programs: Programs, again: bool = False) -> None:
    """Dry-runs the programs that the store does not have.

    `again` also runs programs that have failed before.
    """
    STORE.mkdir(parents=True, exist_ok=True)
    for row in rows:
        failed = STORE / f'{row.name}{_FAILED}'
        if (STORE / f'{row.name}{_RECORD}').exists() or (failed.exists() and not again):
            continue
        command = programs.command_of(row)
        why, started = command, time.perf_counter()
        if isinstance(command, Command):
            print(row.name, end=' ', flush=True)
            why = _run_once(row, command, programs)
            print(f'{time.perf_counter() - started:.0f} s {why}', flush=True)
        failed.unlink(missing_ok=True)
        if why:
            failed.write_text(json.dumps({'why': why}) + '\n')


def read_found(row: MeasuredRow) -> dict[str, Any] | str:
    """Returns what the store has about the program of a row, or why it has nothing."""
    path = STORE / f'{row.name}{_RECORD}'
    if path.exists():
        found = json.loads(path.read_text())
        if _SAME not in found:
            return found | {'stored_as': row.name}
        same = json.loads((STORE / f'{found[_SAME]}{_RECORD}').read_text())
        return same | {'stored_as': found[_SAME]}
    failed = STORE / f'{row.name}{_FAILED}'
    return json.loads(failed.read_text())['why'] if failed.exists() else 'it was not run'


def read_text(found: Mapping[str, Any]) -> str:
    """Returns the text of a compiled program of the store."""
    return gzip.decompress((STORE / f'{found["stored_as"]}{_TEXT}').read_bytes()).decode()


def _run_once(row: MeasuredRow, command: Command, programs: Programs) -> str:
    """Dry-runs a program unless another row has the same one; returns why it has no record."""
    path = STORE / _COMMANDS
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    kind = programs.mode_of(command)
    same = dataclasses.replace(command, flags={}) if kind == 'traced' else command
    digest = hashlib.sha256(repr((same, kind)).encode()).hexdigest()
    other = known.get(digest)
    if other is not None and (STORE / f'{other}{_RECORD}').exists():
        (STORE / f'{row.name}{_RECORD}').write_text(json.dumps({_SAME: other}) + '\n')
        return ''
    if not (why := _run(row, command, programs)):
        path.write_text(json.dumps(known | {digest: row.name}, indent=1) + '\n')
    return why


def _run(row: MeasuredRow, command: Command, programs: Programs) -> str:
    """Dry-runs a program; returns why it has no record, '' if it has one."""
    flags = list(_accepted(command, programs))
    path = [str(programs.source_of(row).absolute()), str(_REPOSITORY)]
    path.append(os.environ.get('PYTHONPATH', ''))
    environment = {'PYTHONPATH': os.pathsep.join(filter(None, path))}
    target = str((STORE / row.name).absolute())
    mode = programs.mode_of(command)
    full = [command.topology, target, mode, '--', 'python', *command.arguments]
    while True:
        said = start(programs.python, full, environment | {command.variable: ' '.join(flags)})
        named = _DISABLE.search(said)
        if named is None or f'--{named[1]}=false' in flags:
            return said
        # The compiler was older when this was measured, and it took more.
        flags = [flag for flag in flags if not flag.startswith(f'--{named[1]}=')]
        flags.append(f'--{named[1]}=false')


def start(python: str, arguments: list[str], environment: Mapping[str, str]) -> str:
    """Starts `recording` with these arguments; returns what it says, '' if there is a record."""
    folder = (STORE / 'runs').absolute()
    folder.mkdir(exist_ok=True)
    log = Path(f'{arguments[1]}{_LOG}')
    with log.open('w') as out:
        out.write(f'{environment} {arguments}\n')
        out.flush()
        try:
            subprocess.run(
                [python, '-m', 'benchmarks.measured_steps.recording', *arguments],
                stdout=out,
                stderr=out,
                cwd=folder,
                env=os.environ | environment | {'PYTHONDONTWRITEBYTECODE': '1'},
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f'it was ended after {_SECONDS} s'
    return read_log(log)


def read_log(log: Path) -> str:
    """What the process of a program says at its end."""
    written = log.read_text(errors='replace')
    said = _SAID.search(written)
    if said is None:
        lines = written.strip().splitlines()
        return f'the process ended: {lines[-1][:300]}'
    return '' if said[1] == 'stored' else said[1]


def _accepted(command: Command, programs: Programs) -> Iterator[str]:
    """The flags of a command that its compiler accepts."""
    path = STORE / _REFUSED
    refused: dict[str, list[str]] = json.loads(path.read_text()) if path.exists() else {}
    known = refused.setdefault(command.variable, [])
    checked = refused.setdefault(f'{command.variable} accepted', [])
    while True:
        left = [f for f in _flags(command.flags) if f not in known]
        new = [flag for flag in left if flag not in checked]
        found = _refused(command, new, programs) if new else []
        if not found:
            break
        known += found
    checked += new
    path.write_text(json.dumps(refused, indent=1) + '\n')
    yield from left


def _flags(flags: Mapping[str, str]) -> Iterator[str]:
    for name, value in flags.items():
        yield f'--{name}={value}'


def _refused(command: Command, flags: list[str], programs: Programs) -> list[str]:
    platform = parse_topology(split_slices(command.topology)[0])[0].platform
    path = [str(_REPOSITORY), os.environ.get('PYTHONPATH', '')]
    environment = os.environ | {
        'PYTHONPATH': os.pathsep.join(filter(None, path)),
        command.variable: ' '.join(flags),
    }
    done = subprocess.run(
        [programs.python, '-c', _CHECK, platform], capture_output=True, text=True, env=environment
    )
    if not done.returncode:
        return []
    named = [flag for flag in _FLAG.findall(done.stderr) if flag in flags]
    if not named:
        raise RuntimeError(f'the flags cannot be checked: {done.stderr.strip()[-500:]}')
    return named
