"""The parts of the training loop that `train` puts in order: what is due, and what is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from partitioning import TrainState
from train.checkpoints import Checkpoints
from train.decoding.predict import CanDecode
from train.evaluators import is_due, run_evaluators
from train.health import NotFinite
from train.objectives import NextToken
from train.run import Run
from train.runtime.gin_text import file_of_run
from train.runtime.writers import Writers


class Due(NamedTuple):
    """What a run does after a step.

    Attributes:
      evaluators: the evaluators that run, by name.
      other_evaluators: the rest of them.
      saving: whether the state is saved.
      recording: whether the training metrics are read and written, for which the host waits.
    """

    evaluators: dict[str, Any]
    other_evaluators: dict[str, Any]
    saving: bool
    recording: bool


def find_due(
    run: Run, evaluators: Mapping[str, Any], saved: Checkpoints, step: int, *, stopping: bool
) -> Due:
    """Finds what a run does after a step.

    Args:
      run: the run.
      evaluators: its prepared evaluators, by name.
      saved: its checkpoints.
      step: the step.
      stopping: whether the run stops after it.
    """
    last_step = run.config.total_steps
    due = {name: one for name, one in evaluators.items() if is_due(one, step, last_step)}
    others = {name: one for name, one in evaluators.items() if name not in due}
    saving = saved.is_due(step, ending=stopping or step == last_step)
    periodic = step % run.config.log_every == 0
    return Due(due, others, saving, bool(due) or saving or periodic or step == last_step)


def evaluate_and_write(
    evaluators: Mapping[str, Any], state: TrainState, step: int, writers: Writers
) -> dict[str, float]:
    """Runs evaluators, writes their scores as one record, and returns them."""
    scores = run_evaluators(evaluators, state, step)
    if scores:
        writers.write(step, scores)
    return scores


def report_skips(run: Run, skipped: Sequence[NotFinite]) -> dict[str, float]:
    """Prints the steps whose update was not applied, and returns their number as a metric."""
    if run.config.not_finite != 'skip':
        return {}
    if skipped:
        more, later = '', len(skipped) - 1
        if later:
            more = ', and so is 1 later step' if later == 1 else f', and so are {later} later steps'
        run.console.say(f'{skipped[0]}, whose update is skipped{more}')
    return {'train/skipped_steps': float(len(skipped))}


def report_results(run: Run, saved: Checkpoints, writers: Writers) -> None:
    """Prints the files of a run, and the commands that use them."""
    console, directory, objective = run.console, run.directory, run.config.objective
    console.files(
        {
            'checkpoints': saved.directory,
            **{f'metrics ({name})': path for name, path in writers.paths.items()},
            'layout of every array': file_of_run(directory, 'model-info.txt'),
            'layout as a plan': directory / 'plan.json',
            'data': directory / 'data.json',
            'configuration': file_of_run(directory, 'config.gin'),
        }
    )
    if run.data.tokenizer is None or not (directory / 'config.gin').exists():
        return
    console.heading('next')
    if isinstance(objective, NextToken):
        console.say(f"meshwright generate {directory} --prompt 'def '")
    elif isinstance(objective, CanDecode):
        console.say(f'meshwright predict {directory}')
    console.say(f'meshwright eval {directory}')
