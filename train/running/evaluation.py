"""Scores of a checkpoint, from the same evaluators as during training."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import closing

import jax

from partitioning import TrainState
from train.checkpoints.config import RestoreConfig
from train.checkpoints.opening import find_checkpoint, open_checkpoints, open_restored
from train.checkpoints.reading import CheckpointReader, with_dtype
from train.config import TrainConfig
from train.data import record
from train.errors import ConfigError
from train.evaluators.evaluator import prepare_evaluators, run_evaluators
from train.gin.text import write_gin_text
from train.optimizers import AveragedState
from train.paths import as_folder
from train.processes.together import check_same_step, raise_on_all_processes
from train.reporting.writers import open_writers
from train.running.run import Run, initialize_some, prepare


def evaluate(
    config: TrainConfig, *, restore: RestoreConfig | None = None, output_dir: str | None = None
) -> dict[str, float]:
    """Runs the evaluators of a run on a checkpoint. It restores no optimizer state.

    Args:
      config: the settings of the run. The mesh may differ from the mesh of the training.
      restore: the checkpoint, by default the newest one of the run.
      output_dir: the folder for the scores, which are written to `<output_dir>/<step>`. By default,
        they are only printed and returned.

    Returns:
      The scores by name, such as 'eval/loss'.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured, or if there is no checkpoint.
    """
    with raise_on_all_processes():
        folder = None if output_dir is None else as_folder('output_dir', output_dir)
    run = prepare(config)
    if restore is not None and restore.dtype is not None:
        program = run.plan.program
        assert program is not None
        abstract = program.abstract_state
        abstract = abstract.replace(params=with_dtype(abstract.params, restore.dtype))
        plan = dataclasses.replace(run.plan, program=program._replace(named_state=abstract))
        run = dataclasses.replace(run, plan=plan)
    state = restore_for_evaluation(run, restore)
    step = int(state.step)
    scores = run_evaluators(prepare_evaluators(run), state, step)
    if folder is not None:
        directory = folder / str(step)
        with run.console.phase('writing the scores'):
            directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                write_gin_text(folder)
            writers = open_writers(config.writers, directory, step - 1)
        with closing(writers):
            writers.write(step, scores)
        run.console.files(writers.paths)
    return scores


def restore_for_evaluation(run: Run, restore: RestoreConfig | None = None) -> TrainState:
    """Restores a state with the step, the parameters and other variables. Its `opt_state` is None.

    The parameters are their averages, if the run keeps these and evaluates them. Raises a
    ConfigError if there is no checkpoint, or if it belongs to another model or tokenizer.
    """
    saved: CheckpointReader
    with run.console.phase('looking for checkpoints'):
        if restore is None:
            own = open_checkpoints(run.config.checkpoints, run.directory)
            newest = own.newest_step(run.console.say)
            if newest is None:
                raise ConfigError(f'{run.directory} has no complete checkpoint to evaluate')
            saved, step = own, newest
        else:
            folder, step = find_checkpoint(restore, run.console.say)
            saved = open_restored(restore, folder)
            record.check_restored_tokenizer(folder, run.evaluated, restore.setting)
    check_same_step(step)
    abstract, initialize = run.plan.abstract_state, functools.partial(initialize_some, run)
    if isinstance(abstract, AveragedState) and not run.config.evaluate_ema:
        abstract = abstract.replace(ema=None)
    with closing(saved):
        preflight = saved.preflight(step, abstract, variables_only=True)
        preflight.report(run.console)
        preflight.check()
        state = saved.restore(step, abstract, initialize, variables_only=True)
    run.console.say(f'restored {saved.origin(step)}', style='bold')
    return run.to_evaluate(state)
