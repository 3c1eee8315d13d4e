"""The compiled programs of a run, and what all processes must agree on before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from partitioning import Plan, TrainState
from partitioning.hardware.compilers import own_compiler_errors
from partitioning.plan import plan_diff
from partitioning.products.flops import count_flops
from partitioning.programs.partitioned_function import (
    CompiledPartitionedCallable,
    PartitionedCallable,
)
from train.config import TrainConfig
from train.errors import ConfigError
from train.machine.host_memory import release_freed_memory
from train.objectives.objective import make_eval_step
from train.optimizers import AveragedState, learning_rate_of, update_average
from train.paths import as_path, file_of_run
from train.processes.activity import awaiting_threads, calling_compiler
from train.processes.disagreements import digest
from train.processes.together import check_same, check_shared_folder
from train.reporting.memory import check_fits, memory_advice
from train.reporting.meter import peak_flops
from train.running.changes import settings_of
from train.running.run import PlannedRun, Run, prepare
from train.running.start import Start
from train.running.steps import make_train_step

_ADVICE = 'start the same command, with the same files, on all hosts'


def agree_on_settings(config: TrainConfig) -> None:
    """Checks that all processes have the same settings, before anything is made of them."""
    if jax.process_count() > 1:
        check_same('comparing the settings', settings_of(config), _ADVICE)


def agree_on_layout(run: Run) -> None:
    """Checks that all processes have the same devices, the same plan and the same MODEL_DIR."""
    if jax.process_count() == 1:
        return
    mesh = run.config.partitioner.mesh
    order = [(d.process_index, d.id, d.device_kind) for d in mesh.devices.flat]
    arrays = {
        f'layout of {row.path}': f'{row.shape} {row.dtype} {row.spec}' for row in run.plan.rows
    }
    axes = ', '.join(f'{name}={size}' for name, size in mesh.shape.items())
    values = {'mesh': axes, 'order of the devices': order, **arrays}
    check_same('planning the layout', values, _ADVICE)
    check_shared_folder('MODEL_DIR', run.directory)


def agree_on_program(lowered: Any) -> None:
    """Checks that all processes are about to compile the same train step.

    It finds what no setting shows: another version of the user's own code, for example, or a
    learning rate that a closure holds.
    """
    if jax.process_count() > 1:
        text = {'program of the train step': f'hash {digest(lowered.as_text())}'}
        check_same('tracing the train step', text, 'is the code of all hosts the same?')


class UnexpectedLayout(ConfigError):
    """The layout of a run differs from the expected one.

    `details` are the differences, as lines of text, which a command prints after the message. It
    has no default in the class, which would hide the value in the copies that gin makes of errors.
    """

    def __init__(self, message: str, details: str):
        super().__init__(message)
        self.details = details


def check_plan(plan: Plan, expected: str | os.PathLike[str]) -> None:
    """Checks that a run is laid out as a plan file says.

    Other compiler options are accepted, because they depend on the kind of the devices, and the
    plan may have been made on a machine without them. They are listed with other differences.
    `expected` is a plan file, or the folder of a run.

    Raises:
      UnexpectedLayout: if the meshes or the arrays differ.
      ConfigError: if there is no such file.
      ValueError: if it is not a plan.
    """
    path = as_path('--expect_plan', expected)
    path = file_of_run(path, 'plan.json') if path.is_dir() else path
    if not path.exists():
        raise ConfigError(
            f'--expect_plan {path}: no such file; write the plan.json of a run, or '
            'the precompile-plan.json of `meshwright precompile`'
        )
    changes = plan_diff(Plan.load(path), plan)
    if not changes.changes_layout:
        return
    counts = {
        'are missing': len(changes.removed),
        'are new': len(changes.added),
        'differ': len(changes.changed),
    }
    found = [f'{count:,} {what}' for what, count in counts.items() if count]
    arrays = f'of {len(plan.rows):,} arrays, {" and ".join(found)}' if found else 'the mesh differs'
    raise UnexpectedLayout(
        f'the layout is not the one of --expect_plan {path}: {arrays}; nothing has been written. '
        'Undo the change that caused it, or save the new plan in its place',
        str(changes),
    )


class Programs(NamedTuple):
    """The compiled programs of a run.

    Attributes:
      train_step: the function (state, batch) -> (state, metrics).
      init: the function that makes the state from a random key, or None if it will be restored.
      flops: the FLOPs of the model in one step, or None if the peak of the devices is not known.
        The forward pass is counted three times, so recomputation does not count.
    """

    train_step: CompiledPartitionedCallable
    init: Callable[[jax.Array], TrainState] | None
    flops: float | None


class Compilation:
    """A context in which the programs of a run are compiled while its body does something else.

    Usage:
      with Compilation(run, start) as compilation:
        ...  # something else
      train_step, init, flops = compilation.programs

    The programs are traced first, in this thread. Then only the compiler works in other threads.
    At the end of the context, errors of the compiler come before errors of the body, as if the
    compiler had run first.

    Attributes:
      programs: the compiled programs, after the end of the context.

    Raises:
      ConfigError: if the state or the train step needs more memory than a device has.
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
            with calling_compiler(), own_compiler_errors('train_step', mesh):
                compiled = lowered.compile()
            release_freed_memory()
            return compiled

        def compile_init() -> Callable[..., Any]:
            with calling_compiler():
                init = plan.compile_init(run.key)
            release_freed_memory()
            return init

        self._pool = ThreadPoolExecutor(2)
        self._step: Future[CompiledPartitionedCallable] = self._pool.submit(compile_step)
        self._init: Future[Callable[..., Any]] | None = None
        if start.restored is None:
            self._init = self._pool.submit(compile_init)

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
        with memory_advice(plan, partitioner), awaiting_threads():
            step = self._step.result()
        check_fits(plan, partitioner, step)
        with awaiting_threads():
            init = None if self._init is None else self._init.result()
        flops = None
        if peak_flops(partitioner.mesh.devices.flat) is not None:
            state, forward = plan.abstract_state, make_eval_step(run.config.objective)
            flops = 3 * count_flops(forward, state.params, state.flax_mutables, dict(run.batch))
        self.programs = Programs(step, init, flops)


def keep_programs(config: TrainConfig) -> None:
    """Compiles the train step of a run, so that a later start finds it. Nothing else is written."""
    run = prepare(config)
    lowered = partition_train_step(run).lower(run.plan.abstract_state, dict(run.batch))
    with calling_compiler():
        lowered.compile()


def partition_train_step(run: PlannedRun) -> PartitionedCallable:
    """The function (state, batch) -> (state, metrics) of a run, laid out as its plan says."""
    config, plan, data_spec = run.config, run.plan, run.config.partitioner.data_partition_spec

    def average(state: TrainState) -> TrainState:
        if config.ema_decay is None:
            return state
        assert isinstance(state, AveragedState)
        return update_average(state, config.ema_decay, config.ema_debias)

    return config.partitioner.partition(
        make_train_step(
            config.objective,
            run.tx,
            key=run.step_key,
            num_microbatches=config.num_microbatches,
            data_spec=data_spec,
            learning_rate=lambda s: learning_rate_of(config.optimizer, s.opt_state, s.step - 1),
            weight_metrics=config.weight_metrics,
            gradient_dtype=config.gradient_dtype,
            accumulation_dtype=config.accumulation_dtype,
            not_finite=config.not_finite,
            average=average,
        ),
        # By position, because partitioners of T5X have other names for these arguments.
        (plan.specs, data_spec),
        (plan.specs, None),
        donate_argnums=(0,),
        compiler_options=run.compiler_options,
    )
