"""Strangers at the door of a run: it starts as if they were not there."""

import contextlib
import json
import os
import socket
import struct
import threading
import time

import pytest

from train.errors import ConfigError
from train.processes import channel
from train.processes.channel import interface_of, open_channel, packages
from train.processes.disagreements import NotTogether
from train.processes.launching.attempts import reserved_port
from train.processes.secret import find_secret, secret_of_one_run
from train.processes.wire import Connection, Limits, greeting, make_seals, read_greeting

pytestmark = pytest.mark.core

SECRET = 'a secret of this test'


@pytest.fixture
def run(monkeypatch):
    """Starts process 0 of 2 in a thread; process 1 joins when the test calls `join`."""
    monkeypatch.setenv('MESHWRIGHT_SECRET', SECRET)
    monkeypatch.setattr(channel, '_start_member', lambda one: one)
    said = []
    monkeypatch.setattr(channel, 'print_error', said.append)
    got = {}

    def process(index, port, seconds=60.0):
        try:
            limits = Limits(init_seconds=seconds)
            got[index] = open_channel(f'127.0.0.1:{port}', 2, index, limits)[1]
        except (NotTogether, ConfigError) as error:
            got[index] = str(error)

    class Run:
        def __init__(self, seconds=60.0):
            with reserved_port() as self.port:
                pass
            self._first = threading.Thread(target=process, args=(0, self.port, seconds))
            self._first.start()
            self.got, self.said = got, said

        def connect(self):
            for _ in range(200):
                try:
                    return socket.create_connection(('127.0.0.1', self.port), timeout=10)
                except OSError:
                    time.sleep(0.02)
            raise AssertionError('process 0 does not listen')

        def join(self):
            process(1, self.port)
            self._first.join()
            return got == {0: self.port, 1: self.port}

        def wait(self):
            self._first.join()

    return Run


def hello(**changes):
    fields = {'kind': 'hello', 'index': 1, 'count': 2, 'host': 'h', 'packages': packages()}
    return json.dumps(fields | {'ports': [1]} | changes).encode()


def sealed(sock, line, secret=SECRET, nonce=b'n' * 16):
    """Greets as a process does, and sends a line that is sealed with a secret."""
    sock.sendall(greeting(nonce))
    theirs = read_greeting(sock.makefile('rb').readline().rstrip(b'\n'))
    guest, _ = make_seals(secret.encode(), nonce, theirs)
    sock.sendall(guest.sign(line) + b'\n')


def closes_at_once(sock):
    sock.close()


def resets(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    sock.close()


def drips(sock):
    """A byte every now and then: it must not hold the start."""

    def drip():
        try:
            for byte in greeting(b'n' * 16):
                sock.send(bytes([byte]))
                time.sleep(0.2)
        except OSError:
            pass

    threading.Thread(target=drip, daemon=True).start()


def greets_and_leaves(sock):
    sock.sendall(greeting(b'n' * 16))
    sock.close()


def of_another_connection(sock):
    """A line with the right seal, but for the random bytes of another connection."""
    guest, _ = make_seals(SECRET.encode(), b'n' * 16, b'o' * 16)
    sock.sendall(greeting(b'n' * 16) + guest.sign(hello()) + b'\n')


def second_line_first(sock):
    sock.sendall(greeting(b'n' * 16))
    theirs = read_greeting(sock.makefile('rb').readline().rstrip(b'\n'))
    guest, _ = make_seals(SECRET.encode(), b'n' * 16, theirs)
    guest.sign(b'')
    sock.sendall(guest.sign(hello()) + b'\n')


def with_the_seal_of_the_host(sock):
    sock.sendall(greeting(b'n' * 16))
    theirs = read_greeting(sock.makefile('rb').readline().rstrip(b'\n'))
    _, host = make_seals(SECRET.encode(), b'n' * 16, theirs)
    sock.sendall(host.sign(hello()) + b'\n')


def sends(*pieces):
    def act(sock):
        try:
            for piece in pieces:
                sock.sendall(piece)
        except OSError:  # It was turned away before it had said everything.
            pass

    return act


def says(line, **how):
    return lambda sock: sealed(sock, line, **how)


GREETING = greeting(b'n' * 16)
STRANGERS = {
    'no index': sends(b'{"kind": "hello"}\n'),
    'index 7 of 2': sends(hello(index=7) + b'\n'),
    'a whole hello without a seal': sends(hello() + b'\n'),
    'a greeting and a hello without a seal': sends(GREETING + hello() + b'\n'),
    'a seal of zeros': sends(GREETING + b'0' * 64 + b' ' + hello() + b'\n'),
    'an empty seal': sends(GREETING + b' ' + hello() + b'\n'),
    'a secret that is guessed': says(hello(), secret='password'),
    'no secret': says(hello(), secret=''),
    'a repeated line': of_another_connection,
    'a later line': second_line_first,
    'the seal of the other direction': with_the_seal_of_the_host,
    'the secret, but no hello': says(b'{"kind": "left"}'),
    'the secret, but no JSON': says(b'hello'),
    'the secret, but a list': says(b'[]'),
    'the secret, but no index': says(hello(index=None)),
    'the secret, but index 2 of 2': says(hello(index=2)),
    'the secret, but index -1': says(hello(index=-1)),
    'the secret, but index true': says(hello(index=True)),
    'the secret, but a text as index': says(hello(index='1')),
    'the secret, but no packages': says(hello(packages=None)),
    'the secret, but no ports': says(hello(ports=7)),
    'the secret, but bytes that are no text': says(b'\xff\xfe{"kind": "hello"}'),
    'the secret, but a deep list': says(b'[' * 5000 + b']' * 5000),
    'a web browser': sends(b'GET / HTTP/1.1\r\nHost: x\r\n\r\n'),
    'TLS': sends(bytes.fromhex('16030100a5010000a10303') + os.urandom(160) + b'\n'),
    'gRPC': sends(b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'),
    'SSH': sends(b'SSH-2.0-OpenSSH_9.6\r\n'),
    'empty lines': sends(b'\n' * 1000),
    'null bytes': sends(b'\0' * 1000 + b'\n'),
    'escape codes': sends(b'\x1b[2J\x1b]0;x\x07\n'),
    'no end of the line': sends(b'x' * 2**20),
    'a greeting and no end of the line': sends(GREETING, b'x' * 2**20),
    'a greeting of another version': sends(b'meshwright 2 ' + b'00' * 16 + b'\n'),
    'a short greeting': sends(b'meshwright 1 00\n'),
    'a long greeting': sends(b'meshwright 1 ' + b'00' * 1000 + b'\n'),
    'a greeting that is not hexadecimal': sends(b'meshwright 1 ' + b'zz' * 16 + b'\n'),
    'two greetings': sends(GREETING + GREETING),
    'half a greeting': sends(GREETING[:20]),
    'only a greeting': sends(GREETING),
    'a greeting, and it leaves': greets_and_leaves,
    'silence': sends(),
    'a byte now and then': drips,
    'a port scan': closes_at_once,
    'a reset': resets,
}


@pytest.mark.parametrize('stranger', STRANGERS.values(), ids=STRANGERS)
def test_a_run_starts_as_if_a_stranger_were_not_there(run, stranger):
    started = run()
    sock = started.connect()
    stranger(sock)
    assert started.join()
    sock.close()


def test_they_may_all_come_at_once_and_are_counted(run):
    started = run()
    socks = [started.connect() for _ in STRANGERS for _ in range(8)]
    for sock, act in zip(socks, [*STRANGERS.values()] * 8, strict=True):
        with contextlib.suppress(OSError):  # The earliest are turned away when there are too many.
            act(sock)
    assert started.join()
    for sock in socks:
        sock.close()
    [line] = started.said
    assert 'turned away while the processes joined' in line
    assert 'from 127.0.0.1: another program, or another version' in line and '\n' not in line


def test_a_process_with_another_secret_learns_it_at_once(run, monkeypatch):
    started = run(seconds=1.0)
    started.connect().close()
    monkeypatch.setenv('MESHWRIGHT_SECRET', 'the secret of another run')
    with pytest.raises(ConfigError, match='has another secret than process 0 at'):
        open_channel(f'127.0.0.1:{started.port}', 2, 1, Limits(init_seconds=60.0))
    started.wait()
    assert '127.0.0.1 had another MESHWRIGHT_SECRET: set the same everywhere' in started.got[0]


@pytest.fixture
def run_that_one_has_left(run, monkeypatch):
    """A run in which process 1 has said who it is, and closes the connection before it is heard."""
    left, check = threading.Event(), channel._check_hello
    monkeypatch.setattr(channel, '_check_hello', lambda *of: left.wait(30) and check(*of))
    started = run(seconds=30.0)
    first = started.connect()
    sealed(first, hello())
    first.shutdown(socket.SHUT_RDWR)
    left.set()
    return started


def test_a_process_that_was_not_heard_in_time_comes_again(run_that_one_has_left):
    """As when process 0 was suspended for longer than a process waits for it to say anything."""
    assert run_that_one_has_left.join(), run_that_one_has_left.got


def test_a_process_that_ends_before_the_start_and_stays_away_is_named(run_that_one_has_left):
    run_that_one_has_left.wait()
    assert run_that_one_has_left.got == {0: 'process 1 ended before all others had started'}


def test_a_forged_line_ends_the_connection():
    ours, theirs = socket.socketpair()
    of_guest, of_host = make_seals(b'secret', b'g', b'h')
    receiver = Connection(ours, (of_host, of_guest))
    sender, _ = make_seals(b'secret', b'g', b'h')
    first = sender.sign(b'{"kind": "beat"}') + b'\n'
    theirs.sendall(first)
    assert receiver.receive(10) == {'kind': 'beat'}
    theirs.sendall(first)  # the same line again
    assert receiver.receive(10) is None
    for one in (ours, theirs):
        one.close()


def test_the_secret_of_a_user_is_made_once_and_is_private(tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(find_secret({}, tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [path] = (tmp_path / 'meshwright').iterdir()
    assert len(found) == 8 and {one.decode() for one in found} == {path.read_text().strip()}
    assert path.stat().st_mode & 0o777 == 0o600 and len(found[0]) == 32


def test_what_outlasts_a_run_has_another_secret_than_the_run(tmp_path):
    one_run, of_user = secret_of_one_run(), find_secret({}, tmp_path)
    for text, lasting in ((one_run, of_user), (SECRET, SECRET.encode())):
        environ = {'MESHWRIGHT_SECRET': text}
        assert find_secret(environ, tmp_path) == text.encode()
        assert find_secret(environ, tmp_path, lasting=True) == lasting


def test_secrets_that_are_none(tmp_path):
    readable, short, folder = tmp_path / 'readable', tmp_path / 'short', tmp_path / 'folder'
    readable.write_text('x' * 32)
    readable.chmod(0o644)
    short.write_text('x')
    short.chmod(0o600)
    folder.mkdir(mode=0o700)
    os.mkfifo(tmp_path / 'fifo', 0o600)
    by_file = 'MESHWRIGHT_SECRET_FILE'
    for environ, message in [
        ({'MESHWRIGHT_SECRET': 'abc'}, r'too short \(3 of at least 16'),
        ({'MESHWRIGHT_SECRET': SECRET, by_file: str(short)}, 'both set: unset one'),
        ({by_file: str(readable)}, r'can be read by other users \(mode 644\): run chmod 600'),
        ({by_file: str(short)}, r'too short \(1 of'),
        ({by_file: str(folder)}, 'is not a file'),
        ({by_file: str(tmp_path / 'fifo')}, 'is not a file'),
        ({by_file: str(tmp_path / 'missing')}, r'cannot be read \(No such file'),
        ({'XDG_CONFIG_HOME': '/proc/nowhere'}, 'cannot be kept in the home folder.*MESHWRIGHT_'),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_secret(environ)


def test_process_0_listens_at_the_interface_of_a_literal_address():
    assert interface_of('127.0.0.1') == interface_of('localhost') == '127.0.0.1'
    # Names, and addresses that lead here through another host, stand for all interfaces.
    assert interface_of('train-0.train') == interface_of('192.0.2.1') == ''
