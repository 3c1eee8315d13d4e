"""Training, from top to bottom. The mathematics of a step is in train/running/steps.py."""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import cast

import jax

from partitioning import TrainState
from train.checkpoints import open_checkpoints
from train.config import TrainConfig
from train.evaluators.evaluator import prepare_evaluators
from train.machine.devices import collect_garbage, must_wait_for_steps
from train.processes import signals
from train.processes.activity import wait_for_devices
from train.processes.together import taking_part
from train.processes.watchdog import Watchdog
from train.reporting.console import RunConsole
from train.reporting.meter import Meter, Profiler, StartClock, format_figures
from train.reporting.writers import open_writers
from train.running.checks import agree_on_layout, agree_on_settings, check_plan
from train.running.health import Health
from train.running.loop import (
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
from train.running.programs import Compilation
from train.running.run import prepare, report_run
from train.running.start import (
    find_start,
    open_feed,
    restore_state,
    roll_back,
    write_run_files,
)
from train.running.stopping import StopConditions


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
      ConfigError, ValueError: if a setting cannot be honoured, or if the layout differs from
        `expect_plan`. In both cases, nothing has been compiled or written.
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
        return _train(config, console, expect_plan)


def _train(
    config: TrainConfig, console: RunConsole, expect_plan: str | os.PathLike[str] | None
) -> TrainState:
    # ---- mesh, data, and the layout of every array, before any of them exists
    clock = StartClock()
    agree_on_settings(config)
    prepared = prepare(config, console)
    agree_on_layout(prepared)
    plan, directory = prepared.plan, prepared.directory
    if expect_plan is not None:
        check_plan(plan, expect_plan)
    saved = open_checkpoints(config.checkpoints, directory)
    start = find_start(prepared, saved)
    run = prepared.from_step(start.step)
    report_run(run)

    # ---- steps: compiled once, before anything is written, while the rest is opened and read
    with Compilation(run, start) as compilation:
        restored, start = restore_state(prepared, saved, start)
        run = prepared.from_step(start.step)
        feed = open_feed(run, start.step)
        evaluators = prepare_evaluators(run)
    train_step, init, flops = compilation.programs
    config, step, last_step = run.config, start.step, run.config.total_steps

    # ---- state: restored, or created on its devices
    saved.texts = write_run_files(run)
    saved.check_writable()
    if init is None:
        state = cast(TrainState, restored)
        verb = 'resumed' if start.source is saved else 'restored'
        console.say(f'{verb} from {start.source.origin(start.restored or 0)}', style='bold')
    else:
        state = init(run.key)
    plan.check(state)
    with console.phase('opening the metrics'):
        writers = open_writers(
            config.writers, directory, step, config.metrics_on_failure, console.say
        )
    if writers.num_dropped:
        console.say(f'dropped {writers.num_dropped} metrics records after step {step}')
    stop_conditions = StopConditions(config.stop_when)
    scores = evaluate_at_start(run, start, evaluators, state, writers)
    if reason := stop_conditions.check(scores):
        console.say(f'step {step}: stopping early, because {reason}')

    # ---- loop: the host dispatches steps ahead of the devices, and waits only to log
    signals.defer()
    with (
        completing(saved, console.say),
        closing(writers),
        closing(feed),
        collect_garbage(config.collect_garbage_every) as collect,
        console.training(step, last_step),
        closing(Profiler(directory / 'profile', config.profile_steps)) as profiler,
    ):
        devices, starting = config.partitioner.mesh.devices.ravel(), dict[str, float]()
        meter = Meter(run.batch, devices, total_steps=last_step, step=step, flops=flops)
        health = Health(
            config.not_finite,
            max_skips=config.max_skips,
            max_roll_backs=config.max_roll_backs,
            first_step=step,
        )
        while step < last_step and not reason:
            step += 1
            console.activity.begin_step(step)
            profiler.before(step)
            with console.activity.doing(f'the input of step {step}'):
                batch = next(feed)
            state, metrics = train_step(state, batch)
            if step == start.step + 1:
                wait_for_devices(metrics)
                line, starting = clock.report(console.seconds)
                console.say(line)
            health.note(step, metrics)
            for hook in config.hooks:
                hook(state, step, metrics)
            stopping = signals.received() is not None
            due = find_due(run, evaluators, saved, step, stopping=stopping)
            if due.reading or jax.process_count() == 1:
                report_failed_save(run, saved, step)
            scalars = dict[str, float]()
            if due.reading:
                found = health.look()
                report_skips(run, found.skipped, writers)
                if found.bad is not None:
                    newest = find_newest(saved)
                    console.say(health.go_back(found.bad, newest, last_step))
                    del state, metrics  # The memory is needed for the state that is restored.
                    step = found.bad.step
                    state, restored_step = roll_back(run, saved, newest, step)
                    writers.write(step, {'train/rolled_back_to': float(restored_step)})
                    feed.restart(step)
                    meter.restart(step)
                    continue
                scalars = {f'train/{name}': float(value) for name, value in metrics.items()}
            if due.writing:
                scalars |= meter.read(step, feed.waited) | starting
                starting = {}
                writers.write(step, scalars)
                console.step(step, last_step, format_figures(scalars))
            elif must_wait_for_steps():
                wait_for_devices(metrics)
            profiler.after(step, state)
            paused = time.perf_counter()
            scores, pending = evaluate_until_signal(due.evaluators, state, step, writers)
            reason = None if pending else stop_conditions.check(scalars | scores)
            if reason:
                console.say(f'step {step}: stopping early, because {reason}')
                evaluate_until_signal(due.other_evaluators, state, step, writers)
            saving = due.saving or bool(pending and config.checkpoints.saves_anything)
            saving = saving or bool(reason and saved.is_due(step, ending=True))
            if saving:
                with console.activity.doing(f'the save of step {step}'):
                    saved.save(step, state, pending=pending, scores=scalars | scores)
            collect(step)
            meter.skip(time.perf_counter() - paused)
            work_left = pending or (step < last_step and not reason)
            if work_left and (saving or stopping) and signals.received():
                raise make_interruption(run, saved, step, pending)

    report_results(run, saved, writers)
    return state
