"""Searches for the fastest settings of a run: reads the request, keeps and writes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from etils import epath

from meshwright.time import constants_of
from partitioning.amounts import bytes_str
from train.config import TrainConfig
from train.errors import first_line, os_errors_as
from train.paths import replacing
from train.planning.candidates import Candidate, change_run, sizes_of
from train.planning.forecasts import forecast_run, plan_step, predict_step
from train.planning.machines import Machine
from train.planning.searching import Outcome, Prediction, SearchResult, search
from train.planning.space import Choices, choices_for, list_space
from train.planning.tables import draw_search, summary_lines

BEST, RESULT, PICTURE, REMEMBERED = 'best.gin', 'search.json', 'search.png', 'remembered.json'
# A forecast depends on the versions of what compiles it.
_COMPILERS = ('jax', 'jaxlib', 'libtpu', 'jax-cuda13-pjrt', 'jax-cuda12-pjrt')

# Compiles a candidate, and says what came out.
Compile = Callable[[Candidate], Outcome]
# Writes a candidate as text, below lines of a comment.
Write = Callable[[Candidate, Sequence[str]], str]


class Searched(NamedTuple):
    """A search of a run, and the files that it has written.

    `files` names the files by what they are.
    """

    result: SearchResult
    files: dict[str, epath.Path]


def search_run(
    config: TrainConfig,
    machine: Machine,
    folder: epath.Path,
    *,
    best: int = 8,
    choices: Choices | None = None,
    compile_candidate: Compile | None = None,
    write: Write | None = None,
    say: Callable[[str], None] = print,
) -> Searched:
    """Searches the settings with which a run is fastest on a machine.

    The winner as settings is `change_run(config, searched.result.winner.candidate, machine)`.

    Args:
      folder: the folder for the picture and everything that was found.
      best: how many candidates to compile at most.
      choices: the values of each setting, by default those that matter on the chip.
      compile_candidate: compiles a candidate, by default in this process. A compiler can take
        gigabytes, and can end its process.
      write: writes a candidate as a file, such as gin. With it, the winner is written to the
        folder, and what the compiler says is kept there, so that a second search compiles nothing
        again. The text tells one run from another.
      say: prints a line about the progress.

    Raises:
      ConfigError, ValueError: if the settings of the run cannot be honoured on the machine.
    """
    num_devices = len(machine.describe().devices)
    space = list_space(
        sizes_of(config, num_devices, machine.num_slices), choices or choices_for(machine.chip.name)
    )
    say(f'{len(space.candidates)} candidates on {machine}, {sum(space.dropped.values())} dropped')

    memory = _Memory(folder / REMEMBERED, machine, write)
    compiler = compile_candidate or functools.partial(compile_changed, config, machine=machine)

    def predict(candidate: Candidate) -> Prediction:
        return predict_step(plan_step(change_run(config, candidate, machine)))

    result = search(
        space,
        # Formulas know no compiler options.
        lambda one: Prediction(**memory.recall('predicted', one.program, predict)),
        lambda one: Outcome(**memory.recall('compiled', one, compiler)),
        limit=machine.chip.hbm_bytes_per_device,
        best=best,
        say=say,
    )
    memory.save()
    return Searched(result, _write_files(result, machine, folder, write))


def compile_changed(config: TrainConfig, candidate: Candidate, machine: Machine) -> Outcome:
    """Compiles a run with the settings of a candidate, in this process."""
    try:
        forecast = forecast_run(change_run(config, candidate, machine), machine)
    except ValueError as error:
        return Outcome(fits=False, error=first_line(error))
    fits, peak, time = forecast.fits is not False, forecast.memory.peak, forecast.time
    if time is None:
        return Outcome(fits=fits, peak=peak)
    return Outcome(fits=fits, peak=peak, seconds=time.seconds, low=time.low, high=time.high)


class _Memory:
    """What earlier searches in a folder have found out, in one file.

    An entry is valid as long as the settings, the machine and the compilers are the same. `write`
    writes a candidate as text; without it, nothing is kept in the file.
    """

    def __init__(self, file: epath.Path, machine: Machine, write: Write | None):
        self.file, self.machine, self.write = file, machine, write
        known = json.loads(file.read_text()) if write is not None and file.exists() else {}
        self.held: dict[str, dict[str, Any]] = {'predicted': {}, 'compiled': {}} | known

    def recall(
        self, kind: str, candidate: Candidate, find_out: Callable[[Candidate], Any]
    ) -> dict[str, Any]:
        """Returns the fields of what is known about a candidate, or of what is found out now."""
        known, key = self.held[kind], self.key(candidate)
        if key not in known:
            known[key] = dataclasses.asdict(find_out(candidate))
            if kind == 'compiled' or len(known) % 25 == 0:  # formulas take seconds
                self.save()
        return known[key]

    def key(self, candidate: Candidate) -> str:
        """A name for what is known about a candidate, readable and unique."""
        decisive = {
            'machine': str(self.machine),
            'text': repr(candidate) if self.write is None else self.write(candidate, ()),
            'versions': _versions(),
            'constants': dataclasses.asdict(constants_of(self.machine.chip)),
        }
        words = re.sub(r'[^a-z0-9]+', '-', str(candidate).lower()).strip('-')
        digest = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
        return f'{words[:60]}-{digest[:10]}'

    def save(self) -> None:
        if self.write is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.file, json.dumps(self.held, indent=1) + '\n')


@functools.cache
def _versions() -> dict[str, str]:
    """The versions of the compilers that are installed."""
    found = {}
    for name in _COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _replace(file: epath.Path, text: str) -> None:
    with replacing(file) as unfinished:
        unfinished.write_text(text)


def _write_files(
    result: SearchResult, machine: Machine, folder: epath.Path, write: Write | None
) -> dict[str, epath.Path]:
    """Writes what was found, and returns the files."""
    files = {'search': folder / RESULT}
    found = [dataclasses.asdict(one) | {'name': str(one.candidate)} for one in result.found]
    held = {
        'machine': str(machine),
        'limit': result.limit,
        'bound': result.bound,
        'gap': result.gap,
        'num_compiled': result.num_compiled,
        'dropped': dict(result.dropped),
        'found': found,
    }
    with os_errors_as(f'--out {folder} cannot be written:'):
        folder.mkdir(parents=True, exist_ok=True)
        _replace(files['search'], json.dumps(held, indent=1) + '\n')
        if result.winner is not None and write is not None:
            files['winner'] = folder / BEST
            _replace(files['winner'], write(result.winner.candidate, _comment(result, machine)))
        with contextlib.suppress(RuntimeError):  # matplotlib is optional
            draw_search(result, folder / PICTURE, title=f'{machine}: {len(found)} candidates')
            files['picture'] = folder / PICTURE
    return files


def _comment(result: SearchResult, machine: Machine) -> list[str]:
    """What stands above the settings of the winner."""
    winner = result.winner
    assert winner is not None and winner.outcome is not None
    return [
        f'The fastest of {len(result.found)} candidates for {machine}, by forecast: '
        f'{winner.seconds:.3f} s per step, {bytes_str(winner.outcome.peak or 0)} per device.',
        f'{winner.candidate}',
        summary_lines(result)[-1] + '.',
    ]
