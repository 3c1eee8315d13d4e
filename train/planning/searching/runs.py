"""The search for a run: its candidates as gin files, what is written, and what is remembered."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import NamedTuple

from etils import epath

from meshwright.time import constants_of
from partitioning.amounts import bytes_str
from partitioning.hardware import parse_topology
from train.errors import ConfigError
from train.paths import replacing
from train.planning.forecasting import Machine
from train.planning.searching.candidate import Candidate
from train.planning.searching.compiling import compile_in_new_process, versions
from train.planning.searching.frontier import draw_search
from train.planning.searching.gin_file import write_gin
from train.planning.searching.memory import file_name, remember, remember_predictions
from train.planning.searching.predicting import Source, plan_candidate, predict_step, read_config
from train.planning.searching.run_sizes import RunSizes, sizes_of
from train.planning.searching.search import Outcome, Prediction, SearchResult, search
from train.planning.searching.space import Choices, choices_for, list_space
from train.planning.searching.tables import summary_lines

BEST, RESULT, PICTURE = 'best.gin', 'search.json', 'search.png'
_GIN_FOLDER = 'candidates'


class Searched(NamedTuple):
    """A search of a run, and the files that it has written.

    Attributes:
      result: what was found.
      files: the files, by what they are.
    """

    result: SearchResult
    files: dict[str, epath.Path]


def search_run(
    source: Source,
    machine: Machine,
    folder: epath.Path,
    *,
    best: int = 8,
    choices: Choices | None = None,
    compile_text: Callable[[str], Outcome] | None = None,
    say: Callable[[str], None] = print,
) -> Searched:
    """Searches the settings with which a run is fastest on a machine.

    What the compiler says is kept in the folder: a second search there compiles nothing again.

    Args:
      source: the gin settings of the run.
      machine: the machine, which need not be here.
      folder: the folder for the winner as a gin file, the picture, and everything that was found.
      best: how many candidates to compile at most.
      choices: the values of each setting, by default those that matter on the chip.
      compile_text: compiles what a request describes, by default in a process of its own.
      say: prints a line about the progress.

    Raises:
      ConfigError, ValueError: if the settings of the run cannot be honoured on the machine.
    """
    chip, _ = parse_topology(machine.topology)
    devices = machine.describe().devices
    run = sizes_of(read_config(source, machine), len(devices), machine.num_slices)
    space = list_space(run, choices or choices_for(chip.name))
    say(f'{len(space.candidates)} candidates on {machine}, {sum(space.dropped.values())} dropped')

    def text_of(candidate: Candidate) -> str:
        return write_gin(candidate, run, source.files, source.bindings)

    def place(candidate: Candidate) -> Source:
        """The gin file of a candidate, which takes the place of those of the run."""
        text = text_of(candidate)
        file = folder / _GIN_FOLDER / f'{file_name(candidate, text)}.gin'
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as unfinished:
                unfinished.write_text(text)
        return dataclasses.replace(source, files=[str(file)], bindings=[])

    def request(candidate: Candidate) -> str:
        """What decides the outcome of a compilation, and of the forecast of its time."""
        decisive = {
            'source': dataclasses.asdict(place(candidate)),
            'machine': str(machine),
            'text': text_of(candidate),
            'versions': versions(),
            'constants': dataclasses.asdict(constants_of(chip)),
        }
        return json.dumps(decisive, indent=1)

    def predict_new(candidate: Candidate) -> Prediction:
        return predict_step(plan_candidate(read_config(place(candidate), machine), machine))

    predict = remember_predictions(folder, request, predict_new)

    compiler = compile_text or compile_in_new_process(folder)
    result = search(
        space,
        lambda candidate: predict(candidate.program),  # formulas know no compiler options
        remember(folder, request, compiler),
        limit=chip.hbm_bytes_per_device,
        best=best,
        say=say,
    )
    return Searched(result, _write(result, run, source, machine, folder))


def _write(
    result: SearchResult, run: RunSizes, source: Source, machine: Machine, folder: epath.Path
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(files['search']) as unfinished:
            unfinished.write_text(json.dumps(held, indent=1) + '\n')
        if result.winner is not None:
            files['winner'] = folder / BEST
            text = write_gin(
                result.winner.candidate,
                run,
                source.files,
                source.bindings,
                _comment(result, machine),
            )
            with replacing(files['winner']) as unfinished:
                unfinished.write_text(text)
        try:
            draw_search(result, folder / PICTURE, title=f'{machine}: {len(found)} candidates')
            files['picture'] = folder / PICTURE
        except RuntimeError:  # matplotlib is optional
            pass
    except OSError as error:
        raise ConfigError(f'--out {folder}: {error.strerror or error}') from error
    return files


def _comment(result: SearchResult, machine: Machine) -> list[str]:
    winner = result.winner
    assert winner is not None and winner.outcome is not None
    return [
        f'The fastest of {len(result.found)} candidates for {machine}, by forecast: '
        f'{winner.seconds:.3f} s per step, {bytes_str(winner.outcome.peak or 0)} per device.',
        f'{winner.candidate}',
        summary_lines(result)[-1] + '.',
    ]
