"""Signals at every moment of a run: what is saved, what is redone, and how the process ends."""

import contextlib
import dataclasses
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from small import records

from partitioning import PjitPartitioner
from train import Supervised, TrainConfig, checkpoints, train
from train.checkpoints import CheckpointConfig, complete_steps
from train.data import Examples
from train.processes import signals
from train.processes.signals import SIGNALS, Interrupted
from train.reporting.writers import JsonWriter
from train.running import programs, run as run_module

STEPS = 6
X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


def row_loss(outputs, batch):
    return (outputs[:, 0] - batch['x'].sum(1)) ** 2


@dataclasses.dataclass(frozen=True)
class Mean:
    """An evaluator that calls a function and notes the step."""

    every: int = 2
    action: Any = lambda step: None
    seen: list = dataclasses.field(default_factory=list)

    def run(self, state, step):
        self.seen.append(step)
        self.action(step)
        return {'mean': float(state.params['kernel'].mean())}


def config(model_dir, **changes):
    """A run of 6 steps, which evaluates after 2, 4 and 6, and saves after 3 and 6."""
    settings = {
        'model_dir': str(model_dir),
        'objective': Supervised(model=nn.Dense(1), inputs='x', row_loss=row_loss),
        'partitioner': PjitPartitioner(layout='data_parallel'),
        'optimizer': optax.adam(1e-2),
        'task': Examples(training={'x': X}),
        'total_steps': STEPS,
        'batch_size': 8,
        'evaluators': {'one': Mean(), 'two': Mean()},
        'checkpoints': CheckpointConfig(period=3, keep=None),
        'writers': (JsonWriter,),
        'log_every': 2,
    }
    return TrainConfig(**settings | changes)


def send(number, at=None):
    """A function of the step that sends a signal to this process, at one step or always."""
    return lambda step: signal.raise_signal(number) if at in (None, step) else None


def assert_ends_like(undisturbed, folder, **changes):
    """Resumes a run, whose state and metrics then equal the undisturbed run, bit for bit."""
    state = train(config(folder, **changes))
    for a, b in zip(jax.tree.leaves(undisturbed.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert records(folder) == records(undisturbed.folder)


@dataclasses.dataclass
class Undisturbed:
    folder: Path
    state: Any


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp('undisturbed')
    return Undisturbed(folder, train(config(folder)))


def interrupt(folder, **changes):
    """Trains until a signal ends the run, and returns the error and the steps that are saved."""
    with pytest.raises(Interrupted) as caught:
        train(config(folder, **changes))
    return caught.value, complete_steps(folder / 'checkpoints')


# In the training loop.


@pytest.mark.parametrize(
    ('number', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)]
)
def test_a_signal_in_a_step_saves_the_step(undisturbed, tmp_path, number, code):
    handlers = [signal.getsignal(n) for n in SIGNALS]
    signal_at_1 = send(number, at=1)
    error, saved = interrupt(tmp_path, hooks=[lambda state, step, m: signal_at_1(step)])
    assert (saved, error.exit_code, error.signal) == ([1], code, number)
    where = tmp_path / 'checkpoints/1'
    assert str(error) == f'stopped by {number.name} after step 1 of 6, saved in {where}'
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    assert_ends_like(undisturbed, tmp_path)


def test_a_signal_in_an_evaluation_leaves_it_for_the_resumed_run(undisturbed, tmp_path):
    one, two = Mean(), Mean(action=send(signal.SIGTERM))
    error, saved = interrupt(tmp_path, evaluators={'one': one, 'two': two})
    assert saved == [2] and 'before its evaluation (two), saved in' in str(error)
    assert [r['step'] for r in records(tmp_path)] == [2], 'no scores'
    # Another signal during the evaluation that is redone saves nothing new.
    error, saved = interrupt(tmp_path, evaluators={'one': one, 'two': two})
    assert saved == [2] and 'with nothing new to save' in str(error)
    evaluators = {'one': one, 'two': Mean()}
    assert_ends_like(undisturbed, tmp_path, evaluators=evaluators)
    assert one.seen == [2, 4, 6], 'its score is kept in the checkpoint'
    # A run that is killed later begins at the same checkpoint again.
    for step in (3, 6):
        (tmp_path / f'checkpoints/{step}').rename(tmp_path / f'{step}')
    assert_ends_like(undisturbed, tmp_path)


def test_a_signal_in_the_last_evaluation_leaves_work(undisturbed, tmp_path):
    error, saved = interrupt(tmp_path, evaluators={'one': Mean(action=send(15, 6)), 'two': Mean()})
    assert saved == [3, 6] and 'step 6 of 6, before its evaluation (one, two)' in str(error)
    assert_ends_like(undisturbed, tmp_path)


def test_a_signal_after_the_last_step_changes_nothing(tmp_path):
    last, seen = send(signal.SIGTERM, at=STEPS), []
    hooks = [lambda state, step, metrics: last(step), lambda *_: seen.append(signals.received())]
    assert int(train(config(tmp_path, evaluators={}, hooks=hooks)).step) == STEPS
    assert seen == [None] * 5 + [signal.SIGTERM]
    assert complete_steps(tmp_path / 'checkpoints') == [3, 6]


def test_a_signal_in_a_save_lets_it_finish(undisturbed, tmp_path, monkeypatch):
    save, signal_at_3 = checkpoints.Checkpoints.save, send(signal.SIGTERM, at=3)

    def interrupted(self, step, *args, **kwargs):
        signal_at_3(step)
        save(self, step, *args, **kwargs)
        signal_at_3(step)  # The second one comes with the first, as from GNU timeout.

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, 'save', interrupted)
        _, saved = interrupt(tmp_path)
    assert saved == [3]
    assert_ends_like(undisturbed, tmp_path)


def test_settings_may_save_nothing(tmp_path):
    hooks = [lambda state, step, metrics: send(signal.SIGTERM, at=1)(step)]
    nothing = CheckpointConfig(period=0, at_end=False)
    error, saved = interrupt(tmp_path, checkpoints=nothing, hooks=hooks)
    assert saved == [] and 'was not saved (there is no checkpoint)' in str(error)
    not_at_end = CheckpointConfig(period=5, at_end=False)
    assert interrupt(tmp_path, checkpoints=not_at_end, hooks=hooks)[1] == [1]


# Before the first step.

PHASES = {
    'opening the data': (run_module, 'open_tasks'),
    'looking for checkpoints': (checkpoints.Checkpoints, 'newest_step'),
    'tracing': (programs, 'partition_train_step'),
    'waiting for the compiler': (programs.Compilation, '_finish'),
    'restoring': (checkpoints.Checkpoints, 'restore'),
}


@pytest.mark.parametrize('phase', PHASES)
def test_a_signal_before_the_first_step_ends_the_run_at_once(
    undisturbed, tmp_path, monkeypatch, phase
):
    place, name = PHASES[phase]
    if phase == 'restoring':
        interrupt(tmp_path, hooks=[lambda state, step, metrics: send(15, at=3)(step)])
    before = sorted(path.name for path in tmp_path.iterdir())
    original = getattr(place, name)

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, interrupted)
        error, _ = interrupt(tmp_path)
    assert str(error) == 'stopped by SIGTERM with nothing new to save'
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_ends_like(undisturbed, tmp_path)


def test_a_second_signal_of_a_program_raises_again(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, 'SECONDS_OF_ONE_REQUEST', 0.0)

    def twice(state, step, metrics):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match='SIGINT at once, because it is the second signal'):
        train(config(tmp_path, hooks=[twice]))
    assert complete_steps(tmp_path / 'checkpoints') == []


@pytest.mark.parametrize('nested', [False, True])
def test_a_library_may_turn_a_signal_into_an_error_of_its_own(nested):
    """As modules do that are not written in Python, while they are imported."""
    outer = signals.handle() if nested else contextlib.nullcontext()
    with pytest.raises(Interrupted, match='SIGHUP with nothing'), outer, signals.handle():
        try:
            signal.raise_signal(signal.SIGHUP)
        except KeyboardInterrupt:
            raise ImportError('error while initializing the extension') from None


class Destroyed:
    """Sends a signal where Python ignores errors."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_in_a_destructor_is_raised_after_it(capsys):
    hook = sys.unraisablehook
    with signals.handle():
        with pytest.raises(Interrupted):
            Destroyed()
            time.sleep(60)  # The signal ends it.
        with signals.handle():
            assert sys.unraisablehook is not hook
    assert sys.unraisablehook is hook
    assert capsys.readouterr() == ('', '')


def handlers_inside():
    with signals.handle():
        return [signal.getsignal(n) for n in SIGNALS]


def test_signals_are_left_alone_where_they_cannot_be_handled():
    """In another thread than the main one, and under `nohup`."""
    before = [signal.getsignal(n) for n in SIGNALS]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers_inside).result() == before
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.handle():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not before[1]
    finally:
        signal.signal(signal.SIGHUP, hangup)


def test_a_signal_to_one_of_several_processes_takes_effect_where_all_stop(monkeypatch):
    forwarded, told = [], threading.Event()

    def forward(*signum_and_again):
        forwarded.append(signum_and_again)
        told.set()

    monkeypatch.setattr(signals.handling, 'forward', forward)
    with signals.handle():
        signals.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(60)
        assert forwarded == [(signal.SIGTERM, False)]
        assert signals.received() is None, 'the others know nothing of it yet'
        signals.deliver(signal.SIGTERM, 3)
        assert (signals.received(), signals.handling.receiver) == (signal.SIGTERM, 3)
        interrupted = pytest.raises(Interrupted, match='by SIGTERM to process 3 ')
        with interrupted, signals.interruptible():
            pytest.fail('nothing is evaluated any more')


# Commands, in processes of their own.


def begin(scenario, folder, **streams):
    here = Path(__file__).parent
    paths = [str(path) for path in (here.parents[1], here, here.parent / 'train')]
    environment = {
        'PYTHONPATH': os.pathsep.join(paths),
        'PYTHONWARNINGS': 'ignore::DeprecationWarning',  # of forks with threads, from Python 3.12
        'JAX_PLATFORMS': 'cpu',
    }
    return subprocess.Popen(
        [sys.executable, str(here / 'interrupted_process.py'), scenario, folder],
        env=os.environ | environment,
        text=True,
        **streams,
    )


RESUME = 'resume with: meshwright train mine\n'


@pytest.mark.long
def test_a_command_saves_although_nobody_reads_its_output(tmp_path):
    """Ctrl-C also ends the `tee` of a pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    process = begin('pipe', tmp_path, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, errors = process.communicate(timeout=300)
    where = tmp_path / 'checkpoints/3'
    assert errors == f'stopped by SIGTERM after step 3 of 6, saved in {where}; {RESUME}'
    assert process.returncode == 75
    assert complete_steps(tmp_path / 'checkpoints') == [3]


@pytest.mark.long
def test_a_command_saves_although_its_terminal_is_closed(tmp_path):
    terminal, inside = pty.openpty()
    process = begin(
        'terminal', tmp_path, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    os.close(inside)
    shown = ''
    while 'ready' not in shown:
        shown += os.read(terminal, 4096).decode(errors='replace')
    os.close(terminal)
    assert process.wait(300) == 75
    assert complete_steps(tmp_path / 'checkpoints') == [3]


def test_a_command_ends_although_no_handler_can_run(tmp_path):
    process = begin('compiler', tmp_path, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=300)
    assert errors == f'stopped by SIGINT with nothing new to save; {RESUME}'
    assert process.returncode == 130


def test_the_signals_of_a_child_are_its_own(tmp_path):
    process = begin('child', tmp_path, stderr=subprocess.PIPE)
    assert (process.communicate(timeout=300)[1], process.returncode) == ('', 3)


def test_a_second_signal_ends_a_command_at_once(tmp_path):
    terminal, inside = pty.openpty()
    process = begin('second', tmp_path, stdout=inside, stderr=subprocess.PIPE)
    os.close(inside)
    _, errors = process.communicate(timeout=300)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    line = 'stopped by SIGHUP at once, because it is the second signal'
    assert (errors, process.returncode) == (f'{line}; {RESUME}', 75)
    assert shown.count('\x1b[?25l') == 1 and shown.rstrip().endswith('\x1b[?25h')
