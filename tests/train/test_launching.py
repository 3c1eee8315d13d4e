"""What `meshwright launch` tells its processes, prints, and decides when they have ended."""

import contextlib
import re
import signal
import socket

import pytest

from train.cli.launch import make_children
from train.errors import ConfigError
from train.processes.launching.attempts import (
    LaunchConfig,
    count_after_loss,
    decide,
    devices_per_process,
    reserved_port,
    visible_gpus,
)
from train.processes.launching.endings import (
    MAX_LINE_BYTES,
    Attempt,
    LineReader,
    ProcessEnd,
    describe_failure,
    failure_lines,
    find_cause,
    lost_processes,
    prefixed,
)

pytestmark = pytest.mark.core

# Lines.


def test_lines_are_put_together():
    reader = LineReader(3)
    assert reader.feed(b'a') == []
    assert reader.feed(b'b\nc\r\n\nd') == ['ab', 'c', '']
    assert reader.feed(b' 10%\r 20%\n[3] e\n[1] f\n') == [' 20%', 'e', '[1] f']
    assert reader.feed('x\x1b[2J\tä'.encode() + b'\xff') == []
    assert reader.close() == ['x\N{REPLACEMENT CHARACTER}[2J\tä\N{REPLACEMENT CHARACTER}']
    assert reader.close() == []
    assert list(reader.last)[:3] == ['ab', 'c', '']


def test_a_line_without_end_does_not_fill_the_memory():
    reader = LineReader(0)
    lines = [line for _ in range(10) for line in reader.feed(b'x' * MAX_LINE_BYTES)]
    lines += reader.close()
    assert ''.join(lines) == 'x' * 10 * MAX_LINE_BYTES
    assert max(map(len, lines)) == MAX_LINE_BYTES


def test_the_index_is_coloured_and_the_line_is_not():
    assert prefixed(2, 'text') == '[2] text'
    assert prefixed(2, '') == '[2]'
    assert re.fullmatch('\x1b\\[32m\\[2\\]\x1b\\[0m text', prefixed(2, 'text', colour=True))
    assert prefixed(1, '', colour=True) != prefixed(2, '', colour=True).replace('2', '1')


# Which end is the cause, and what follows from it.

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


def ends(*codes):
    """Ends in an order: pairs of a process and its code, and the signal that was sent to it."""
    return tuple(ProcessEnd(code[0], code[1], *code[2:]) for code in codes)


@pytest.mark.parametrize(
    ('ended', 'cause', 'lost'),
    [
        (ends((0, 0), (1, 0)), None, []),
        (ends((0, 0), (1, 2), (2, 2)), 1, []),
        (ends((3, -KILL), (0, 75), (1, 75)), 3, [3]),
        (ends((0, 75), (1, 75), (3, -KILL)), 3, [3]),  # the others were faster
        (ends((0, 75), (2, 1), (1, 75)), 2, []),
        (ends((1, 75), (0, 75)), 1, []),
        (ends((0, -KILL), (1, -signal.SIGABRT), (2, -signal.SIGABRT)), 0, [0]),
        (ends((1, -signal.SIGSEGV), (0, 75)), 1, [1]),
        (ends((1, -KILL), (2, -KILL), (0, 75)), 1, [1, 2]),
        # Process 1 was stopped, or does not answer.
        (ends((0, 75), (2, 75), (1, -KILL, KILL)), 0, [1]),
        # The others wait for process 1, which was killed.
        (ends((1, -KILL), (0, -KILL, KILL), (2, -TERM, TERM)), 1, [1]),
        (ends((1, 2), (0, -KILL, KILL)), 1, []),
    ],
)
def test_the_cause_and_the_lost_processes(ended, cause, lost):
    found = find_cause(ended)
    assert (found.process if found else None) == cause
    assert lost_processes(ended) == lost


@pytest.mark.parametrize(
    ('original', 'remaining', 'minimum', 'count'),
    [
        (4, 3, 1, 2),
        (4, 3, 3, None),
        (8, 7, 2, 4),
        (6, 5, 2, 3),
        (4, 1, 1, 1),
        (2, 0, 1, None),
        (5, 4, 2, None),
    ],
)
def test_how_many_processes_replace_the_original_ones(original, remaining, minimum, count):
    assert count_after_loss(original, remaining, minimum) == count


def test_the_numbers_of_processes_to_compile_ahead_for():
    def counts(processes, minimum):
        settings = {'processes': processes, 'restarts': 1, 'min_processes': minimum}
        return LaunchConfig(devices_per_process=1, compile_ahead=True, **settings).smaller_counts()

    assert [counts(4, 1), counts(6, 2), counts(5, 1)] == [[2, 1], [3, 2], [1]]
    with pytest.raises(ConfigError, match='a divisor of --processes=4 from M to 3'):
        counts(4, 3)
    with pytest.raises(ConfigError, match='--compile_ahead needs --min_processes=M'):
        LaunchConfig(processes=4, devices_per_process=1, restarts=1, compile_ahead=True)


KILLED = ends((3, -KILL), (0, 75), (1, 75), (2, 75))
INVALID = ends((1, 2), (0, 2), (2, 75), (3, 75))


@pytest.mark.parametrize(
    ('ended', 'settings', 'exit_code', 'processes', 'words'),
    [
        (ends((0, 0), (1, 0)), {}, 0, None, []),
        (KILLED, {}, 75, None, ['process 3 failed first, killed by SIGKILL']),
        (KILLED, {'restarts': 3}, 75, 4, ['restart 1 of 3, because process 3 was killed']),
        (KILLED, {'restarts': 3, 'restarted': 3}, 75, None, ['all 3 restarts have been used']),
        (
            KILLED,
            {'restarts': 3, 'restarted': 1, 'min_processes': 2},
            75,
            2,
            ['restart 2 of 3: 2 processes with 4 devices in total instead of 4 with 8, because'],
        ),
        (
            KILLED,
            {'restarts': 3, 'min_processes': 3},
            75,
            None,
            ['3 of 4 processes remain', '--min_processes=3'],
        ),
        (ends((0, 75), (1, 75)), {'restarts': 1, 'min_processes': 1}, 75, 2, ['restart 1 of 1,']),
        (INVALID, {'restarts': 3}, 2, None, ['process 1', 'exit code 2 is not followed']),
        (ends((0, 1), (1, 75)), {'restarts': 3}, 1, None, ['exit code 1']),
        (ends((0, 130), (1, 75)), {'restarts': 3}, 130, None, ['exit code 130']),
        (ends((0, -INT), (1, 75)), {}, 130, None, ['SIGINT']),
        # The user has stopped it.
        (ends((0, 75), (1, 75)), {'restarts': 3, 'stopped_by': TERM}, 75, None, []),
        (ends((0, 130), (1, 75)), {'restarts': 3, 'stopped_by': INT}, 130, None, []),
        (ends((0, -TERM), (1, -TERM, TERM)), {'stopped_by': TERM}, 75, None, ['by SIGTERM']),
        (ends((0, -KILL, KILL)), {'stopped_by': INT}, 130, None, ['stopped by SIGINT']),
        (ends((0, 0), (1, 0)), {'stopped_by': TERM}, 0, None, []),
        (ends((0, 2), (1, 75)), {'stopped_by': TERM}, 2, None, ['process 0 failed first']),
    ],
)
def test_what_happens_after_an_attempt(ended, settings, exit_code, processes, words):
    settings = dict(settings)
    attempt = Attempt(ended, settings.pop('stopped_by', None))
    restarted = settings.pop('restarted', 0)
    config = LaunchConfig(processes=4, devices_per_process=2, **settings)
    decision = decide(config, attempt, restarted)
    assert (decision.exit_code, decision.processes) == (exit_code, processes)
    assert not [part for part in words if part not in decision.message]
    assert bool(decision.message) == bool(words)


def test_the_first_failure_is_explained_by_its_last_lines():
    lines = ('step 1', 'Traceback (most recent call last):', '  File "x"', 'KeyError: 1')
    text = describe_failure(
        (ProcessEnd(2, 1, lines=lines), *ends((0, 75), (3, -KILL, KILL), (1, 75)))
    ).splitlines()
    assert text[0] == 'error: process 2 failed first, with exit code 1'
    assert text[1:4] == [f'  {line}' for line in lines[1:]]
    assert text[4:] == [
        'processes 0 and 1 ended with exit code 75',
        'process 3 was killed by SIGKILL by the launcher',
    ]
    one = ProcessEnd(0, 2, lines=('error: old', 'x', 'error: mlp_dim is 3'))
    assert describe_failure([one]) == (
        'error: process 0 failed first, with exit code 2: mlp_dim is 3'
    )


def test_the_lines_that_explain_a_failure_are_found_among_others():
    frames = [f'  line {n}' for n in range(100)]
    noise = [f'E0101 {n}' for n in range(100)]
    assert failure_lines([*noise, 'last']) == [*noise[-2:], 'last']
    found = failure_lines(['x', 'Traceback (most ...', *frames, 'KeyError: 1', *noise])
    assert found == [*frames[-37:], 'KeyError: 1', *noise[:2]]
    assert failure_lines(['error: a', 'Traceback (', *frames, 'error: b', 'row']) == [
        'error: b',
        'row',
    ]


# What the processes are told.


def test_the_commands_of_the_processes():
    given = {'XLA_FLAGS': '--a --xla_force_host_platform_device_count=8', 'KEPT': '1'}
    given['JAX_NUM_CPU_DEVICES'] = '8'
    two = make_children(['eval', 'runs/x'], 2, 4321, 3, [], 'meshwright launch', given)
    for index, child in enumerate(two):
        assert child.command[-1] == 'train.cli'
        assert list(child.arguments) == [
            'eval',
            'runs/x',
            '--cpu_devices=3',
            '--coordinator_address=127.0.0.1:4321',
            '--process_count=2',
            f'--process_index={index}',
        ]
        assert (child.environment['XLA_FLAGS'], child.environment['KEPT']) == ('--a', '1')
        assert 'JAX_NUM_CPU_DEVICES' not in child.environment


def test_a_process_that_is_alone_joins_no_others():
    [child] = make_children(['train', 'x'], 1, 4321, 8, [], 'meshwright launch', {})
    assert list(child.arguments) == ['train', 'x', '--cpu_devices=8']


def test_every_gpu_belongs_to_one_process():
    gpus = ['4', '5', '6', '7']
    two = make_children(['train'], 2, 4321, 2, gpus, 'meshwright launch', {})
    assert [child.environment['CUDA_VISIBLE_DEVICES'] for child in two] == ['4,5', '6,7']
    assert not [part for child in two for part in child.arguments if 'cpu_devices' in part]


def test_the_devices_of_a_machine(tmp_path, monkeypatch):
    assert [devices_per_process(None, n, []) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert devices_per_process(5, 2, []) == 5
    assert devices_per_process(None, 2, ['0', '1', '2', '3']) == 2
    with pytest.raises(ConfigError, match=r'need 8 GPUs, and there are 4: .*=cpu'):
        devices_per_process(2, 4, ['0', '1', '2', '3'])
    for name in ('nvidia0', 'nvidia1', 'nvidiactl'):
        (tmp_path / name).touch()
    monkeypatch.setattr('importlib.util.find_spec', lambda name: name == 'jax_cuda13_plugin')
    assert visible_gpus({}, str(tmp_path)) == ['0', '1']
    assert visible_gpus({'CUDA_VISIBLE_DEVICES': '1'}, str(tmp_path)) == ['1']
    assert visible_gpus({'JAX_PLATFORMS': 'cpu'}, str(tmp_path)) == []
    assert visible_gpus({}, str(tmp_path / 'none')) == []
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    assert visible_gpus({}, str(tmp_path)) == []


def test_a_port_is_left_to_process_0():
    with reserved_port() as port, socket.socket() as other, contextlib.ExitStack() as connections:
        with pytest.raises(OSError):
            other.bind(('', port))
        # Process 0 listens there itself, as `socket.create_server` does, and then gRPC does.
        for options in ([socket.SO_REUSEADDR], [socket.SO_REUSEADDR, socket.SO_REUSEPORT]):
            with socket.socket() as listener:
                for option in options:
                    listener.setsockopt(socket.SOL_SOCKET, option, 1)
                listener.bind(('', port))
                listener.listen()
                connections.enter_context(socket.create_connection(('127.0.0.1', port)))
                connections.enter_context(listener.accept()[0])


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--processes=0', '--', 'quickstart'], ['--processes is 0', '>= 1']),
        (
            ['--processes=1', '--devices_per_process=-1', '--', 'x'],
            ['--devices_per_process is -1', '>= 1'],
        ),
        (['--', 'quickstart'], ['required: --processes']),
        (['--processes=2', '--'], ['what to run is missing', '-- quickstart']),
        (
            ['--processes', '2', 'quickstart', '--gin.A=1'],
            ['write --', 'meshwright launch --processes 2 -- quickstart --gin.A=1;'],
        ),
        (['--processes=2', '--', 'x', '--cpu_devices=4'], ['--devices_per_process before --']),
        (['--processes=2', '--', 'plan', 'show', 'x'], ['meshwright plan needs one process']),
        (['--processes=2', '--restarts=-1', '--', 'x'], ['--restarts is -1', '>= 0']),
        (
            ['--processes=4', '--restarts=1', '--min_processes=5', '--', 'x'],
            ['--min_processes=5', '1 to 4'],
        ),
        (['--processes=4', '--min_processes=2', '--', 'x'], ['--restarts=N']),
        (['--processes=4', '--grace_seconds=nan', '--', 'x'], ['nan must be a number >= 0']),
    ],
)
def test_mistakes_are_one_line(meshwright, arguments, words):
    status, _, error = meshwright('launch', *arguments)
    [line] = error.splitlines()
    assert (status, line.startswith('error: ')) == (2, True)
    assert not [part for part in words if part not in line]
