"""Makes the record of one program: `python -m meshwright.checking.worker TASK ANSWER`.

It runs in a process of its own, with the Python of an environment that need not have this package,
in the root of the repository. TASK and ANSWER are files of JSON. With more pairs of files, each
program has a process of its own that begins with jax imported; it may take LIMIT seconds:
`python -m meshwright.checking.worker --limit=LIMIT TASK ANSWER [TASK ANSWER ...]`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.records.record import Record, RecordedNote
from meshwright.report.forecasts import Forecast
from meshwright.user_lines import is_library, short_source

if TYPE_CHECKING:
    from meshwright.dry.compiling import CompiledFunction


def main(task_file: str, answer_file: str) -> None:
    """Reads a task, and writes its record and forecast, or why there is none."""
    task = json.loads(Path(task_file).read_text(encoding='utf-8'))
    sys.path[0] = os.getcwd()  # the repository, in place of the current folder's ''
    opened = OpenedFiles(Path(task['top']))
    if task['present']:
        _prefer_commit(Path(task['present']), Path(task['top']))
    answer: dict[str, Any]
    try:
        made, forecast = (record_script if task['script'] else record_function)(task)
        answer = {'record': made.as_dict(), 'forecast': forecast.as_dict()}
    except (Exception, SystemExit) as error:
        answer = {'error': _one_line(error)}
    answer['files'] = opened.list_files()
    Path(answer_file).write_text(json.dumps(answer), encoding='utf-8')


def _prefer_commit(present: Path, folder: Path) -> None:
    """Lets modules come from the files of a commit, and from the present ones if it has none.

    An editable installation has put folders of the present files on the path.
    """
    for i, entry in reversed([*enumerate(sys.path)]):
        path = Path(entry).resolve()
        if entry and path.is_relative_to(present):
            sys.path.insert(i, str(folder / path.relative_to(present)))
    sys.path.append(str(present))


def answer_in_turn(limit: float, files: Sequence[str]) -> None:
    """Answers several tasks, each in a copy of this process, and prints a line after each.

    Args:
      limit: the seconds that a task may take.
      files: the files of the tasks and of the answers in turn.
    """
    import meshwright.records.recording  # noqa: F401  (the copies have it, and jax)

    warnings.filterwarnings('ignore', message=r'.*os\.fork')
    for task_file, answer_file in zip(files[::2], files[1::2], strict=True):
        child = os.fork()
        if not child:
            with open(f'{answer_file}.stderr', 'wb') as said:
                os.dup2(said.fileno(), 2)
            _use_devices(json.loads(Path(task_file).read_text(encoding='utf-8')))
            main(task_file, answer_file)
            os._exit(0)
        print(json.dumps(_wait(child, limit)), flush=True)


def _use_devices(task: Mapping[str, Any]) -> None:
    """Makes as many virtual devices as a task needs, before jax has made any."""
    import jax

    jax.config.update('jax_num_cpu_devices', task['num_devices'])


def _wait(child: int, limit: float) -> int:
    """Waits for a process, kills it after some time, and returns its exit status."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM


def record_function(task: Mapping[str, Any]) -> tuple[Record, Forecast]:
    """The record of what a function returns: a program and its arguments."""
    from meshwright.records.recording import record_call

    module, _, name = task['function'].partition(':')
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition('.')[0] and error.name != module:
            raise
        raise ValueError(
            f'there is no module {module}: function = "{task["function"]}" is imported from the '
            'folder of pyproject.toml'
        ) from error
    make = getattr(loaded, name, None)
    if make is None:
        raise ValueError(f'module {module} has no function {name}')
    made = make() if callable(make) else make
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], tuple | list):
        raise ValueError(
            f'{task["function"]} returns {type(made).__name__}: return the jitted function and the '
            'tuple of its arguments, such as `return step, (state, batch)`'
        )
    settings = {key: task[key] for key in ('num_slices', 'axes', 'compile', 'on_cpu')}
    return record_call(made[0], made[1], topology=task['topology'] or None, **settings)


def record_script(task: Mapping[str, Any]) -> tuple[Record, Forecast]:
    """The record of the largest training step that a script compiles."""
    import dataclasses

    from meshwright.calls.compiling import Program
    from meshwright.calls.plain_call import list_held
    from meshwright.dry.command import read_command
    from meshwright.dry.machine import Machine
    from meshwright.dry.reporting import forecast_function, mesh_of
    from meshwright.dry.script import Script, run_script
    from meshwright.dry.summary import compiled_again
    from meshwright.records.recording import record_program
    from partitioning.hardware import describe_topology

    topology = describe_topology(task['topology'], num_slices=task['num_slices'])
    script = Script(**read_command(task['script'], 'meshwright dry'))
    stdout, sys.stdout = sys.stdout, sys.stderr  # what the script prints is not the answer
    try:
        run = run_script(Machine(topology=topology), script)
    finally:
        sys.stdout = stdout
    if run.ending == 'refused':
        raise ValueError(run.message)
    if run.error is not None:
        raise run.error
    steps = [one for one in run.functions if one.flops or one.out_of_memory is not None]
    if not steps:
        raise ValueError(f'{script.name} compiled nothing for {task["topology"]}')
    found = max(steps, key=lambda one: (one.trains, one.flops))
    forecast, mesh = forecast_function(found), mesh_of(found)
    program = Program(
        traced=found.call, compiled=found.executable, out_of_memory=found.out_of_memory
    )
    held = list_held(found.call, mesh)
    made = record_program(forecast, program, mesh, held, _results(found))
    again = tuple(
        RecordedNote(what=line.partition(': ')[2] or line, why=line)
        for line in compiled_again(run.functions)
    )
    return dataclasses.replace(made, recompiled=again), forecast


def _results(found: CompiledFunction) -> tuple[Any, ...]:
    """The sharding of each result, as compiled, or as stated if a program does not fit."""
    from meshwright.dry.reporting import results_of

    compiled = results_of(found)
    return found.call.results if compiled is None else compiled


def _one_line(error: BaseException) -> str:
    """An error with the line of the user's that raised it."""
    text = ' '.join(str(error).split()) or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f'{frame.filename}:{frame.lineno}' for frame in frames]
    own = [line for line in lines if not is_library(line) and not line.startswith('<')]
    if isinstance(error, ValueError) and not own:
        return text
    kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
    place = f'{short_source(own[-1])}: ' if own else ''
    return f'{place}{kind}{text}'


class OpenedFiles:
    """Notes the files of a folder that this process opens from now on, and its modules.

    Files that other processes open are not seen.

    Args:
      folder: the folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder.resolve()
        self._opened: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == 'open' and isinstance(arguments[0], str):
            self._opened.add(arguments[0])

    def list_files(self) -> list[str]:
        """Their paths from the folder."""
        modules = [getattr(module, '__file__', None) for module in list(sys.modules.values())]
        found = set()
        for path in [*self._opened, *modules]:
            if not isinstance(path, str) or path.endswith('.pyc'):
                continue
            whole = Path(os.path.abspath(path))
            for one in {whole, whole.resolve()}:
                if one.is_relative_to(self._folder):
                    found.add(str(one.relative_to(self._folder)))
        return sorted(found)


if __name__ == '__main__':
    if sys.argv[1].startswith('--limit='):
        sys.path[0] = os.getcwd()
        answer_in_turn(float(sys.argv[1].removeprefix('--limit=')), sys.argv[2:])
    else:
        main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a script may never end
