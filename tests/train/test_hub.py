"""What the hub of several processes decides, without any process."""

import os
import signal
import socket
import types

import jax
import pytest

from train.errors import ConfigError
from train.processes import together
from train.processes.disagreements import differences, digest, disagreement
from train.processes.hub import Hub
from train.processes.joining import relay
from train.processes.member import Member
from train.processes.unanswered import UnansweredConnections
from train.processes.wire import Connection, Limits

pytestmark = pytest.mark.core


class Run:
    """A hub and the other ends of its connections, with a clock that only the test moves."""

    def __init__(self, count=3, hosts=None):
        pairs = [socket.socketpair() for _ in range(count)]
        self.now = 0.0
        self.ends = [Connection(theirs) for _, theirs in pairs]
        connections = {i: Connection(ours) for i, (ours, _) in enumerate(pairs)}
        hosts = dict(enumerate(hosts or ['one'] * count))
        limits = Limits(heartbeat_seconds=30, watchdog_seconds=120)
        self.hub = Hub(connections, hosts, limits, clock=lambda: self.now)

    def say(self, index, kind, **content):
        self.hub.handle(index, {'kind': kind, **content})

    def beat(self, index, **changes):
        self.hub._seen[index].silent = 0.0  # as its thread does with every message
        usual = {'place': 'step 5', 'quiet': 0.0, 'waits': False, 'compiles': False}
        self.say(index, 'beat', **usual | {'unanswered': {}} | changes)

    def wait(self, seconds):
        for _ in range(int(seconds)):
            self.now += 1
            self.hub.check()

    def heard(self, index):
        """The messages that a process has received since the last call."""
        messages = []
        while True:
            try:
                messages.append(self.ends[index].receive(0.05 if not messages else 0.01))
            except TimeoutError:
                return messages


def test_values_are_gathered_in_the_order_of_the_processes():
    run = Run()
    for index in (2, 0, 1):
        assert run.heard(0) == []
        run.say(index, 'gather', number=1, name='input', value=index * 10)
    for index in range(3):
        assert run.heard(index) == [{'kind': 'result', 'number': 1, 'values': [0, 10, 20]}]


def test_a_secret_of_process_0_reaches_all_and_is_in_no_line(monkeypatch):
    members, sent = [Member(None, i, 2, Limits(), b'of the run') for i in range(2)], []
    secret = bytes(range(32))

    def gather(member, title, value):
        sent.append(value)
        return sent[:1]

    monkeypatch.setattr(Member, 'gather', gather)
    assert [members[0].share(secret), members[1].share(None)] == [secret, secret]
    assert secret.hex() not in str(sent) and sent[1] is None
    outsider = Member(None, 1, 2, Limits(), b'of another run')
    assert outsider.share(None) != secret
    sent.clear()
    assert [members[0].share(None), members[1].share(None)] == [None, None]


def test_processes_that_do_different_things_end():
    run = Run()
    run.say(0, 'gather', number=1, name='input', value=None)
    run.say(1, 'gather', number=1, name='restore', value=None)
    assert run.heard(1) == []
    run.say(2, 'gather', number=1, name='input', value=None)
    [end] = run.heard(1)
    assert end['code'] == 2 and end['causes'] == [1]
    assert "process 0 is at 'input', and process 1 at 'restore'" in end['line']


def test_a_process_without_a_sign_of_life_is_named():
    run = Run(hosts=['a', 'b', 'c'])
    run.beat(2, place='the save of step 4')
    for _ in range(15):
        run.wait(2)
        run.beat(0), run.beat(1)
        assert run.heard(1) == []
    run.wait(1)
    [end] = run.heard(1)
    assert end['code'] == 75 and end['causes'] == [2]
    assert end['line'].startswith('process 2 on c has given no sign of life for 31 s')
    assert "'the save of step 4'" in end['line'] and '--heartbeat_seconds=30' in end['line']


def test_two_processes_that_cannot_reach_each_other_are_named(tmp_path):
    run = Run(hosts=['a', 'b', 'c'])
    run.hub._addresses = {'10.0.0.1': [0], '10.0.0.3': [2]}
    waiting = {'waits': True, 'quiet': 40.0}
    elsewhere = {'10.0.0.9': 40.0, '10.0.0.3': 15.0}  # a store, and not yet for long
    run.beat(1, unanswered=elsewhere, **waiting), run.beat(0), run.beat(2, **waiting)
    run.wait(1)
    assert run.heard(1) == []
    run.beat(1, unanswered={'10.0.0.3': 21.0}, waits=True, quiet=31.0)
    run.wait(1)
    [end] = run.heard(2)
    assert end['code'] == 75 and end['causes'] == [1, 2]
    assert end['line'].startswith('process 1 on b has had no answer from process 2 on c for 21 s')


TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt
   0: 0100007F:0035 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 7 1
   1: 01004D0A:D431 03004D0A:9C40 01 00000400:00000000 01:00000040 00000005     0        0 8 1
   2: 01004D0A:D432 04004D0A:9C41 01 00000400:00000000 01:00000010 00000000     0        0 9 1
   3: 01004D0A:D433 05004D0A:9C42 01 00000400:00000000 01:00000040 00000005     0        0 10 1
"""
TABLE_6 = """  sl  local_address  remote_address  st tx_queue rx_queue tr tm->when retrnsmt
   0: 0:1 0000000000000000FFFF000006004D0A:01BB 01 00000001:00000000 01:00000014 00000001 0 0 11
"""


def test_connections_are_unanswered_while_the_kernel_sends_their_data_again(tmp_path):
    """Written after the documentation of /proc/net/tcp: one listens, and one is not ours."""
    (tmp_path / 'net').mkdir(), (tmp_path / 'fd').mkdir()
    (tmp_path / 'net/tcp').write_text(TABLE), (tmp_path / 'net/tcp6').write_text(TABLE_6)
    for number in (7, 8, 9, 11):
        (tmp_path / f'fd/{number}').symlink_to(f'socket:[{number}]')
    connections = UnansweredConnections(tmp_path)
    assert connections.seconds(100.0) == {'10.77.0.3': 0.0, '10.77.0.6': 0.0}
    (tmp_path / 'net/tcp6').unlink()
    assert connections.seconds(107.0) == {'10.77.0.3': 7.0}
    (tmp_path / 'net/tcp').write_text(TABLE.replace('00000005', '00000000'))
    assert connections.seconds(108.0) == {}
    (tmp_path / 'net/tcp').write_text(TABLE)
    assert connections.seconds(109.0) == {'10.77.0.3': 0.0}


def test_a_hub_that_was_stopped_itself_blames_nobody():
    run = Run()
    run.now += 86_400
    run.hub.check()
    assert run.heard(1) == []


@pytest.mark.parametrize('compiles', [True, False])
def test_a_process_that_keeps_others_waiting_is_named_unless_it_compiles(compiles):
    run = Run()
    run.beat(0, quiet=500, waits=True)
    run.beat(1, place='the input of step 5', quiet=119, compiles=compiles)
    run.beat(2, quiet=500, waits=True)
    run.hub.check()
    assert run.heard(2) == []
    run.beat(1, place='the input of step 5', quiet=120, compiles=compiles)
    run.hub.check()
    ends = run.heard(2)
    assert bool(ends) is not compiles
    for end in ends:
        assert end['causes'] == [1] and end['code'] == 75 and end['reason'] == 'stuck'
        assert "process 1 at 'the input of step 5' has made no progress for 120 s" in end['line']
        assert 'processes 0 and 2 wait for it' in end['line']


def test_a_slow_process_for_which_nobody_waits_goes_on():
    run = Run()
    for index in range(3):
        run.beat(index, quiet=1000)
    run.hub.check()
    assert run.heard(1) == []


def test_after_a_signal_all_processes_stop_at_the_first_tick_that_none_has_passed():
    run = Run()
    run.say(1, 'signal', signum=signal.SIGTERM, again=False)
    run.say(2, 'signal', signum=signal.SIGTERM, again=False)  # the scheduler tells all of them
    assert run.heard(0) == [{'kind': 'pause'}]
    for index, ticks in enumerate((7, 9, 8)):
        run.say(index, 'passed', ticks=ticks, saves=True)
    expected = {'kind': 'stop', 'tick': 10, 'signum': signal.SIGTERM, 'by': 1}
    assert run.heard(0) == [expected]
    run.say(1, 'signal', signum=signal.SIGTERM, again=True)
    *_, end = run.heard(2)
    assert end['code'] == 75 and 'at once, because it is the second signal' in end['line']


def test_a_run_after_one_that_a_signal_has_stopped_can_be_stopped_again():
    run = Run(count=2)
    for first in (0, 10):
        run.say(0, 'signal', signum=signal.SIGTERM, again=False)
        for index in range(2):
            run.say(index, 'passed', ticks=first + index, saves=True)
        assert next(m for m in run.heard(1) if m['kind'] == 'stop')['tick'] == first + 2
        for index in range(2):
            run.say(index, 'gather', number=first, name='the start of the run', value=None)


def test_a_signal_ends_everything_at_once_if_a_process_has_nothing_to_save():
    run = Run()
    run.say(2, 'signal', signum=signal.SIGINT, again=False)
    run.say(0, 'passed', ticks=1, saves=True)
    run.say(1, 'passed', ticks=0, saves=False)
    ends = [message for message in run.heard(1) if message['kind'] == 'end']
    assert ends[0]['code'] == 130
    assert ends[0]['line'] == 'stopped by SIGINT to process 2 with nothing new to save'


def test_a_process_that_has_ended_is_named_by_those_that_wait_for_it():
    run = Run()
    run.say(1, 'left')
    run.say(0, 'gather', number=1, name='a save', value=None)
    [end] = run.heard(2)
    assert "process 1 has ended, and process 0 waits for it at 'a save'" in end['line']


def test_all_processes_hear_when_all_have_ended_and_process_0_hears_it_last(monkeypatch):
    run, told = Run(), []
    send = Connection.send

    def note(connection, kind, **content):
        told.append([seen.connection for seen in run.hub._seen.values()].index(connection))
        send(connection, kind, **content)

    monkeypatch.setattr(Connection, 'send', note)
    for index in range(3):
        assert run.heard(0) == []
        run.say(index, 'left')
    assert run.heard(0) == [{'kind': 'all left'}]
    assert sorted(told) == [0, 1, 2] and told[-1] == 0, 'its end is the end of the hub'


def test_a_failure_is_told_once_with_its_exit_code():
    run = Run()
    run.say(1, 'failed', line='ValueError: a bad row', code=2)
    run.say(2, 'failed', line='later', code=1)
    [end] = run.heard(2)
    assert (end['line'], end['code'], end['reason']) == (
        'process 1 failed: ValueError: a bad row',
        2,
        'failed',
    )


# The table of what differs.


def raised_from(cause):
    raise RuntimeError('cannot start a backend') from cause


def raised_while_handling(cause):
    try:
        raise cause
    except Exception:
        raise RuntimeError('cannot start a backend')  # noqa: B904, as jax does


@pytest.mark.parametrize('fail', [raised_from, raised_while_handling])
@pytest.mark.parametrize(
    'cause, waits',
    [
        (jax.errors.JaxRuntimeError('UNAVAILABLE: Socket closed'), True),
        (ValueError('Gloo all-reduce failed'), True),
        (ValueError('not a connection'), False),
    ],
)
def test_an_error_that_another_process_may_have_caused_waits_for_the_hub(
    fail, cause, waits, monkeypatch
):
    class Member:
        def fail(self, line, code):
            events.append((line, code))

    events = []
    monkeypatch.setattr(together, 'current_member', Member)
    # Only the time of this module: other threads of the tests sleep as well.
    sleep = types.SimpleNamespace(sleep=lambda seconds: events.append('the hub may end it'))
    monkeypatch.setattr(together, 'time', sleep)
    with pytest.raises(RuntimeError) as error:
        fail(cause)
    together.report_failure(error.value)
    line = ('RuntimeError: cannot start a backend', 1)
    assert events == (['the hub may end it', line] if waits else [line])


class Gathered:
    """A process, and what all of them send in each gather."""

    def __init__(self, index, rounds):
        self.index, self._rounds, self.sent = index, iter(rounds), []

    def gather(self, title, value):
        self.sent.append(value)
        return next(self._rounds)


def test_what_differs_is_sent_once_by_however_many_processes(monkeypatch):
    """All processes get what each sends: 1,000 of them cannot each send 1,000 layouts."""
    same = {f'layout of {i}': f'(8, {i})' for i in range(1000)}
    values = [same] * 7 + [same | {'layout of 3': '(8, 4)'}] + [same] * 992
    digests = [digest(same)] * 7 + [digest(values[7])] + [digest(same)] * 992
    told = [same] + [None] * 6 + [values[7]] + [None] * 992
    monkeypatch.setattr(jax, 'process_count', lambda: len(values))
    monkeypatch.setattr(together, 'connected_member', lambda: one)
    for index in (0, 1, 7, 999):
        one = Gathered(index, [digests, told])
        message = '^process 7 differs .* in layout of 3: look'
        with pytest.raises(ConfigError, match=message) as error:
            together.check_same('planning', values[index], 'look')
        assert one.sent == [digests[index], told[index]] and len(digests[index]) == 16
        assert '(8, 3)  0-6, 8-999' in error.value.details
        one = Gathered(index, [digests[:7]])
        together.check_same('planning', same, 'look')
        assert one.sent == [digests[0]]


def test_the_table_shows_every_value_with_its_processes_and_the_message_the_odd_one():
    values = [{'seed': 0, 'steps': 10}] * 2 + [{'seed': 1, 'steps': 10}] + [{'seed': 0}] * 3
    found = differences(values)
    assert found == {
        'seed': {'0': [0, 1, 3, 4, 5], '1': [2]},
        'steps': {'10': [0, 1, 2], '(none)': [3, 4, 5]},
    }
    error = disagreement({'seed': found['seed']}, 6, 'use the same command')
    assert str(error) == 'process 2 differs from the others in seed: use the same command'
    rows = [line.split() for line in error.details.splitlines()]
    assert rows == [['item', 'value', 'processes'], ['seed', '0', '0-1,', '3-5'], ['1', '2']]


def test_limits_are_positive_numbers():
    with pytest.raises(ConfigError, match='--watchdog_seconds is 0: it must be a number of sec'):
        Limits(watchdog_seconds=0)


# The messages.


def test_a_long_message_arrives_whole_and_a_foreign_one_ends_the_connection():
    ours, theirs = (Connection(one) for one in socket.socketpair())
    text = 'x' * 50_000
    assert ours.send('gather', value=text) and theirs.receive(10)['value'] == text
    with pytest.raises(TimeoutError):
        theirs.receive(0.01)
    assert not theirs.is_closed()
    ours._socket.sendall(b'GET / HTTP/1.1\r\n')
    assert theirs.receive(10) is None
    ours.close()
    assert theirs.is_closed()


def test_a_relay_keeps_a_connection_open_when_the_coordinator_has_gone(monkeypatch):
    variable = 'no_grpc_proxy'
    monkeypatch.setenv(variable, 'host0')
    monkeypatch.setenv('grpc_proxy', 'http://proxy:3128')
    with socket.create_server(('127.0.0.1', 0)) as coordinator:
        host, _, port = relay(f'127.0.0.1:{coordinator.getsockname()[1]}').rpartition(':')
        with socket.create_connection((host, int(port)), timeout=10) as client:
            server = coordinator.accept()[0]
            client.sendall(b'ping')
            assert server.recv(4) == b'ping'
            server.sendall(b'pong')
            assert client.recv(4) == b'pong'
            server.close()
            client.settimeout(0.2)
            for _ in range(3):  # Without the relay, it would read the end, or fail to send.
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.sendall(b'more')
    assert os.environ[variable] == 'host0,127.0.0.1'
