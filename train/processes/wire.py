"""Messages between the processes of a run, one line of JSON each, and how long to wait for them.

A line between hosts is sealed with the secret of the run. Each end of a connection sends 16 random
bytes first. From them and the secret, both derive a key for each direction. Every line carries its
HMAC-SHA256, which also covers its number on the connection, so that lines cannot be forged,
repeated, or brought from another connection. They are not encrypted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import socket
import threading
import time
from typing import Any

from partitioning.untrusted_text import parse_json
from train.errors import check_seconds

NONCE_BYTES = 16


class Seal:
    """Seals the lines of one direction of a connection, or checks them, in their order."""

    def __init__(self, key: bytes):
        self._key, self._number = key, 0

    def sign(self, line: bytes) -> bytes:
        """The line with its seal before it."""
        return self._code(line) + b' ' + line

    def verify(self, sealed: bytes) -> bytes | None:
        """The line without its seal, or None if the seal is not right."""
        code, _, line = sealed.partition(b' ')
        return line if hmac.compare_digest(code, self._code(line)) else None

    def _code(self, line: bytes) -> bytes:
        number = self._number.to_bytes(8, 'big')
        self._number += 1
        return hmac.digest(self._key, number + line, 'sha256').hex().encode()


def make_seals(secret: bytes, of_guest: bytes, of_host: bytes) -> tuple[Seal, Seal]:
    """The seals of a connection: of what the guest, who connects, sends, and of what the host does.

    `of_guest` and `of_host` are the random bytes that each of them has sent.
    """
    keys = (
        hmac.digest(secret, b'meshwright ' + who + of_guest + of_host, 'sha256')
        for who in (b'guest', b'host ')
    )
    guest, host = map(Seal, keys)
    return guest, host


Message = dict[str, Any]
# A message contains at most the settings of a run. A longer line is not one of ours.
MOST_BYTES = 32 * 2**20


# What each end sends first, before 32 hexadecimal digits: the protocol and its version.
GREETING = b'meshwright 1 '
# What the host says to a guest with another secret.
REFUSAL = b'another secret'


class Connection:
    """One end of a connection. Any thread may send; one thread receives.

    `refused` says whether the other end has said that it has another secret.

    Args:
      sock: a connected socket, which belongs to this object from now on.
      seals: the seals of what this end sends and of what it receives. Without them, lines are not
        sealed: both ends are in one process.
      unread: what has been read from the socket already.
    """

    def __init__(
        self, sock: socket.socket, seals: tuple[Seal, Seal] | None = None, unread: bytes = b''
    ):
        self._socket, self._sending = sock, threading.Lock()
        self._seals, self._unread = seals, unread
        self.refused = False
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: str, **content: Any) -> bool:
        """Sends a message, and returns whether the other end may receive it."""
        line = json.dumps({'kind': kind, **content}).encode()
        try:
            with self._sending:
                sealed = self._seals[0].sign(line) if self._seals else line
                self._socket.sendall(sealed + b'\n')
        except OSError:  # The other end has gone, which its reader notices as well.
            return False
        return True

    def receive(self, seconds: float | None = None) -> Message | None:
        """Waits for the next message.

        `seconds` is how long to wait for all of it, by default for ever. Returns the message, or
        None if the other end has closed the connection or sends something else. Raises a
        TimeoutError if it does not arrive in time.
        """
        line = self._read_line(seconds)
        if line is not None and self._seals:
            self.refused = line == REFUSAL
            line = self._seals[1].verify(line)
        return None if line is None else read_message(line)

    def _read_line(self, seconds: float | None, most: int = MOST_BYTES) -> bytes | None:
        """The next line, or None if there is none of at most `most` bytes."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b'\n' not in self._unread:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            try:
                piece = self._socket.recv(2**16)
            except TimeoutError:
                raise
            except OSError:
                piece = b''
            if not piece or len(self._unread) > most:
                return None
            self._unread += piece
        line, _, self._unread = self._unread.partition(b'\n')
        return line

    def greet(self, secret: bytes, seconds: float) -> bool:
        """Exchanges greetings with the host, after which lines are sealed.

        Returns whether the other end has greeted; otherwise it is another program. Raises a
        TimeoutError if it says nothing in time.
        """
        own = os.urandom(NONCE_BYTES)
        with contextlib.suppress(OSError):
            self._socket.sendall(greeting(own))
        line = self._read_line(seconds, most=2**10)
        theirs = read_greeting(line or b'')
        if theirs is None:
            return False
        self._seals = make_seals(secret, own, theirs)
        return True

    def send_block(self, data: bytes | memoryview) -> bool:
        """Sends bytes, which a sealed message before them vouches for. One thread may send them."""
        told = self.send('block', size=len(data), sha256=hashlib.sha256(data).hexdigest())
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return told

    def receive_block(self, seconds: float) -> bytearray | None:
        """The bytes that `send_block` has sent, or None if the other end sends something else.

        Raises a TimeoutError if nothing arrives for `seconds`.
        """
        message = self.receive(seconds)
        if message is None or message['kind'] != 'block' or message['size'] > MOST_BYTES:
            return None
        block = bytearray(message['size'])
        count = min(len(block), len(self._unread))
        block[:count], self._unread = self._unread[:count], self._unread[count:]
        self._socket.settimeout(seconds)
        while count < len(block):
            try:
                received = self._socket.recv_into(memoryview(block)[count:])
            except TimeoutError:
                raise
            except OSError:
                received = 0
            if not received:
                return None
            count += received
        return block if hashlib.sha256(block).hexdigest() == message['sha256'] else None

    def addresses(self) -> tuple[str, str] | None:
        """The addresses of this end and of the other one, or None without a network between."""
        with contextlib.suppress(OSError):
            ends = self._socket.getsockname(), self._socket.getpeername()
            if self._socket.family in (socket.AF_INET, socket.AF_INET6):
                own, other = (end[0].removeprefix('::ffff:') for end in ends)
                return own, other
        return None

    def is_closed(self) -> bool:
        """Whether the other end has closed it. No other thread may receive meanwhile."""
        self._socket.setblocking(False)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b''
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._socket.setblocking(True)

    def close(self) -> None:
        """Closes the connection, which ends a thread that waits in `receive`, too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def read_message(line: bytes) -> Message | None:
    with contextlib.suppress(ValueError):
        message = parse_json(line.decode())
        if isinstance(message, dict) and isinstance(message.get('kind'), str):
            return message
    return None


def greeting(nonce: bytes) -> bytes:
    """The first line of an end of a connection."""
    return GREETING + nonce.hex().encode() + b'\n'


def read_greeting(line: bytes) -> bytes | None:
    """The random bytes of a greeting, or None if it is none."""
    if not line.startswith(GREETING):
        return None
    with contextlib.suppress(ValueError):
        nonce = bytes.fromhex(line[len(GREETING) :].decode())
        return nonce if len(nonce) == NONCE_BYTES else None
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the processes of a run wait for each other, in seconds.

    Attributes:
      init_seconds: for all processes to start.
      heartbeat_seconds: for a sign of life of a process, which it gives even while it compiles.
      watchdog_seconds: for a sign of progress of a process for which others wait.
    """

    init_seconds: float = 60.0
    heartbeat_seconds: float = 30.0
    watchdog_seconds: float = 120.0

    def __post_init__(self) -> None:
        check_seconds(**{f'--{name}': value for name, value in vars(self).items()})

    @property
    def beat_seconds(self) -> float:
        """The time between two signs of life."""
        return min(1.0, self.heartbeat_seconds / 10)
