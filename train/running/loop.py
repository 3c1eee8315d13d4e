"""The functions that the training loop calls: what is due, evaluations, saves and reports."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from partitioning import TrainState
from train.checkpoints import Checkpoints
from train.decoding.starting import CanDecode
from train.errors import ConfigError
from train.evaluators.evaluator import is_due, run_evaluators
from train.objectives import NextToken
from train.paths import file_of_run, is_remote
from train.processes import signals
from train.processes.signals import RESTARTABLE, Interrupted, handling
from train.processes.together import agree_on, raise_on_all_processes
from train.reporting.writers import Writers
from train.running.run import Run
from train.running.start import Start
from train.running.stopping import NotFinite


class Due(NamedTuple):
    """What a run does after a step.

    Attributes:
      reading: whether the host waits for the training metrics and reads them.
      local: whether the state is saved on the hosts.
      stopping: whether a signal ends the run after this step. This saves the state as well, but
        writes no more metrics, so a resumed run has the same metrics as a run without signals.
    """

    evaluators: dict[str, Any]
    other_evaluators: dict[str, Any]
    saving: bool
    writing: bool
    reading: bool
    stopping: bool
    local: bool = False


def find_due(run: Run, evaluators: Mapping[str, Any], saved: Checkpoints, step: int) -> Due:
    """Finds what a run does after a step, given its prepared evaluators by name."""
    stopping, last = signals.received() is not None, step == run.config.total_steps
    due = {name: e for name, e in evaluators.items() if is_due(e, step, run.config.total_steps)}
    others = {name: one for name, one in evaluators.items() if name not in due}
    checkpoints = run.config.checkpoints
    # `saving` does not count here: a postponed save happens at another step in each run.
    writing = bool(due) or last or checkpoints.plans(step) or step % run.config.log_every == 0
    saving = saved.is_due(step, ending=last)
    saving = saving or (stopping and not last and checkpoints.saves_anything)
    local = saved.local is not None and saved.local.is_due(step)
    return Due(due, others, saving, writing, writing or saving or local, stopping, local)


def evaluate_at_start(
    run: Run, start: Start, evaluators: Mapping[str, Any], state: TrainState, writers: Writers
) -> dict[str, float]:
    """Runs the evaluators that are due before the first step, and returns what they write.

    If a signal interrupted evaluators at this step, only these run. If the run is finished, all
    print their scores. Otherwise, all run if `evaluate_first` is set or `total_steps` is 0. Raises
    an Interrupted if a signal ends one of them.
    """
    config, step, scores = run.config, start.step, dict[str, float]()
    state = run.to_evaluate(state)
    interrupted = {name: one for name, one in evaluators.items() if name in start.pending}
    if interrupted:
        run.console.say(
            f'step {step}: evaluating {", ".join(interrupted)}, which a signal interrupted'
        )
        scores = {**start.scores, **run_evaluators(interrupted, state, step)}
        writers.forget(step, interrupted)
    elif step >= config.total_steps > 0:
        run.console.say(
            f'already at step {step}; raise total_steps, or TRAIN_STEPS of a gin file, to continue'
        )
        run_evaluators(evaluators, state, step)
    elif config.evaluate_first or not config.total_steps:
        scores = run_evaluators(evaluators, state, step)
    if scores:
        writers.write(step, scores)
    return scores


@contextlib.contextmanager
def completing(saved: Checkpoints, say: Callable[[str], None]) -> Iterator[None]:
    """Completes the saves that have begun, however the body ends.

    `say` prints the failure of a save if the body fails, too; then the body's error is raised.
    Raises a ConfigError if only a save fails, even if `on_failure` is 'continue', because the last
    state of the run would be lost.
    """
    try:
        yield
    except BaseException:
        saved.wait()
        if failure := saved.failure():
            say(str(failure))
        saved.close()
        raise
    saved.wait()
    if failure := saved.failure():
        raise _ended_by(failure, saved, 'after its last step') from failure
    if saved.local is not None:
        saved.local.finish(max(saved.steps(), default=None) if jax.process_index() == 0 else None)
    saved.close()


def report_failed_save(run: Run, saved: Checkpoints, step: int) -> None:
    """Prints why a save in the background has failed, if one has.

    All processes must call it together. Raises a ConfigError if `CheckpointConfig.on_failure` is
    'stop'.
    """
    try:
        with raise_on_all_processes():
            if failure := saved.failure():
                raise failure
    except ConfigError as error:
        if run.config.checkpoints.on_failure == 'stop':
            raise _ended_by(error, saved, f'at step {step}') from error
        run.console.say(f'{error}: training continues, and the next save is tried when it is due')


class StoreFailed(ConfigError):
    """A store does not keep checkpoints now. The same command may succeed later."""

    exit_code = RESTARTABLE


def _ended_by(failure: ConfigError, saved: Checkpoints, when: str) -> ConfigError:
    kept = 'the same command resumes from the newest checkpoint'
    with contextlib.suppress(OSError):  # What has failed may be all of the store.
        newest = max(saved.steps(), default=None)
        kept = 'there is no other checkpoint'
        if newest is not None:
            kept = f'the same command resumes from the checkpoint of step {newest}'
    ended = f'{failure}, so the run ends {when}; {kept}'
    go_on = "set CheckpointConfig.on_failure = 'continue'"
    if is_remote(saved.directory):
        return StoreFailed(f'{ended}: make sure that the store works, or {go_on}')
    return ConfigError(f'{ended}: free space, or {go_on}')


def find_newest(saved: Checkpoints) -> int | None:
    """Waits for all saves, and returns the step of the newest good checkpoint, or None.

    All processes must call it together. Process 0 decides, because it completes checkpoints.
    """
    return agree_on(saved.latest_step())


def report_skips(run: Run, skipped: Sequence[NotFinite], writers: Writers) -> None:
    """Prints in one line which updates were skipped, and writes a metric for each such step."""
    if skipped:
        later = len(skipped) - 1
        more = f' (and {later} more)' if later else ''
        run.console.say(f'{skipped[0]}: its update is skipped{more}')
    for one in skipped:
        writers.write(one.step, {'train/skipped': 1.0})


def evaluate_until_signal(
    evaluators: Mapping[str, Any], state: TrainState, step: int, writers: Writers
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Runs evaluators until a signal arrives, and writes their scores as one record.

    Returns the scores, and the names of the evaluators that did not finish because of a signal. If
    there are any, nothing is written: the resumed run writes the whole record.
    """
    scores, pending = dict[str, float](), list(evaluators)
    with contextlib.suppress(Interrupted):
        for name, evaluator in evaluators.items():
            scores |= run_evaluators({name: evaluator}, state, step)
            pending.remove(name)
    if scores and not pending:
        writers.write(step, scores)
    return scores, tuple(pending)


def make_interruption(
    run: Run, saved: Checkpoints, step: int, pending: Sequence[str]
) -> Interrupted:
    """Waits for the last save, and returns the error with which a run ends after a signal."""
    number, by, newest = signals.received(), handling.receiver, find_newest(saved)
    assert number is not None
    when = f'after step {step} of {run.config.total_steps}'
    if pending:
        when += f', before its evaluation ({", ".join(pending)})'
    if newest == step:
        return Interrupted(number, f'{when}, saved in {saved.path(step)}', by)
    last = 'there is no checkpoint' if newest is None else f'the newest checkpoint is of {newest}'
    return Interrupted(number, f'{when}, which was not saved ({last})', by)


def report_results(run: Run, saved: Checkpoints, writers: Writers) -> None:
    """Prints which files a run has written, and which commands use them."""
    console, directory, objective = run.console, run.directory, run.config.objective
    console.files(
        {
            'checkpoints': directory / 'checkpoints',
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
        console.say(shlex.join(['meshwright', 'generate', str(directory), '--prompt', 'def ']))
    elif isinstance(objective, CanDecode):
        console.say(shlex.join(['meshwright', 'predict', str(directory)]))
    console.say(shlex.join(['meshwright', 'eval', str(directory)]))
