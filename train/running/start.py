"""The start of a run: its first step, its state and data, and the files that describe it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from etils import epath

from partitioning import TrainState
from train.checkpoints import Checkpoints, DamagedCheckpoint
from train.checkpoints.opening import find_checkpoint, open_restored
from train.checkpoints.reading import CheckpointReader
from train.checkpoints.steps.finding import t5x_steps
from train.data import Feed, LocalBatches, record
from train.errors import ConfigError, os_errors_as
from train.gin.text import write_gin_text
from train.machine.compiling import describe_options
from train.paths import beside, replacing
from train.processes.together import check_same_step
from train.reporting.reports import describe_variables
from train.running.changes import describe_changes, read_settings, settings_of, write_settings
from train.running.run import Run, initialize_some

if TYPE_CHECKING:
    from train.checkpoints.local.reading import LocalSteps


class Start(NamedTuple):
    """Where a run starts.

    Attributes:
      step: the last finished step, or 0.
      source: the checkpoints that contain it.
      restored: the step of the checkpoint to restore, or None if the run starts from scratch. It
        can differ from `step` if the settings leave out the step of the checkpoint.
      pending: the names of the evaluators that a signal has kept from finishing at this step.
      data_after: the step after which the data begins with its first row.
    """

    step: int
    source: CheckpointReader
    restored: int | None
    pending: tuple[str, ...] = ()
    scores: Mapping[str, float] = MappingProxyType({})
    data_after: int = 0


def find_start(run: Run, saved: Checkpoints) -> Start:
    """Finds the start of a run: its own newest checkpoint, another run's checkpoint, or step 0.

    Raises a ConfigError if the checkpoint cannot be continued with the data or the steps of the
    run, or if processes find different checkpoints.
    """
    config, changes = run.config, list[str]()
    source: CheckpointReader = saved
    local = None if saved.local is None else saved.local.steps.newest_step(run.console.say)
    with run.console.phase('looking for checkpoints'):
        step, restored = 0, _newest_saved(run, saved, local)
        if saved.local is not None and local is not None and restored == local:
            source = saved.local.steps
        if restored is not None:
            step = restored
            changes = record.check_same_as_before(run.directory, run.record, step)
        elif config.restore is not None:
            folder, restored = find_checkpoint(config.restore, run.console.say)
            source = open_restored(config.restore, folder)
            step = source.first_step(restored)
            if step >= config.total_steps > 0 and not config.relative_steps:
                raise ConfigError(
                    f'total_steps is {config.total_steps}, but the checkpoint of '
                    f'{config.restore.setting} {config.restore.path} is already at step {step}, '
                    f'which counts towards total_steps: use {step + config.total_steps} to train '
                    f'for {config.total_steps} more steps'
                )
            record.check_restored_tokenizer(folder, {'': run.data}, config.restore.setting)
    check_same_step(restored or 0)
    # Before anything is compiled or written.
    start = _start_from(run, saved, source, step, restored)
    start = _compare_with_run(run, saved, start)
    for change in changes:
        run.console.say(change)
    return start


def _newest_saved(
    run: Run, saved: Checkpoints, local: int | None, below: int | None = None
) -> int | None:
    """The newest step of MODEL_DIR or of the local checkpoints, which win if both have it.

    `local` is the newest local step. Raises a ConfigError if no good step is left anywhere.
    """
    try:
        found = saved.newest_step(run.console.say, below)
    except ConfigError as error:
        if local is None:
            raise
        run.console.say(f'{error}: step {local} of the local checkpoints is used')
        return local
    return max((step for step in (found, local) if step is not None), default=None)


def _compare_with_run(run: Run, saved: Checkpoints, start: Start) -> Start:
    """Compares the arrays of a checkpoint with the arrays of the run. Skips damaged checkpoints.

    Raises a ConfigError if they differ, and the settings do not say what to do about it.
    """
    while start.restored is not None:
        try:
            preflight = start.source.preflight(start.restored, run.plan.abstract_state)
        except DamagedCheckpoint as error:
            start = _older_start(run, saved, start, error)
            continue
        preflight.report(run.console)
        preflight.check()
        break
    return start


def _start_from(
    run: Run, saved: Checkpoints, source: CheckpointReader, step: int, restored: int | None
) -> Start:
    """The start from a checkpoint, with what a signal has left to do if the run has saved it."""
    data_after = 0
    if restored is not None and source.restarts_data(restored):
        data_after = step
    elif source.is_of_run:
        data_after = record.recorded_start(run.directory) if restored is not None else 0
    about = saved.record(restored) if source.is_of_run and restored is not None else None
    if about is None or not about.pending:
        return Start(step, source, restored, data_after=data_after)
    scores = {name: x for name, x in about.scores.items() if not name.startswith('train/')}
    return Start(step, source, restored, about.pending, scores, data_after)


def restore_state(run: Run, saved: Checkpoints, start: Start) -> tuple[TrainState | None, Start]:
    """Restores the state from which a run starts. A damaged checkpoint is skipped with a warning.

    Returns the state, or None if the run starts from scratch; and the start of the run, which is an
    older one if the checkpoint is damaged. Raises a ConfigError if the checkpoint has other arrays
    than the run, or if it is damaged and there is no older one.
    """
    initialize = functools.partial(initialize_some, run)
    while start.restored is not None:
        try:
            with run.console.phase('restoring the state', together=False):
                state = start.source.restore(start.restored, run.plan.abstract_state, initialize)
            return state, start
        except DamagedCheckpoint as error:
            start = _compare_with_run(run, saved, _older_start(run, saved, start, error))
    return None, start


def _older_start(run: Run, saved: Checkpoints, start: Start, damage: DamagedCheckpoint) -> Start:
    """The start from the next older checkpoint, before anything is written.

    Raises a DamagedCheckpoint if there is none, or if the settings name the damaged one.
    """
    source, restore, is_own = start.source, run.config.restore, start.source.is_of_run
    if not is_own and (restore is None or restore.is_one):
        raise damage
    run.console.say(f'{damage}: it is kept, and an older one is looked for')
    if saved.local is not None and is_own:
        source, older = _older_of_run(run, saved, saved.local.steps, start)
    else:
        older = source.newest_step(run.console.say, below=start.restored)
    check_same_step(older or 0)
    if older is None:
        raise damage
    step = older if is_own else source.first_step(older)
    return _start_from(run, saved, source, step, older)


def _older_of_run(
    run: Run, saved: Checkpoints, steps: LocalSteps, start: Start
) -> tuple[CheckpointReader, int | None]:
    """The next older step of MODEL_DIR or of the local checkpoints, and which of them has it."""
    assert start.restored is not None
    if start.source is saved:
        local, below = steps.chosen_step, start.restored
    else:  # MODEL_DIR may have the same step.
        local, below = steps.newest_step(run.console.say, start.restored), start.restored + 1
    older = _newest_saved(run, saved, local, below)
    return (steps if older is not None and older == local else saved), older


def roll_back(
    run: Run, saved: Checkpoints, newest: int | None, step: int
) -> tuple[TrainState, int]:
    """Restores a checkpoint of a run, as the state after a later step.

    The optimizer's own count of updates stays as it was saved, and the batches of the steps in
    between are passed over. Returns the state, and the step of its checkpoint, which is an earlier
    one if the newest is damaged.
    """
    state, start = restore_state(run, saved, Start(step, saved, newest))
    assert state is not None and start.restored is not None
    number, sharding = np.asarray(step, state.step.dtype), state.step.sharding
    number_of_step = jax.make_array_from_callback((), sharding, lambda _: number)
    return state.replace(step=number_of_step), start.restored


def open_feed(run: Run, start: Start) -> Feed:
    """Begins to read the batches of a run, from its start on."""
    config = run.config
    if start.data_after:
        run.console.say(f'the data begins with its first row after step {start.data_after:,}')
    layout = config.partitioner.get_data_layout(config.batch_size)
    batches = LocalBatches(run.rows, config.batch_size, layout.row_indices)
    return Feed(
        batches,
        config.partitioner,
        first_step=start.step,
        starts_after=start.data_after,
        prefetch=config.prefetch,
    )


def settings_before(run: Run, start: Start) -> dict[str, str]:
    """The settings with which a run was last started, or nothing if this one does not resume it."""
    if jax.process_index() != 0 or start.restored is None or not start.source.is_of_run:
        return {}
    return read_settings(run.directory, _description(run.directory)[0])


def tell_changes(
    run: Run, before: Mapping[str, str], told: Collection[str] | None = None
) -> frozenset[str]:
    """Says which settings of a run that resumes have changed.

    gin knows the settings of evaluators and writers only when these are opened. So the first call
    leaves out the settings that nothing has used yet, and the second one those that were `told`.
    Returns the names of all settings that have been used, or none if the run does not resume.
    """
    if not before:
        return frozenset()
    now = settings_of(run.config, closures=True)
    names = now.keys() if told is None else (before.keys() | now.keys()).difference(told)
    for line in describe_changes(before, now, names):
        run.console.say(line)
    return frozenset(now)


def write_run_files(run: Run, data_after: int = 0) -> dict[str, str]:
    """Creates the folder of a run, and writes its configuration, layout and data record.

    Returns the files that each checkpoint contains, too, by name. Other processes than 0 need none.
    Raises a ConfigError if the folder cannot be written.
    """
    folder, plan = run.directory, run.plan
    with (
        run.console.phase('writing the description of the run'),
        os_errors_as(f'MODEL_DIR {folder} cannot be written:'),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() != 0:
            return {}
        config, info = _description(folder)
        write_gin_text(folder, config.name)
        if not config.exists():
            write_settings(folder, settings_of(run.config, closures=True))
        compiled = '\n'.join(describe_options(plan.compiler_options))
        text = f'{run.audit}\n\n{describe_variables(plan.rows)}'
        with replacing(info) as unfinished:
            unfinished.write_text(f'{text}\n{compiled}\n' if compiled else text)
        with replacing(folder / 'plan.json') as unfinished:
            plan.save(unfinished)
        record.write_record(folder, run.record | {record.STARTS_AFTER: data_after})
        paths = {'config.gin': config} | {n: folder / n for n in ('plan.json', record.FILE)}
        return {name: path.read_text() for name, path in paths.items() if path.exists()}


def _description(folder: epath.Path) -> tuple[epath.Path, epath.Path]:
    """The files of a run's settings and layout. What T5X has written into its folder stays."""
    ours = (folder / record.FILE).exists() or not t5x_steps(folder)
    config, info = (
        folder / (name if ours and not (folder / beside(name)).exists() else beside(name))
        for name in ('config.gin', 'model-info.txt')
    )
    return config, info
