"""Strangers on the network, each of which disturbs a port of this machine in its own way.

`hostile_peers.py` starts them as processes. They were written without reading what they disturb.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# A TLS 1.2 ClientHello with one cipher suite, and the start of an HTTP/2 connection with SETTINGS.
TLS = bytes.fromhex('16030100310100002d0303') + bytes(32) + bytes.fromhex('000002002f0100')
HTTP2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes.fromhex('000000040000000000')
LINES = tuple(
    json.dumps({'kind': kind, 'index': index, 'count': 2, **more}).encode() + b'\n'
    for index in (0, 1, 2, -1, 10**400, None, 1.0, '1', [1], True)
    for kind, more in (
        ('hello', {'host': 'evil', 'packages': {}, 'ports': [1]}),
        ('end', {'line': '\x1b[2J', 'code': 0, 'causes': [], 'reason': ''}),
        ('signal', {'signum': 15, 'again': True}),
        ('left', {}),
    )
)


def is_open(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    tables = [Path(f'/proc/net/{table}').read_text() for table in ('tcp', 'tcp6')]
    return any(re.search(f':{port:04X} [0-9A-F]+:0000 0A ', table) for table in tables)


def connect(port: int) -> socket.socket | None:
    """A connection, or None if nobody accepts it."""
    try:
        one = socket.create_connection(('127.0.0.1', port), timeout=2)
    except OSError:
        return None
    one.settimeout(0.05)
    return one


def read(one: socket.socket) -> bytes | None:
    """What has arrived within a moment, or None at the end of the connection."""
    try:
        return one.recv(1 << 16) or None
    except TimeoutError:
        return b''
    except OSError:
        return None


def write(one: socket.socket, data: bytes) -> bool:
    """Sends data, and returns whether that was possible."""
    try:
        one.sendall(data)
    except OSError:
        return False
    return True


# ---- the strangers: each is called in a loop with a port that is open


def tls(port: int) -> None:
    """Speaks TLS on 20 connections, and waits for the answer."""
    many = [one for one in (connect(port) for _ in range(20)) if one]
    for one in many:
        write(one, TLS)
    for one in many:
        read(one)
        one.close()


def slow_headers(port: int) -> None:
    """Sends the headers of 64 HTTP requests, one byte after another."""
    many = [one for one in (connect(port) for _ in range(64)) if one]
    for byte in b'GET / HTTP/1.1\r\nHost: a\r\n' + b'X-A: b\r\n' * 100:
        many = [one for one in many if write(one, bytes([byte]))]
        if not many:
            return
        time.sleep(0.3)


def crowd(port: int) -> None:
    """Holds 900 silent connections, and opens each again as soon as it is closed."""
    many: list[socket.socket] = []
    while len(many) < 900 and (one := connect(port)):
        one.setblocking(False)
        many.append(one)
    while many:
        kept = []
        for one in many:
            try:
                alive = bool(one.recv(1 << 16))
            except BlockingIOError:
                alive = True
            except OSError:
                alive = False
            again = one if alive else connect(port)
            if not alive:
                one.close()
            if again:
                again.setblocking(False)
                kept.append(again)
        many = kept
        time.sleep(0.05)


def resets(port: int) -> None:
    """Connects, says a little and resets the connection, as often as it can."""
    for number in range(200):
        if one := connect(port):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            write(one, b'{' * (number % 3))
            one.close()


def mirror(port: int) -> None:
    """Returns what it hears: on the same connection, or on another one that does so, too."""
    alone = [one for one in (connect(port) for _ in range(4)) if one]
    pairs = [(a, b) for a, b in ((connect(port), connect(port)) for _ in range(4)) if a and b]
    until = time.monotonic() + 5
    ways = [(one, one) for one in alone] + pairs + [(b, a) for a, b in pairs]
    while ways and time.monotonic() < until:
        ways = [
            (source, target)
            for source, target in ways
            if (data := read(source)) is not None and (not data or write(target, data))
        ]
    for one in alone + [one for pair in pairs for one in pair]:
        one.close()


def replay(port: int) -> None:
    """Repeats what process 1 of another run with the same secret has sent, whole and changed."""
    for path in sorted(Path(os.environ['RECORDED']).glob('sent-*')):
        data = path.read_bytes()
        if data.startswith(HTTP2[:3]):  # a connection of jax
            continue
        lines = data.splitlines(keepends=True)
        for one_try in (data, data[:-9], b''.join(lines[1:]), b''.join(lines[:1] + lines)):
            if one := connect(port):
                for line in one_try.splitlines(keepends=True):
                    read(one)
                    if not write(one, line):
                        break
                read(one)
                one.close()


def other_secret(port: int) -> None:
    """Runs process 1 itself, with another secret."""
    address = f'--coordinator_address=127.0.0.1:{port}'
    place = ['--process_count=2', '--process_index=1', '--init_seconds=20', '--cpu_devices=1']
    command = [sys.executable, '-m', 'train', 'run.gin', '--gin.MODEL_DIR=own', address, *place]
    env = os.environ | {'MESHWRIGHT_SECRET': 'a guess of someone who was not told the secret'}
    subprocess.run(command, env=env, capture_output=True, check=False)


def flood(port: int) -> None:
    """Sends 64 MiB without an end of line, nested JSON, and lines that look like ours."""
    for data in (bytes(1 << 26), b'[' * (1 << 20) + b'\n', b''.join(LINES), *LINES):
        if one := connect(port):
            one.settimeout(2)
            write(one, data)
            one.close()


def deaf(port: int) -> None:
    """Never reads: tiny buffers, urgent bytes, and connections that are closed in one direction."""
    many = []
    for number in range(40):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        one.settimeout(1)
        try:
            one.connect(('127.0.0.1', port))
            one.send(b'!', socket.MSG_OOB)
            one.sendall(LINES[number % len(LINES)])
            if number % 2:
                one.shutdown(socket.SHUT_WR)
        except OSError:
            continue
        many.append(one)
    time.sleep(3)


def http2(port: int) -> None:
    """Begins a connection of HTTP/2, which jax's service speaks, and sends broken frames."""
    if one := connect(port):
        for frame in (HTTP2, bytes(9), b'\xff' * 109, b'\x00\x40\x00\x01\x05' + bytes(4)):
            if not write(one, frame):
                break
            read(one)
        one.close()


PEERS: dict[str, Callable[[int], None]] = {
    peer.__name__: peer
    for peer in (tls, slow_headers, crowd, resets, mirror, replay, other_secret, flood, deaf, http2)
}


def attack(name: str, port: int, pid: int) -> None:
    """Lets a stranger disturb a port until a process ends, and prints how often it has tried."""
    calls = 0
    while is_running(pid):
        if is_open(port):
            calls += 1
            PEERS[name](port)
        else:
            time.sleep(0.01)
    print(calls)


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


if __name__ == '__main__':
    attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
