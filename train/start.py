"""The start of a run: its first step, its compiled step, and the files that describe it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from partitioning import TrainState
from partitioning.aot.traced.flops import count_flops
from partitioning.programs.compiler_errors import own_compiler_errors
from partitioning.programs.partitioned import CompiledPartitionedCallable, PartitionedCallable
from train.agreements import agree_on_program
from train.checkpoints import Checkpoints, DamagedCheckpoint, RestoreConfig
from train.checkpoints.reading import CheckpointReader
from train.checkpoints.steps.finding import t5x_steps
from train.data import Feed, LocalBatches, record
from train.errors import ConfigError
from train.optimizers import learning_rate_of
from train.paths import replacing
from train.processes.together import check_same_step
from train.run import PlannedRun, Run, initialize_some
from train.runtime.compiling import describe_options
from train.runtime.gin_text import beside, write_gin_text
from train.runtime.memory import check_fits, memory_advice
from train.runtime.meter import peak_flops
from train.runtime.reports import describe_variables
from train.steps import make_eval_step, make_train_step


class Start(NamedTuple):
    """Where a run starts.

    Attributes:
      step: the last finished step, or 0.
      source: the checkpoints that contain it.
      restored: the step of the checkpoint to restore, or None if the run starts from scratch. It
        can differ from `step` if the settings leave out the step of the checkpoint.
      pending: the names of the evaluators that a signal has kept from finishing at this step.
      scores: the scores of those that had finished, by name.
    """

    step: int
    source: CheckpointReader
    restored: int | None
    pending: tuple[str, ...] = ()
    scores: Mapping[str, float] = MappingProxyType({})


def find_start(run: Run, saved: Checkpoints) -> Start:
    """Finds the start of a run: its own newest checkpoint, that of another run, or step 0.

    Raises:
      ConfigError: if the checkpoint cannot be continued with the data or the steps of the run, or
        if processes find different checkpoints.
    """
    config, changes = run.config, list[str]()
    source: CheckpointReader = saved
    with run.console.phase('looking for checkpoints'):
        step, restored = 0, saved.newest_step(run.console.say)
        if restored is not None:
            step = restored
            changes = record.check_same_as_before(run.directory, run.record, step)
        elif config.restore is not None:
            folder, restored = config.restore.find(run.console.say)
            source = config.restore.open(folder)
            step = source.first_step(restored)
            if config.total_steps and not config.relative_steps:
                _check_steps_left(config.restore, step, config.total_steps)
            record.check_restored_tokenizer(folder, {'': run.data}, config.restore.setting)
    check_same_step(restored or 0)
    # Before anything is compiled or written.
    start = _start_from(saved, source, step, restored)
    start = _compare_with_run(run, saved, start)
    for change in changes:
        run.console.say(change)
    return start


def _compare_with_run(run: Run, saved: Checkpoints, start: Start) -> Start:
    """Compares the arrays of a checkpoint with those of the run. A damaged one is skipped.

    Raises:
      ConfigError: if they differ, and the settings do not say what to do about it.
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
    saved: Checkpoints, source: CheckpointReader, step: int, restored: int | None
) -> Start:
    """The start from a checkpoint, with what a signal has left to do if the run has saved it."""
    about = saved.record(restored) if source is saved and restored is not None else None
    if about is None or not about.pending:
        return Start(step, source, restored)
    scores = {name: x for name, x in about.scores.items() if not name.startswith('train/')}
    return Start(step, source, restored, about.pending, scores)


def _check_steps_left(restore: RestoreConfig, restored_step: int, total_steps: int) -> None:
    """Checks that a run that starts from another run's checkpoint has steps left to train."""
    if restored_step >= total_steps:
        raise ConfigError(
            f'total_steps is {total_steps}, but the checkpoint of {restore.setting} '
            f'{restore.path} is already at step {restored_step}, which counts '
            f'towards total_steps: use {restored_step + total_steps} to train for {total_steps} '
            'more steps'
        )


def restore_state(run: Run, saved: Checkpoints, start: Start) -> tuple[TrainState | None, Start]:
    """Restores the state from which a run starts. A damaged checkpoint is skipped with a warning.

    Args:
      run: the run.
      saved: its checkpoints.
      start: its start.

    Returns:
      The state, or None if the run starts from scratch; and the start of the run, which is an older
      one if the checkpoint is damaged.

    Raises:
      ConfigError: if the checkpoint has other arrays than the run, or if it is damaged and there is
        no older one.
    """
    initialize = functools.partial(initialize_some, run)
    while start.restored is not None:
        try:
            with run.console.measuring('restoring the state'):
                state = start.source.restore(start.restored, run.plan.abstract_state, initialize)
            return state, start
        except DamagedCheckpoint as error:
            start = _compare_with_run(run, saved, _older_start(run, saved, start, error))
    return None, start


def _older_start(run: Run, saved: Checkpoints, start: Start, damage: DamagedCheckpoint) -> Start:
    """The start from the next older checkpoint, before anything is written.

    Raises:
      DamagedCheckpoint: if there is none, or if the settings name the damaged one.
    """
    source, restore, is_own = start.source, run.config.restore, start.source is saved
    if not is_own and (restore is None or restore.mode == 'specific'):
        raise damage
    run.console.say(f'{damage}: it is kept, and an older one is looked for')
    older = source.newest_step(run.console.say, below=start.restored)
    check_same_step(older or 0)
    if older is None:
        raise damage
    step = older if is_own else source.first_step(older)
    return _start_from(saved, source, step, older)


def roll_back(
    run: Run, saved: Checkpoints, newest: int | None, step: int
) -> tuple[TrainState, int]:
    """Restores a checkpoint of a run, as the state after a later step.

    The optimizer's own count of updates stays as it was saved.

    Args:
      run: the run.
      saved: its checkpoints.
      newest: the step of the checkpoint.
      step: the step number of the state. The batches of the steps in between are passed over.

    Returns:
      The state, and the step of its checkpoint, which is an earlier one if the newest is damaged.
    """
    state, start = restore_state(run, saved, Start(step, saved, newest))
    assert state is not None and start.restored is not None
    number, sharding = np.asarray(step, state.step.dtype), state.step.sharding
    number_of_step = jax.make_array_from_callback((), sharding, lambda _: number)
    return state.replace(step=number_of_step), start.restored


def open_feed(run: Run, first_step: int) -> Feed:
    """Begins to read the batches of a run.

    Args:
      run: the run.
      first_step: the last finished step, whose successor gets the first batch.
    """
    config = run.config
    layout = config.partitioner.get_data_layout(config.batch_size)
    batches = LocalBatches(run.rows, config.batch_size, layout.row_indices)
    return Feed(batches, config.partitioner, first_step=first_step, prefetch=config.prefetch)


class Programs(NamedTuple):
    """The compiled programs of a run.

    Attributes:
      train_step: the function (state, batch) -> (state, metrics).
      init: the function that makes the state from a random key, or None if it will be restored.
      flops: the FLOPs of the model in one step, or None if the peak of the devices is not known.
        They are three times those of the forward pass, so recomputation does not count.
    """

    train_step: CompiledPartitionedCallable
    init: Callable[[jax.Array], TrainState] | None
    flops: float | None


class Compilation:
    """A context in which the programs of a run are compiled while its body does something else.

    The programs are traced first, in this thread. Then only the compiler works in other threads.
    At the end of the context, its errors come before those of the body, as if it had run first.

    Attributes:
      programs: the compiled programs, after the end of the context.
    """

    programs: Programs

    def __init__(self, run: Run, start: Start):
        self._run, plan = run, run.plan
        mesh = run.config.partitioner.mesh
        check_fits(plan, run.config.partitioner)
        with run.console.phase('tracing the train step'):
            step = partition_train_step(run)
            lowered = step.lower(plan.abstract_state, dict(run.batch))
        agree_on_program(lowered)

        def compile_step() -> CompiledPartitionedCallable:
            with own_compiler_errors('train_step', mesh):
                return lowered.compile()

        self._pool = ThreadPoolExecutor(2)
        self._step: Future[CompiledPartitionedCallable] = self._pool.submit(compile_step)
        self._init: Future[Callable[..., Any]] | None = None
        if start.restored is None:
            self._init = self._pool.submit(plan.compile_init, run.key)

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None:
                with self._run.console.phase('waiting for the compiler'):
                    self._finish()
            elif issubclass(kind, Exception):
                self._finish()
        finally:
            # Nothing can stop a compiler, so nobody waits for one whose program is not needed.
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _finish(self) -> None:
        """Waits for the compiler, and raises its errors in the order of the programs."""
        run, plan, partitioner = self._run, self._run.plan, self._run.config.partitioner
        with memory_advice(plan, partitioner):
            step = self._step.result()
        check_fits(plan, partitioner, step)
        init = None if self._init is None else self._init.result()
        self.programs = Programs(step, init, _count_flops(run))


def compile_programs(run: Run, start: Start) -> Compilation:
    """Begins to compile the programs of a run, whose results are there at the end of the context.

    Usage:
      with compile_programs(run, start) as compilation:
        ...  # something else
      train_step, init, flops = compilation.programs

    Raises:
      ConfigError: if the state or the train step needs more memory than a device has.
    """
    return Compilation(run, start)


def _count_flops(run: Run) -> float | None:
    """The FLOPs of the model in one step, or None if the peak of the devices is not known."""
    if peak_flops(run.config.partitioner.mesh.devices.flat) is None:
        return None
    state, forward = run.plan.abstract_state, make_eval_step(run.config.objective)
    return 3 * count_flops(forward, state.params, state.flax_mutables, dict(run.batch))


def partition_train_step(run: PlannedRun) -> PartitionedCallable:
    """The function (state, batch) -> (state, metrics) of a run, laid out as its plan says."""
    config, plan, data_spec = run.config, run.plan, run.config.partitioner.data_partition_spec
    return config.partitioner.partition(
        make_train_step(
            config.objective,
            run.tx,
            key=run.key,
            num_microbatches=config.num_microbatches,
            data_spec=data_spec,
            learning_rate=lambda s: learning_rate_of(config.optimizer, s.opt_state, s.step - 1),
            weight_metrics=config.weight_metrics,
            gradient_dtype=config.gradient_dtype,
            accumulation_dtype=config.accumulation_dtype,
            not_finite=config.not_finite,
        ),
        in_axis_resources=(plan.specs, data_spec),
        out_axis_resources=(plan.specs, None),
        donate_argnums=(0,),
        compiler_options=run.compiler_options,
    )


def write_run_files(run: Run) -> dict[str, str]:
    """Creates the folder of a run, and writes its configuration, layout and data record.

    Returns:
      The files that each checkpoint contains, too, by name. Other processes than 0 need none.

    Raises:
      ConfigError: if the folder cannot be written.
    """
    with run.console.phase('writing the description of the run'):
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                write_gin_text(run.directory, _name_here(run, 'config.gin'))
                info = run.directory / _name_here(run, 'model-info.txt')
                compiled = '\n'.join(describe_options(run.plan.compiler_options))
                text = f'{run.plan.audit()}\n\n{describe_variables(run.plan.rows)}'
                with replacing(info) as unfinished:
                    unfinished.write_text(f'{text}\n{compiled}\n' if compiled else text)
                with replacing(run.directory / 'plan.json') as unfinished:
                    run.plan.save(unfinished)
                record.write_record(run.directory, run.record)
                names = {n: _name_here(run, n) for n in ('config.gin', 'plan.json', record.FILE)}
                paths = {name: run.directory / here for name, here in names.items()}
                return {name: path.read_text() for name, path in paths.items() if path.exists()}
        except OSError as error:
            raise ConfigError(
                f'MODEL_DIR {run.directory} cannot be written: {error.strerror or error}'
            ) from error
    return {}


def _name_here(run: Run, name: str) -> str:
    """The name of a file of this run. What T5X has written into its folder stays as it is."""
    other = beside(name)
    ours = (run.directory / record.FILE).exists() or not t5x_steps(run.directory)
    return name if ours and not (run.directory / other).exists() else other
