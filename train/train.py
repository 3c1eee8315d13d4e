"""Training, from top to bottom. The mathematics of a step is in train/steps.py."""

from __future__ import annotations

import time
from contextlib import closing
from typing import cast

import jax

from partitioning import TrainState
from train.config import TrainConfig
from train.data import Feed, LocalBatches
from train.decoding.predict import CanDecode
from train.evaluators import is_due, prepare_evaluators, run_evaluators
from train.objectives import NextToken
from train.run import prepare, report
from train.runtime.gin_text import file_of_run
from train.runtime.machine import collect_garbage, must_wait_for_steps, stop_on_signal
from train.runtime.meter import Meter, format_figures
from train.runtime.profile import Profiler
from train.runtime.start_up import StartClock
from train.runtime.writers import open_writers
from train.start import check_finite, compile_programs, find_start, restore_state, write_run_files
from train.stopping import StopConditions


def train(config: TrainConfig) -> TrainState:
    """Trains a model, or resumes an earlier run in `config.model_dir`.

    Usage:
      state = train(TrainConfig(model_dir='runs/mine', objective=NextToken(model=model), ...))

    Returns:
      The state after the last step.

    Raises:
      ConfigError, ValueError: if a setting cannot be honoured. Nothing has been written then.
      FloatingPointError: if the loss is not finite. The newest checkpoint is kept.
      KeyboardInterrupt: if a signal asks the run to stop. With one process, the current step is
        finished and saved first.
    """
    # ---- mesh, data, and the layout of every array, before any of them exists
    clock = StartClock()
    run = prepare(config)
    console, plan, directory = run.console, run.plan, run.directory
    saved = config.checkpoints.open(directory)
    start = find_start(run, saved)
    run = run.from_step(start.step)
    config = run.config
    report(run)

    # ---- steps: compiled once, before anything is written, while the rest is opened and read
    layout = config.partitioner.get_data_layout(config.batch_size)
    batches = LocalBatches(run.rows, config.batch_size, layout.row_indices)
    with compile_programs(run, start) as compilation:
        feed = Feed(batches, config.partitioner, first_step=start.step, prefetch=config.prefetch)
        evaluators = prepare_evaluators(run)
        restored = None if start.restored is None else restore_state(run, start)
    train_step, init, flops = compilation.programs

    # ---- state: restored, or created on its devices
    write_run_files(run)
    if init is None:
        state = cast(TrainState, restored)
        verb = 'resumed' if start.source is saved else 'restored'
        console.say(f'{verb} from step {start.restored} of {start.source.directory}', style='bold')
    else:
        state = init(run.key)
    plan.check(state)
    with console.phase('opening the metrics'):
        writers = open_writers(config.writers, directory, start.step)
    if writers.num_dropped:
        console.say(f'dropped {writers.num_dropped} metrics records after step {start.step}')
    stop_conditions = StopConditions(config.stop_when)
    if start.step >= config.total_steps > 0:
        console.say(f'already at step {start.step}; raise total_steps to continue')
        run_evaluators(evaluators, state, start.step)
    elif config.evaluate_first or not config.total_steps:
        scores = run_evaluators(evaluators, state, start.step)
        if scores:
            writers.write(start.step, scores)
        stop_conditions.check(scores)

    # ---- loop: the host dispatches steps ahead of the devices, and waits only to log
    with (
        closing(saved),  # However the loop ends, a save that has begun is completed.
        closing(writers),
        closing(feed),
        stop_on_signal() as stop_requested,
        collect_garbage(config.collect_garbage_every) as collect,
        console.training(start.step, config.total_steps),
        Profiler(directory / 'profile', config.profile_steps) as profiler,
    ):
        meter, starting = Meter(run, start.step, flops), dict[str, float]()
        for step in range(start.step + 1, config.total_steps + 1):
            profiler.before(step)
            state, metrics = train_step(state, next(feed))
            if step == start.step + 1:
                jax.block_until_ready(metrics)
                line, starting = clock.report(console.seconds)
                console.say(line)
            for hook in config.hooks:
                hook(state, step, metrics)
            stopping, last = stop_requested(), step == config.total_steps
            due = {n: e for n, e in evaluators.items() if is_due(e, step, config.total_steps)}
            saving, scalars = saved.is_due(step, ending=last or stopping), dict[str, float]()
            if due or saving or last or step % config.log_every == 0:
                scalars = {f'train/{name}': float(value) for name, value in metrics.items()}
                if config.stop_if_not_finite:
                    check_finite(scalars, step, saved.latest_step)
                scalars |= meter.read(step, feed.waited) | starting
                starting = {}
                writers.write(step, scalars)
                console.step(step, config.total_steps, format_figures(scalars))
            elif must_wait_for_steps():
                jax.block_until_ready(metrics)
            profiler.after(step, state)
            paused = time.perf_counter()
            if scores := run_evaluators(due, state, step):
                writers.write(step, scores)
            if reason := stop_conditions.check(scalars | scores):
                console.say(f'step {step}: stopping early, because {reason}')
                rest = {name: e for name, e in evaluators.items() if name not in due}
                if scores := run_evaluators(rest, state, step):
                    writers.write(step, scores)
            if saving or (reason and saved.is_due(step, ending=True)):
                saved.save(step, state)
            collect(step)
            if stopping:
                raise KeyboardInterrupt
            if reason:
                break
            meter.skip(time.perf_counter() - paused)

    # ---- results
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
    if run.data.tokenizer is not None and (directory / 'config.gin').exists():
        console.heading('next')
        if isinstance(config.objective, NextToken):
            console.say(f"meshwright generate {directory} --prompt 'def '")
        elif isinstance(config.objective, CanDecode):
            console.say(f'meshwright predict {directory}')
        console.say(f'meshwright eval {directory}')
    return state
