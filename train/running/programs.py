"""The compiled programs of a run, and the train step that they are made from."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from partitioning import TrainState
from partitioning.hardware.compilers import own_compiler_errors
from partitioning.products.flops import count_flops
from partitioning.programs.partitioned_function import (
    CompiledPartitionedCallable,
    PartitionedCallable,
)
from train.objectives.objective import make_eval_step
from train.optimizers import AveragedState, learning_rate_of, update_average
from train.processes.activity import awaiting_threads, calling_compiler
from train.reporting.memory import check_fits, memory_advice
from train.reporting.meter import peak_flops
from train.running.checks import agree_on_program
from train.running.run import PlannedRun, Run
from train.running.start import Start
from train.running.steps import make_train_step


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
                return lowered.compile()

        def compile_init() -> Callable[..., Any]:
            with calling_compiler():
                return plan.compile_init(run.key)

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
