"""The processes of `meshwright launch`, with small programs in place of those that use jax."""

import contextlib
import dataclasses
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.processes.launching import attempts, spares, supervision
from train.processes.launching.ahead import ProgramsAhead
from train.processes.launching.attempts import LaunchConfig, child_environment, run_attempts
from train.processes.launching.endings import Printer, find_cause
from train.processes.launching.spares import Child
from train.processes.launching.supervision import signal_inbox, supervise

pytestmark = pytest.mark.core

KILL, TERM = signal.SIGKILL, signal.SIGTERM
ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, '-I', '-S', '-c']  # starts fast, and finds only the standard library
# What the small programs use. Each has its index, and a folder that all of them share.
PRELUDE = """
import os, signal, sys, time
index, folder = int(sys.argv[1]), sys.argv[2]
def note(name, text=''):
    with open(os.path.join(folder, f'.{name}'), 'w') as file:
        file.write(str(text))
    os.rename(os.path.join(folder, f'.{name}'), os.path.join(folder, name))
def wait(*names):
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        time.sleep(0.01)
def wait_forever():
    while True:
        time.sleep(0.05)
"""


def children(folder, *codes):
    """One child for each piece of code."""
    return [
        Child([*PYTHON, PRELUDE + code, str(index), str(folder)], os.environ)
        for index, code in enumerate(codes)
    ]


@pytest.fixture
def run(tmp_path):
    """A function that supervises programs and returns how they ended, and what was printed."""

    def run(*codes, grace_seconds=60.0):
        with open(tmp_path / 'output', 'w+b') as file, signal_inbox() as inbox:
            these, printer = children(tmp_path, *codes), Printer(file.fileno())
            attempt = supervise(these, printer, inbox, grace_seconds=grace_seconds)
            file.seek(0)
            return attempt, file.read().decode()

    return run


def wait_until(condition, seconds=60):
    """Waits for a condition that becomes true, unless something is broken."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_dead(pid):
    """Whether a process has ended. Not every machine removes ended processes without a parent."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] in 'ZX'
    except FileNotFoundError:
        return True


# Output and ends.


def test_lines_are_whole_and_in_the_order_of_their_process(run):
    # Both streams, in pieces that end in the middle of a line.
    code = """
text = ''.join(f'{index} {n} ' + 'x' * (n % 90) + '\\n' for n in range(3000)).encode()
wait(*note(f'ready {index}') or ['ready 0', 'ready 1', 'ready 2'])
for n, start in enumerate(range(0, len(text), 1000)):
    os.write(1 + n % 2, text[start : start + 1000])
os.write(1, b'no end of line')
"""
    attempt, output = run(code, code, code)
    assert [end.code for end in attempt.ends] == [0, 0, 0]
    lines = output.splitlines()
    for index in range(3):
        own = [line for line in lines if line.startswith(f'[{index}] ')]
        expected = [f'[{index}] {index} {n} {"x" * (n % 90)}'.rstrip() for n in range(3000)]
        assert own == [*expected, f'[{index}] no end of line']
    assert len(lines) == 3 * 3001


def test_all_are_ended_when_one_fails(run, monkeypatch):
    monkeypatch.setattr(supervision, 'SECONDS_AFTER_SIGTERM', 0.05)
    attempt, output = run(
        "note('obeys'); wait_forever()",
        "wait('obeys', 'ignores', 'follows'); print('error: 3 is not 4'); sys.exit(2)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('ignores'); wait_forever()",
        """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
note('follows')
wait_forever()
""",
        grace_seconds=0.05,
    )
    first, *others = attempt.ends
    assert (first.process, first.code, first.lines) == (1, 2, ('error: 3 is not 4',))
    assert {(e.process, e.code, e.sent) for e in others} == {
        (0, -TERM, TERM),
        (2, -KILL, KILL),
        (3, 75, TERM),
    }
    assert output == '[1] error: 3 is not 4\n'
    assert find_cause(attempt.ends) is first


def test_a_process_may_end_earlier_than_the_others(run):
    attempt, output = run("note('done')", "wait('done'); print('later')", grace_seconds=0)
    assert [end.code for end in attempt.ends] == [0, 0]
    assert output == '[1] later\n'


def test_what_a_process_leaves_behind_is_killed(run, tmp_path):
    # The program that it has started holds its output open.
    attempt, output = run("""
if pid := os.fork():
    note('pid', pid)
    print('parent', flush=True)
else:
    wait_forever()
""")
    assert (attempt.ends[0].code, output) == (0, '[0] parent\n')
    wait_until(lambda: is_dead(int((tmp_path / 'pid').read_text())))


def test_a_start_that_fails_leaves_no_process_behind(tmp_path):
    path = tmp_path / 'pid'

    def these():
        yield from children(tmp_path, "note('pid', os.getpid()); wait_forever()")
        wait_until(path.exists)
        yield Child(['/nonexistent'], {})

    with (
        signal_inbox() as inbox,
        open(os.devnull, 'w') as nowhere,
        pytest.raises(FileNotFoundError),
    ):
        supervise(these(), Printer(nowhere.fileno()), inbox, grace_seconds=60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_processes_continue_when_nobody_reads(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    lines = "for n in range(5000): print('x' * 100)"
    with signal_inbox() as inbox:
        these = children(tmp_path, f'{lines}\nnote("done")')
        attempt = supervise(these, Printer(writer), inbox, grace_seconds=0)
    os.close(writer)
    assert attempt.ends[0].code == 0
    assert (tmp_path / 'done').exists()


def test_a_terminal_shows_colours(tmp_path, monkeypatch):
    monkeypatch.delenv('NO_COLOR', raising=False)
    own, terminal = pty.openpty()
    # A process has no terminal, so what is typed there cannot reach it.
    code = """
try:
    os.open('/dev/tty', os.O_RDWR)
except OSError:
    print('no terminal')
"""
    with signal_inbox() as inbox:
        supervise(children(tmp_path, code), Printer(terminal), inbox, grace_seconds=0)
    assert os.read(own, 1000) == b'\x1b[36m[0]\x1b[0m no terminal\r\n'
    os.close(own)
    os.close(terminal)


# Restarts.

FAIL_ONCE = """
try:
    os.mkdir(os.path.join(folder, f'begun {index}'))
except FileExistsError:
    sys.exit()
"""


@pytest.fixture
def attempts_of(tmp_path, monkeypatch, capfd):
    """A function that runs attempts: the exit code, the counts of processes, and the messages."""
    monkeypatch.setattr(attempts, 'SECONDS_BEFORE_RESTART', 0.01)

    def attempts_of(*codes, **settings):
        started = []

        def make(count, port):
            started.append((count, port))
            return children(tmp_path, *codes[:count])

        config = LaunchConfig(processes=len(codes), devices_per_process=2, **settings)
        code = run_attempts(config, make, 'meshwright launch ...')
        counts, ports = zip(*started, strict=True)
        return code, list(counts), capfd.readouterr().err, ports

    return attempts_of


def test_a_run_is_started_again_with_those_that_remain(attempts_of):
    killed = f"{FAIL_ONCE}wait('begun 0', 'begun 1', 'begun 2'); os.kill(os.getpid(), 9)"
    others = f'{FAIL_ONCE}wait_forever()'
    code, counts, said, _ = attempts_of(
        others, others, killed, others, restarts=2, min_processes=2, grace_seconds=0
    )
    assert (code, counts) == (0, [4, 2])
    assert said == (
        'restart 1 of 2: 2 processes with 4 devices in total instead of 4 with 8, because process '
        '2 was killed by SIGKILL\n'
    )


def test_restarts_are_used_up(attempts_of):
    code, counts, said, ports = attempts_of("print('stuck: x'); sys.exit(75)", restarts=2)
    assert (code, counts) == (75, [1, 1, 1])
    assert len(set(ports)) > 1
    assert said.splitlines() == [
        'restart 1 of 2, because process 0 ended with exit code 75 (stuck: x)',
        'restart 2 of 2, because process 0 ended with exit code 75 (stuck: x)',
        'error: process 0 failed first, with exit code 75',
        '  stuck: x',
        'all 2 restarts have been used',
    ]


def test_a_wrong_setting_is_not_tried_again(attempts_of):
    code, counts, said, _ = attempts_of("print('error: no'); sys.exit(2)", restarts=2)
    assert (code, counts) == (2, [1])
    assert 'failed first, with exit code 2: no\n' in said


SPARE = f"""
import sys
sys.path.append({str(ROOT)!r})
from train.processes.launching import spares
spares._MODULES = ('json',)
spares.wait_as_spare()
exec(sys.argv.pop(1))
"""


def test_spares_become_the_processes_of_the_next_attempt(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(spares, 'SECONDS_BEFORE_SPARES', 0)
    attempt = (
        f'{PRELUDE}import json\n'
        "began = [name for name in os.listdir(folder) if name.startswith('began')]\n"
        "note(f'began {index} {os.getpid()}', json.dumps([sys.argv[3], os.environ['OWN']]))\n"
        "while not began and not os.path.exists(os.path.join(folder, 'go')): time.sleep(0.01)\n"
        'if not began: os.kill(os.getpid(), 9)\n'
    )
    ready = []

    def keep_ready(self):
        real(self)
        if not ready and self._ready:
            ready.extend(one.pid for one in self._ready)
            (tmp_path / 'go').touch()

    real = spares.Spares.keep_ready
    monkeypatch.setattr(spares.Spares, 'keep_ready', keep_ready)
    made = []

    def make(count, port):
        made.append(count)
        program, arguments = [*PYTHON, SPARE], [attempt, '0', str(tmp_path), f'attempt {len(made)}']
        return [Child(program, {'OWN': f'of {len(made)}'}, arguments)]

    config = LaunchConfig(processes=1, devices_per_process=1, restarts=1, spares=True)
    assert run_attempts(config, make, 'meshwright launch ...') == 0
    began = {int(path.name.split()[2]): path for path in tmp_path.glob('began*')}
    assert len(began) == 2 and made == [1, 1]
    [spare] = ready
    assert json.loads(began[spare].read_text()) == ['attempt 2', 'of 2']
    assert is_dead(spare), 'none is left behind'
    assert 'restart 1 of 1, because process 0 was killed by SIGKILL' in capfd.readouterr().err


# Programs compiled ahead.


def test_programs_are_compiled_ahead_one_number_of_processes_after_another(tmp_path):
    code = (
        'while os.getpriority(os.PRIO_PROCESS, 0) != 19: time.sleep(0.01)\n'
        "assert os.environ['MESHWRIGHT_ONLY_COMPILES']\n"
        "if sys.argv[3] == '1': sys.exit('error: batch_size 3 cannot be split')\n"
    )
    said, together = [], []

    @contextlib.contextmanager
    def start(count):
        together.append(count)
        yield [
            dataclasses.replace(child, arguments=[str(count)])
            for child in children(tmp_path, *[code] * count)
        ]
        together.remove(count)
        assert not together

    ahead = ProgramsAhead([4, 2, 1], start, said.append)
    ahead.begin(4)
    ahead.note(['step 1/8'])
    ahead.go_on()
    assert not together, 'the first step is not done'
    ahead.note(['first step after 2.0 s: imports 1.0 s'])
    while len(said) < 2:
        ahead.go_on()
        time.sleep(0.01)
    ahead.go_on()
    assert not together, 'nothing is left'
    assert re.fullmatch(r'programs for 2 processes are compiled, .* \(\d+ s\)', said[0])
    assert said[1] == (
        'programs for 1 process cannot be compiled ahead: batch_size 3 cannot be split'
    )


def test_what_is_compiled_ahead_ends_when_a_process_is_lost(tmp_path, capfd):
    code = (
        "if 'MESHWRIGHT_ONLY_COMPILES' in os.environ:\n"
        "    note('ahead', os.getpid()); wait_forever()\n"
        "if sys.argv[3] == '1': sys.exit()\n"
        "print('first step after 2.0 s', flush=True)\n"
        "if index == 1: wait('ahead'); os.kill(os.getpid(), signal.SIGKILL)\n"
        'wait_forever()\n'
    )

    def make(count, port):
        made = children(tmp_path, *[code] * count)
        return [dataclasses.replace(child, arguments=[str(count)]) for child in made]

    settings = {'restarts': 1, 'min_processes': 1, 'grace_seconds': 0, 'compile_ahead': True}
    config = LaunchConfig(processes=2, devices_per_process=1, **settings)
    assert run_attempts(config, make, 'meshwright launch ...') == 0
    assert 'restart 1 of 1: 1 process with 1 device' in capfd.readouterr().err
    assert is_dead(int((tmp_path / 'ahead').read_text()))


# The launcher as a process.

LAUNCHER = """
import json, os, sys
from train.processes.launching.attempts import LaunchConfig, run_attempts
from train.processes.launching.attempts import child_environment
from train.processes.launching.spares import Child
commands = json.loads(sys.argv[1])
environment = child_environment(os.environ, 'x', [], 'y' * 16)
config = LaunchConfig(processes=len(commands), devices_per_process=1)
children = [Child(command, environment) for command in commands]
sys.exit(run_attempts(config, lambda count, port: children, 'meshwright launch ...'))
"""


@contextlib.contextmanager
def launcher(folder, *codes, **settings):
    """Runs the launcher in a process of its own."""
    # It has its own group, like a shell's command, which gets Ctrl-C.
    commands = [child.command for child in children(folder, *codes)]
    process = subprocess.Popen(
        [sys.executable, '-c', LAUNCHER, json.dumps(commands)],
        process_group=0,
        text=True,
        **{'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE} | settings,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ('signum', 'code'), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_is_passed_on_to_process_0(tmp_path, signum, code):
    first = """
def stop(signum, frame):
    note('stop', signum)
    print(f'stopped by {signal.Signals(signum).name}')
    sys.exit(130 if signum == signal.SIGINT else 75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
note('ready 0')
wait_forever()
"""
    second = "note('ready 1'); wait('stop'); print('ended without a signal'); sys.exit(75)"
    with launcher(tmp_path, first, second) as process:
        wait_until(lambda: (tmp_path / 'ready 0').exists() and (tmp_path / 'ready 1').exists())
        os.killpg(process.pid, signum)
        out, err = process.communicate()
    received = 'SIGINT' if signum == signal.SIGINT else 'SIGTERM'
    assert process.returncode == code
    assert sorted(out.splitlines()) == [f'[0] stopped by {received}', '[1] ended without a signal']
    assert err == ''


def test_a_second_signal_kills_all(tmp_path):
    ignore = """
signal.signal(signal.SIGTERM, lambda *_: note('got it'))
note(f'ready {index}')
wait_forever()
"""
    with launcher(tmp_path, ignore, ignore) as process:
        wait_until(lambda: (tmp_path / 'ready 0').exists() and (tmp_path / 'ready 1').exists())
        process.send_signal(signal.SIGTERM)
        wait_until((tmp_path / 'got it').exists)
        assert process.poll() is None
        time.sleep(supervision.SECONDS_OF_ONE_REQUEST)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 75
    assert err == 'stopped by SIGTERM; resume with: meshwright launch ...\n'


def test_the_processes_die_with_the_launcher(tmp_path):
    modules = str(Path(supervision.__file__).parents[3])
    code = f"""
sys.path.insert(0, {modules!r})
from train.processes.launching.attempts import end_with_launcher
end_with_launcher()
note(f'pid {{index}}', os.getpid())
wait_forever()
"""
    with launcher(tmp_path, code, code) as process:
        files = [tmp_path / 'pid 0', tmp_path / 'pid 1']
        wait_until(lambda: all(file.exists() for file in files))
        assert not any(is_dead(int(file.read_text())) for file in files)
        process.kill()
        wait_until(lambda: all(is_dead(int(file.read_text())) for file in files))


def test_a_process_whose_launcher_has_ended_does_not_start():
    environment = child_environment(os.environ, 'x', [], 'y' * 16) | {'MESHWRIGHT_LAUNCHER': '1'}
    command = [sys.executable, '-P', '-m', 'train.cli', '--help']
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (75, '')


def test_the_launcher_does_not_wait_for_its_output(tmp_path):
    # The pipe is full, and nobody reads: the launcher must still obey.
    reader, writer = os.pipe()
    code = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
note('begun')
while True:
    os.write(1, b'x' * 100 + b'\\n')
"""
    with launcher(tmp_path, code, stdout=writer) as process:
        wait_until((tmp_path / 'begun').exists)
        wait_until(lambda: not select.select([], [writer], [], 0)[1])
        while process.poll() is None:  # Signals that come together count as one.
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.1 * supervision.SECONDS_OF_ONE_REQUEST)
        assert process.returncode == 75
    os.close(reader)
    os.close(writer)


def test_the_launcher_does_not_import_jax():
    code = """
import sys
from train.cli import launch
from train.processes.launching.spares import Child
launch.make_children = lambda *_: [Child(['true'], {})]
code = launch.start_processes(['--processes=1', '--', 'x'], 'meshwright launch')
print(code, 'jax' in sys.modules)
"""
    command = [sys.executable, '-c', code]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out == '0 False\n'
