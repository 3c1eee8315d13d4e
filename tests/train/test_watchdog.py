"""The watchdog ends a run that makes no progress, and only such a run."""

import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from train.errors import ConfigError
from train.processes import output
from train.processes.activity import Activity
from train.processes.watchdog import Watchdog, WatchdogConfig, _report

pytestmark = pytest.mark.core


class Watched:
    """An activity and its watchdog, with a clock that only the test moves."""

    def __init__(self, log_every=10, **limits):
        self.now, self.activity = 0.0, Activity()
        self.watchdog = Watchdog(
            WatchdogConfig(**limits),
            self.activity,
            'runs/mine',
            log_every=log_every,
            clock=lambda: self.now,
        )

    def wait(self, seconds):
        """Waits, and returns the message of the watchdog with the seconds after which it came."""
        for waited in range(1, seconds + 1):
            self.now += 1
            if message := self.watchdog.check():
                return waited, message
        return None

    def step(self, step, seconds):
        self.activity.begin_step(step)
        assert self.wait(seconds) is None


def test_a_phase_may_take_its_limit_and_no_longer():
    watched = Watched(phase_seconds=100)
    assert watched.wait(99) is None
    with watched.activity.doing('compiling'):
        # The first check sees a sign of progress.
        waited, message = watched.wait(1000)
    assert waited == 101
    assert 'compiling has made no progress for 100 s, and WatchdogConfig.phase_seconds' in message
    assert 'allows 100 s' in message


def test_signs_of_progress_restart_the_clock():
    watched = Watched(phase_seconds=100)
    with watched.activity.doing('tokenizing'):
        for _ in range(20):
            assert watched.wait(90) is None
            watched.activity.progress()
    assert watched.wait(90) is None  # leaving the phase is progress, too
    with watched.activity.doing('evaluating'), watched.activity.doing('compiling'):
        assert 'compiling' in watched.wait(200)[1]
    watched.activity.progress()
    with watched.activity.doing('evaluating'):
        with watched.activity.doing('compiling'):
            pass
        assert 'evaluating' in watched.wait(200)[1]


def test_the_limit_of_steps_follows_the_slowest_one():
    watched = Watched(log_every=3, phase_seconds=5000)
    # Steps are dispatched ahead of the devices until the first metrics are read.
    for step in (1, 2):
        watched.step(step, 1)
    watched.step(3, 4000)
    for step in (4, 5, 6):
        watched.step(step, 200)
    # Five times 4,000 s, which the slowest step has taken, but for a second between two checks.
    waited, message = watched.wait(30_000)
    assert 19_994 <= 200 + waited <= 20_002
    assert 'step 6 ' in message and 'WatchdogConfig.step_seconds' in message


def test_a_fast_step_has_ten_minutes_and_another_phase_its_own_limit():
    watched = Watched(log_every=1)
    for step in range(1, 20):
        watched.step(step, 1)
    with watched.activity.doing('the save of step 19'):
        assert watched.wait(7000) is None
    watched.step(20, 2)
    waited, message = watched.wait(7000)
    assert 600 <= 2 + waited <= 602 and 'step 20 ' in message
    watched.activity.end_loop()
    waited, message = watched.wait(8000)
    assert waited == 7201 and 'the end of the run' in message


def test_a_limit_for_steps_counts_from_the_first_one():
    watched = Watched(step_seconds=50)
    watched.step(1, 40)
    watched.activity.begin_step(2)
    waited, message = watched.wait(100)
    assert waited == 51 and 'step 2 ' in message and 'allows 50 s' in message


def test_a_process_that_was_stopped_has_not_been_stuck():
    watched = Watched(phase_seconds=100)
    assert watched.wait(50) is None
    watched.now += 86_400
    assert watched.wait(40) is None
    assert watched.wait(20) is not None


def test_threads_other_than_that_of_the_run_do_not_rename_its_phase():
    activity = Activity()

    def work():
        with activity.doing('reading'):
            titles.append(activity.title)

    titles = []
    with activity.doing('restoring'):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert titles == ['restoring']


def test_a_run_waits_and_compiles_itself_or_through_a_thread_that_it_awaits():
    activity, entered, left = Activity(), threading.Event(), threading.Event()

    def work():
        with activity.marking('compiles'):
            entered.set()
            left.wait()

    with activity.marking('waits'):
        assert activity.is_waiting and not activity.is_compiling
    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    assert not activity.is_waiting and not activity.is_compiling
    with activity.marking('awaits threads'):
        assert activity.is_compiling and not activity.is_waiting
        left.set()
        thread.join()
        assert not activity.is_compiling


def test_the_message_names_the_process(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 4)
    monkeypatch.setattr(jax, 'process_index', lambda: 3)
    assert 'step 1 of process 3 ' in _stuck_step().wait(100)[1]
    monkeypatch.undo()
    assert 'process' not in _stuck_step().wait(100)[1]


def _stuck_step():
    watched = Watched(step_seconds=10)
    watched.activity.begin_step(1)
    return watched


@pytest.mark.parametrize('value', [0, -1.0, 'long', True, float('nan')])
@pytest.mark.parametrize('name', ['step_seconds', 'phase_seconds'])
def test_an_invalid_limit(name, value):
    with pytest.raises(ConfigError, match=rf'WatchdogConfig\.{name} is {value!r}.*seconds > 0'):
        WatchdogConfig(**{name: value})
    if name == 'phase_seconds':
        with pytest.raises(ConfigError, match=r'WatchdogConfig\.phase_seconds is None'):
            WatchdogConfig(phase_seconds=None)


# Runs.


@pytest.fixture
def places(tmp_path, monkeypatch):
    """What another user has made in the folder for temporary files, with a link to `mine`."""
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'tmp'))
    logs, mine = tmp_path / f'tmp/meshwright-logs-{os.geteuid()}', tmp_path / 'mine'
    (tmp_path / 'tmp').mkdir()
    mine.mkdir()
    return logs, mine


def test_logs_and_stacks_are_not_written_where_another_user_says(places, monkeypatch, capfd):
    logs, mine = places
    logs.symlink_to(mine)
    (logs.parent / 'stacks-of-process-0.txt').symlink_to(mine / 'stacks')
    _report('stuck', 'gs://bucket/run', 0)
    assert 'the stacks of all threads are in' in capfd.readouterr().err
    assert [f.read_text().partition('stuck')[1] for f in logs.parent.glob('*/stacks-*')]
    assert output._folder_of_logs() not in (logs, mine) and not [*mine.iterdir()]
    logs.unlink()
    assert output._folder_of_logs() == output._folder_of_logs() == logs
    assert logs.stat().st_mode & 0o777 == 0o700
    user = os.geteuid() + 1
    theirs = logs.rename(logs.with_name(f'meshwright-logs-{user}'))
    monkeypatch.setattr(os, 'geteuid', lambda: user)
    assert output._folder_of_logs() != theirs


def test_a_run_says_what_it_does(tmp_path, run):
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Looks:
        every: int = 2
        console: Any = None

        def prepare(self, run, name):
            seen.append(run.console.activity.title)
            return dataclasses.replace(self, console=run.console)

        def run(self, state, step):
            seen.append(self.console.activity.title)
            return {'score': 1.0}

    run(tmp_path / 'model', total_steps=3, evaluators={'looks': Looks()})
    # Evaluators are prepared in no phase of their own.
    assert seen == [
        'the start of the run',
        'the evaluation looks at step 2',
        'the evaluation looks at step 3',
    ]


# The evaluation never returns. Only then is its limit short, so that no other phase can exceed it.
STUCK = """
import sys, threading
from pathlib import Path
from conftest import write_texts
from small import small_config
from train import train
from train.processes.watchdog import WatchdogConfig

limits = WatchdogConfig(phase_seconds=600)

class Waits:
    every = 0
    def run(self, state, step):
        object.__setattr__(limits, 'phase_seconds', 0.5)
        wait_for_another()

def wait_for_another():
    threading.Event().wait()

folder, changes = Path(sys.argv[1]), {'evaluators': {'waits': Waits()}, 'watchdog': limits}
train(small_config(folder, write_texts(folder / 'texts'), total_steps=2, **changes))
"""


@pytest.mark.long
def test_a_stuck_run_ends_with_its_stacks(tmp_path):
    ran = subprocess.run(
        [sys.executable, '-c', STUCK, str(tmp_path)],
        cwd=Path(__file__).parent,
        env={**os.environ, 'JAX_NUM_CPU_DEVICES': '8'},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 75, ran.stderr
    message, where = ran.stderr.splitlines()[-2:]
    assert message.startswith('stuck: the evaluation waits at step 2 has made no progress for ')
    path = tmp_path / 'stacks-of-process-0.txt'
    assert str(path) in where and 'exit code 75' in where
    assert message in path.read_text()
    assert 'in wait_for_another' in path.read_text()
