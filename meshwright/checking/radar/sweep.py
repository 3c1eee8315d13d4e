"""Records programs in environments; each record is a file, so that a stop loses nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.checking.processes import record_in_turn
from meshwright.checking.radar.environments import Environment
from meshwright.checking.settings import CheckedProgram
from meshwright.records.files import write_at_once
from meshwright.records.record import Record
from meshwright.records.verdicts import Recorded

FORMAT = 'meshwright radar record 1'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Where programs are, and where their records are kept.

    Attributes:
      root: the folder of pyproject.toml.
      path: further folders whose modules the programs import.
      folder: the folder of the records.
      limit: the seconds after which a program is stopped.
    """

    root: Path
    path: tuple[Path, ...]
    folder: Path
    limit: float = 900


def record_all(
    sweep: Sweep,
    programs: Sequence[CheckedProgram],
    environment: Environment,
    tpu: Environment | None = None,
) -> Iterator[tuple[CheckedProgram, Recorded]]:
    """Records programs in an environment, except those whose record is there already.

    What failed is tried again each time.

    Args:
      sweep: where everything is.
      programs: the programs.
      environment: the environment.
      tpu: an environment whose compiler for TPUs is used in place of its own.

    Yields:
      each program that was recorded, with its record or with what went wrong.
    """
    missing = [p for p in programs if read_record(sweep, p, environment, tpu) is None]
    if not missing:
        return
    variables = {'PYTHONPATH': os.pathsep.join([*map(str, sweep.path), *_inherited()])}
    if tpu is not None:
        variables['TPU_LIBRARY_PATH'] = str(tpu.tpu_library)
    made = record_in_turn(
        missing, sweep.root, environment.python, variables=variables, limit=sweep.limit
    )
    for program, found in zip(missing, made, strict=True):
        if found.record is not None:
            record = found.record
            if tpu is not None:
                versions = {**record.versions, 'libtpu': tpu.versions['libtpu']}
                record = dataclasses.replace(record, versions=versions)
            write_record(sweep, program, record, environment, tpu)
            found = Recorded(record=record)
        yield program, found


def read_record(
    sweep: Sweep, program: CheckedProgram, environment: Environment, tpu: Environment | None = None
) -> Record | None:
    """The record of a program in an environment, if it is there and of the program as it is."""
    return _read(_file(sweep, program, environment, tpu), sweep, program)


def _file(
    sweep: Sweep, program: CheckedProgram, environment: Environment, tpu: Environment | None
) -> Path:
    name = environment.key if tpu is None else f'{environment.key}@{tpu.key}'
    return sweep.folder / program.name / f'{name}.json'


def write_record(
    sweep: Sweep,
    program: CheckedProgram,
    record: Record,
    environment: Environment,
    tpu: Environment | None = None,
) -> None:
    """Keeps the record of a program in an environment."""
    held = {'format': FORMAT, 'program': _settings(program), 'function': _own(sweep, program)}
    text = json.dumps({**held, 'record': record.as_dict()})
    write_at_once(_file(sweep, program, environment, tpu), text)


def _inherited() -> list[str]:
    return list(filter(None, [os.environ.get('PYTHONPATH')]))


def _read(file: Path, sweep: Sweep, program: CheckedProgram) -> Record | None:
    """The record of a file, if it is of the program as it is now."""
    try:
        held = json.loads(file.read_text(encoding='utf-8'))
        if held['format'] != FORMAT or held['program'] != _settings(program):
            return None
        if held['function'] != _own(sweep, program):
            return None
        record = Record.from_json(json.dumps(held['record']))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if _is_current(sweep, record.files or {}) else None


def _settings(program: CheckedProgram) -> dict[str, Any]:
    """What the declaration of a program says, without tolerances, which do not change a record."""
    settings = dataclasses.asdict(program)
    del settings['tolerances']
    made: dict[str, Any] = json.loads(json.dumps(settings))
    return made


def _is_current(sweep: Sweep, files: Mapping[str, str]) -> bool:
    """Whether the files that a record names are as they were; those that are not found count so."""
    for name, digest in files.items():
        found = next((f for f in _places(sweep, name) if f.is_file()), None)
        if found is not None and _digest(found) != digest:
            return False
    return True


def _places(sweep: Sweep, name: str) -> list[Path]:
    """Where a file may be that a record names from some folder on."""
    folders = [folder.resolve() for folder in (sweep.root, *sweep.path)]
    return [above / name for folder in folders for above in (folder, *folder.parents)]


def _own(sweep: Sweep, program: CheckedProgram) -> str:
    """A digest of the file that declares the program."""
    module = program.function.partition(':')[0].replace('.', '/')
    for folder in (sweep.root, *sweep.path):
        for file in (folder / f'{module}.py', folder / module / '__init__.py'):
            if module and file.is_file():
                return _digest(file)
    return ''


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def records_folder(cache: Path, root: Path) -> Path:
    """The folder of the records of a repository: its name, and a digest of where it is."""
    digest = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
    return cache / 'records' / f'{root.resolve().name}-{digest}'
