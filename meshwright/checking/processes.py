"""Starts processes that record programs, with the Python of any environment."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from meshwright.checking.settings import CheckedProgram
from meshwright.records.record import Record
from meshwright.records.verdicts import Recorded
from meshwright.report.forecasts import Forecast
from partitioning.temporary import temporary_folder

Progress = Callable[[str], None]

_PACKAGES = ('meshwright', 'partitioning')
_LAST = 300  # characters of what a process that broke said
_ABOVE = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckRun:
    """How a check runs.

    Attributes:
      python: a Python whose environment has the versions of the golden records, or ''.
      jobs: how many programs are compiled at once.
      progress: receives a text when something begins.
    """

    python: str = ''
    jobs: int = 1
    progress: Progress = lambda text: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilesOfCommit:
    """The files of a commit in a folder.

    Attributes:
      top: the folder that stands for the root of the repository.
      present: the root of the repository, whose modules are used if a commit has none of the name.
    """

    top: Path
    present: Path


def record_programs(
    programs: Sequence[CheckedProgram],
    root: Path,
    python: str = sys.executable,
    jobs: int = 1,
    progress: Callable[[str], None] = lambda text: None,
    commit: FilesOfCommit | None = None,
) -> dict[str, Recorded]:
    """Returns the record of each program by its name.

    Args:
      programs: the programs.
      root: the folder in which they are.
      python: the Python that runs them. Its environment needs jax, and not this package.
      jobs: how many processes run at once.
      progress: receives a text when a program begins.
      commit: where the files of a commit are, if `root` is a folder of them.
    """
    with temporary_folder('meshwright-check-') as folder:
        _link_packages(folder / 'packages')

        def run(program: CheckedProgram) -> Recorded:
            progress(f'{program.name} on {program.machine or "its own devices"}')
            return _record(program, root, python, folder, commit)

        with concurrent.futures.ThreadPoolExecutor(max(jobs, 1)) as pool:
            found = list(pool.map(run, programs))
    return {program.name: one for program, one in zip(programs, found, strict=True)}


def record_in_turn(
    programs: Sequence[CheckedProgram],
    root: Path,
    python: str,
    *,
    variables: Mapping[str, str],
    limit: float,
) -> Iterator[Recorded]:
    """Records programs one after the other, in processes that share the import of jax.

    Args:
      programs: the programs.
      root: the folder in which they are.
      python: the Python that runs them, as for `record_programs`.
      variables: environment variables for it.
      limit: the seconds that a program may take.

    Yields:
      what became of each program, as soon as it is known.
    """
    with temporary_folder('meshwright-check-') as folder:
        _link_packages(folder / 'packages')
        pairs = [_write_task(program, folder, root) for program in programs]
        command = [python, '-P', '-m', 'meshwright.checking.worker', f'--limit={limit}']
        most = max(programs, key=lambda program: program.num_devices)
        with open(folder / 'stderr', 'w+', encoding='utf-8', errors='replace') as said:
            try:
                process = subprocess.Popen(
                    [*command, *(str(file) for pair in pairs for file in pair)],
                    cwd=root,
                    env=_environment(most, folder / 'packages', variables),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                )
            except OSError as error:
                text = f'{python} cannot be started: {error.strerror}'
                yield from [Recorded(error=text)] * len(pairs)
                return
            with process:
                assert process.stdout is not None
                try:
                    for _, answer in pairs:
                        yield _answer_of(answer, process.stdout.readline(), limit, said)
                finally:
                    process.terminate()


def _answer_of(answer: Path, line: str, limit: float, said: TextIO) -> Recorded:
    """What became of a program whose process has ended, or why there was none."""
    if answer.is_file():
        return read_answer(json.loads(answer.read_text(encoding='utf-8')))
    if not line:  # not even jax can be imported
        said.seek(0)
        return Recorded(error=f'jax cannot be used: {" ".join(said.read().split())[-_LAST:]}')
    if json.loads(line) == -signal.SIGALRM:
        return Recorded(error=f'it was stopped after {limit:g} s')
    text = answer.with_name(f'{answer.name}.stderr').read_text(encoding='utf-8', errors='replace')
    return Recorded(
        error=f'the process ended with {line.strip()}: {" ".join(text.split())[-_LAST:]}'
    )


def _link_packages(packages: Path) -> None:
    """Makes a folder from which the packages of this repository can be imported."""
    packages.mkdir()
    for package in _PACKAGES:
        (packages / package).symlink_to(_ABOVE / package)


def _write_task(
    program: CheckedProgram, folder: Path, root: Path, commit: FilesOfCommit | None = None
) -> tuple[Path, Path]:
    """Writes what a process reads, and returns its file and the file of the answer."""
    task, answer = (folder / f'{program.name}.{kind}.json' for kind in ('task', 'answer'))
    settings = {**dataclasses.asdict(program), 'num_devices': program.num_devices}
    settings['top'] = str(root if commit is None else commit.top)
    settings['present'] = '' if commit is None else str(commit.present)
    if program.script:
        command = shlex.split(program.script)
        is_whole = command[0].endswith('.py') or Path(command[0]).name.startswith('python')
        settings['script'] = command if is_whole else ['python', *command]
    task.write_text(json.dumps(settings), encoding='utf-8')
    return task, answer


def _record(
    program: CheckedProgram, root: Path, python: str, folder: Path, commit: FilesOfCommit | None
) -> Recorded:
    task, answer = _write_task(program, folder, root, commit)
    command = [python, '-P', '-m', 'meshwright.checking.worker', str(task), str(answer)]
    try:
        ended = subprocess.run(
            command,
            cwd=root,
            env=_environment(program, folder / 'packages'),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors='replace',
        )
    except OSError as error:
        return Recorded(error=f'{python} cannot be started: {error.strerror}')
    if not answer.is_file():
        said = ' '.join(ended.stderr.split())[-_LAST:]
        return Recorded(error=f'the process ended with {ended.returncode}: {said}')
    return read_answer(json.loads(answer.read_text(encoding='utf-8')))


def _environment(
    program: CheckedProgram, packages: Path, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a process: no accelerator is looked for, and there are enough devices."""
    given = {**os.environ, **(variables or {})}
    path = [str(packages), *filter(None, [given.get('PYTHONPATH')])]
    given |= {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': os.pathsep.join(path)}
    given.setdefault('JAX_NUM_CPU_DEVICES', str(program.num_devices))
    given.pop('JAX_COMPILATION_CACHE_DIR', None)
    if 'TPU_LIBRARY_PATH' not in (variables or {}) and _is_ours(given.get('TPU_LIBRARY_PATH', '')):
        del given['TPU_LIBRARY_PATH']
    return given


def _is_ours(library: str) -> bool:
    """Whether a compiler is the one of this environment, which jax names when it is imported.

    A process with the Python of another environment would compile with it, too.
    """
    return library.startswith(os.path.join(sys.prefix, ''))


def read_answer(answer: Mapping[str, Any]) -> Recorded:
    """What a process has answered."""
    files = frozenset(answer.get('files', ()))
    if 'error' in answer:
        return Recorded(error=answer['error'], files=files)
    return Recorded(
        files=files,
        record=Record.from_json(json.dumps(answer['record'])),
        forecast=Forecast.from_json(json.dumps(answer['forecast'])),
    )
