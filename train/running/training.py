"""Training, from top to bottom. The mathematics of a step is in train/running/steps.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, cast

import jax

from partitioning import TrainState
from train.checkpoints import Checkpoints, open_checkpoints, open_local
from train.config import TrainConfig
from train.data import Feed
from train.evaluators.evaluator import prepare_evaluators
from train.machine.devices import collect_garbage, must_wait_for_steps
from train.processes import signals
from train.processes.activity import wait_for_devices
from train.processes.holding import Holding, hold_folder
from train.processes.together import taking_part
from train.processes.watchdog import Watchdog
from train.reporting.console import RunConsole
from train.reporting.meter import Meter, Profiler, StartClock, format_figures
from train.reporting.writers import Writers, open_writers
from train.running.loop import (
    Due,
    completing,
    evaluate_at_start,
    evaluate_until_signal,
    find_due,
    find_newest,
    make_interruption,
    report_failed_save,
    report_results,
    report_skips,
)
from train.running.programs import (
    Compilation,
    Programs,
    agree_on_layout,
    agree_on_settings,
    check_plan,
)
from train.running.run import Run, prepare, report_run
from train.running.start import (
    find_start,
    open_feed,
    restore_state,
    roll_back,
    settings_before,
    tell_changes,
    write_run_files,
)
from train.running.steps import Metrics, RecordedMetrics
from train.running.stopping import Health, NotFinite, StopConditions


def train(config: TrainConfig, *, expect_plan: str | os.PathLike[str] | None = None) -> TrainState:
    """Trains a model, or resumes an earlier run in `config.model_dir`.

    Usage:
      state = train(TrainConfig(model_dir='runs/mine', objective=NextToken(model=model), ...))

    Args:
      config: the settings of the run.
      expect_plan: a plan file or the folder of a run, whose layout this run must have. By default,
        any layout is trained.

    Returns:
      The state after the last step.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured, if the layout differs from
        `expect_plan`, or if another run holds `model_dir` (`FolderInUse`). In these cases, nothing
        has been compiled or written.
      FolderLost: if another run has taken over `model_dir`, for example while this one was
        suspended. Nothing more is written.
      FloatingPointError: if a step is not finite and `config.not_finite` stops the run then. The
        newest checkpoint is kept.
      Interrupted: if SIGTERM, SIGINT or SIGHUP, sent to any process of the run, ends it early.
        The error is a KeyboardInterrupt that says what was saved: the current
        step, or nothing if no step was finished. The same call resumes the run. Outside the main
        thread, signals are not handled.
    """
    console, limits = RunConsole(), config.watchdog
    with (
        signals.handle(),
        taking_part(console.activity, config.model_dir),
        Watchdog(limits, console.activity, config.model_dir, log_every=config.log_every),
    ):
        agree_on_settings(config)
        with hold_folder('MODEL_DIR', config.model_dir, console.say) as held:
            return _train(config, console, expect_plan, held)


def _train(
    config: TrainConfig,
    console: RunConsole,
    expect_plan: str | os.PathLike[str] | None,
    held: Holding | None,
) -> TrainState:
    # ---- mesh, data, and the layout of every array, before any of them exists
    clock = StartClock()
    prepared = prepare(config, console)
    agree_on_layout(prepared)
    if expect_plan is not None:
        check_plan(prepared.plan, expect_plan)
    saved = open_checkpoints(config.checkpoints, prepared.directory)
    saved.local = open_local(config.checkpoints, prepared.directory, console.say)
    start = find_start(prepared, saved)
    run = prepared.from_step(start.step)
    report_run(run)
    before = settings_before(run, start)
    told = tell_changes(run, before)

    # ---- steps: compiled once, before anything is written, while the rest is opened and read
    with Compilation(run, start) as compilation:
        restored, start = restore_state(prepared, saved, start)
        run = prepared.from_step(start.step)
        feed = open_feed(run, start)
        evaluators = prepare_evaluators(run)
    programs = compilation.programs

    # ---- state: restored, or created on its devices
    if held is not None:
        held.check()
    tell_changes(run, before, told)
    saved.texts = write_run_files(run, start.data_after)
    saved.check_writable()
    if programs.init is None:
        state = cast(TrainState, restored)
        verb = 'resumed' if start.source.is_of_run else 'restored'
        console.say(f'{verb} from {start.source.origin(start.restored or 0)}', style='bold')
    else:
        state = programs.init(run.key)
    run.plan.check(state)
    if saved.local is not None:
        saved.local.begin(start.step, is_local=start.source is saved.local.steps)
    with console.phase('opening the metrics'):
        writers = open_writers(
            config.writers, run.directory, start.step, config.metrics_on_failure, console.say
        )
    if writers.num_dropped:
        console.say(f'dropped {writers.num_dropped} metrics records after step {start.step}')

    # ---- loop: the host dispatches steps ahead of the devices, and waits only to log
    scores = evaluate_at_start(run, start, evaluators, state, writers)
    loop = Loop(run, start.step, programs, clock, feed, evaluators, saved, writers, held)
    loop.check_end(scores)
    signals.defer()
    state = loop.train(state)
    report_results(run, saved, writers)
    return state


@dataclasses.dataclass
class Loop:
    """The training loop.

    Attributes:
      clock: measures how long the run takes to start.
      held: the folder of the run, in process 0.
    """

    run: Run
    step: int
    programs: Programs
    clock: StartClock
    feed: Feed
    evaluators: Mapping[str, Any]
    saved: Checkpoints
    writers: Writers
    held: Holding | None
    reason: str | None = None

    def __post_init__(self) -> None:
        config, step = self.run.config, self.step
        self._first_step, self._last_step = step + 1, config.total_steps
        self._recorded = RecordedMetrics()
        self._starting = dict[str, float]()  # the times of the start, until they are written
        self._stop_conditions = StopConditions(config.stop_when)
        self._meter = Meter(
            self.run.batch,
            config.partitioner.mesh.devices.ravel(),
            total_steps=config.total_steps,
            step=step,
            flops=self.programs.flops,
        )
        self._health = Health(
            config.not_finite,
            max_skips=config.max_skips,
            max_roll_backs=config.max_roll_backs,
            first_step=step,
        )

    def train(self, state: TrainState) -> TrainState:
        """Runs the steps, and returns the state after the last one."""
        run, config, saved, console = self.run, self.run.config, self.saved, self.run.console
        with (
            completing(saved, console.say),
            closing(self.writers),
            closing(self.feed),
            collect_garbage(config.collect_garbage_every) as collect,
            console.training(self.step, self._last_step),
            closing(Profiler(run.directory / 'profile', config.profile_steps)) as profiler,
        ):
            while self.step < self._last_step and not self.reason:
                self.step += 1
                console.activity.begin_step(self.step)
                profiler.before(self.step)
                state, metrics = self._dispatch(state)
                due = find_due(run, self.evaluators, saved, self.step)
                if self.held is not None and due.reading:  # something is to be written
                    self.held.check()
                if due.reading or jax.process_count() == 1:
                    report_failed_save(run, saved, self.step)
                if due.reading:
                    found = self._health.look()
                    report_skips(run, found.skipped, self.writers)
                    if found.bad is not None:
                        del state, metrics  # The memory is needed for the state that is restored.
                        state = self._go_back(found.bad)
                        continue
                scalars = self._log(due, metrics)
                profiler.after(self.step, state)
                paused = time.perf_counter()
                saving, pending = self._evaluate_and_save(due, state, scalars)
                collect(self.step)
                self._meter.skip(time.perf_counter() - paused)
                work_left = pending or (self.step < self._last_step and not self.reason)
                if work_left and (saving or due.stopping) and signals.received():
                    raise make_interruption(run, saved, self.step, pending)
        return state

    def check_end(self, scalars: Mapping[str, float]) -> None:
        """Decides by new metrics whether the run ends early."""
        self.reason = self._stop_conditions.check(scalars)
        if self.reason:
            self.run.console.say(f'step {self.step}: stopping early, because {self.reason}')

    def _dispatch(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Gives a step to the devices. The first one is waited for."""
        console = self.run.console
        with console.activity.doing(f'the input of step {self.step}'):
            batch = next(self.feed)
        state, metrics = self.programs.train_step(state, batch)
        if self.step == self._first_step:
            wait_for_devices(metrics)
            line, self._starting = self.clock.report(console.seconds)
            console.say(line)
        self._health.note(self.step, metrics)
        self._recorded.add(metrics)
        for hook in self.run.config.hooks:
            hook(state, self.step, metrics)
        return state, metrics

    def _go_back(self, bad: NotFinite) -> TrainState:
        """Restores a checkpoint, as the state after the newest step that must not be kept."""
        newest = find_newest(self.saved)
        with contextlib.suppress(Exception):  # what cannot be read again is not named
            bad = bad._replace(inputs=tuple(self.feed.not_finite(bad.step - 1)))
        self.run.console.say(self._health.go_back(bad, newest, self._last_step))
        self.step = bad.step
        state, restored_step = roll_back(self.run, self.saved, newest, self.step)
        self.writers.write(self.step, {'train/rolled_back_to': float(restored_step)})
        self.feed.restart(self.step)
        self._meter.restart(self.step)
        self._recorded.clear()
        return state

    def _log(self, due: Due, metrics: Metrics) -> dict[str, float]:
        """Reads and writes the training metrics of a step if they are due, and returns them."""
        scalars = dict[str, float]()
        if due.reading:
            scalars = {f'train/{name}': x for name, x in self._recorded.read().items()}
        if due.writing:
            scalars |= self._meter.read(self.step, self.feed.waited) | self._starting
            self._starting = {}
            self._recorded.clear()
            self.writers.write(self.step, scalars)
            self.run.console.step(self.step, self._last_step, format_figures(scalars))
        elif must_wait_for_steps():
            wait_for_devices(metrics)
        return scalars

    def _evaluate_and_save(
        self, due: Due, state: TrainState, scalars: Mapping[str, float]
    ) -> tuple[bool, tuple[str, ...]]:
        """Returns whether it has saved the state, and which evaluators a signal has interrupted."""
        step, saved = self.step, self.saved
        if due.local and saved.local is not None:
            saved.local.save(step, state)
        evaluated = self.run.to_evaluate(state)
        scores, pending = evaluate_until_signal(due.evaluators, evaluated, step, self.writers)
        if not pending:
            self.check_end({**scalars, **scores})
        if self.reason:
            evaluate_until_signal(due.other_evaluators, evaluated, step, self.writers)
        saving = due.saving or bool(pending and self.run.config.checkpoints.saves_anything)
        del evaluated  # averages in another dtype are copies
        saving = saving or bool(self.reason and saved.is_due(step, ending=True))
        if saving:
            with self.run.console.activity.doing(f'the save of step {step}'):
                saved.save(step, state, pending=pending, scores={**scalars, **scores})
        return saving, pending
