"""The door of process 0: who may join a run, and who is turned away.

Anybody on the network can connect. A guest joins with a greeting and a line that is sealed with
the secret of the run, within a few seconds altogether. Guests are read at the same time and never
waited for, so that a slow or silent one delays nobody. Others are turned away and counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import selectors
import socket
import time
from collections.abc import Sequence

from train.processes.wire import (
    NONCE_BYTES,
    REFUSAL,
    Connection,
    Message,
    greeting,
    make_seals,
    read_greeting,
    read_message,
)

# How long a guest may take to say who it is, in seconds.
SECONDS_TO_JOIN = 5.0
# Of more guests than these, the earliest is turned away: a process of the run says who it is at
# once, and comes again otherwise.
_MOST_GUESTS = 256
_MOST_BYTES = 2**16  # of a greeting and a hello
_PIECE_BYTES = 2**12
# The fields of a hello, with their types.
_FIELDS = {'index': int, 'count': int, 'host': str, 'packages': dict, 'ports': list}
OTHER_SECRET = 'another secret'


@dataclasses.dataclass(eq=False)
class _Guest:
    """A connection whose other end has not said who it is."""

    sock: socket.socket
    host: str
    until: float
    nonce: bytes
    unread: bytes = b''
    theirs: bytes | None = None


class Door:
    """Lets the processes of a run in. At its end, it closes its listeners.

    `turned_away` counts the guests that were turned away, by host and reason. A guest may take
    `seconds` to say who it is.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        seconds: float = SECONDS_TO_JOIN,
    ):
        self._listeners, self.secret, self._seconds = listeners, secret, seconds
        self._guests: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        for one in listeners:
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
        self.turned_away: collections.Counter[tuple[str, str]] = collections.Counter()

    def next_member(self, seconds: float) -> tuple[Connection, Message] | None:
        """The next process of the run that says who it is, with its hello, or None if it is late.

        The fields of the hello have the right types.
        """
        deadline = time.monotonic() + seconds
        while True:
            ready = self._selector.select(max(0.0, min(0.5, deadline - time.monotonic())))
            for key, _ in ready:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock not in self._guests:
                    self._welcome(sock)
                elif joined := self._hear(self._guests[sock]):
                    return joined
            now = time.monotonic()
            for guest in [g for g in self._guests.values() if g.until < now]:
                self._turn_away(guest, 'it did not say who it is')
            if now >= deadline:
                return None

    def close(self) -> None:
        """Turns all guests away, and listens no more."""
        for guest in list(self._guests.values()):
            self._turn_away(guest, '')
        self._selector.close()
        for one in self._listeners:
            one.close()

    def _welcome(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError:  # It has gone already, or this process has no more files.
            if self._guests:
                self._turn_away(next(iter(self._guests.values())), 'too many connections')
            return
        if len(self._guests) >= _MOST_GUESTS:
            self._turn_away(next(iter(self._guests.values())), 'too many connections')
        sock.setblocking(False)
        host = str(address[0]).removeprefix('::ffff:')
        guest = _Guest(sock, host, time.monotonic() + self._seconds, os.urandom(NONCE_BYTES))
        self._guests[sock] = guest
        self._selector.register(sock, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # What it has closed is found when it is read.
            sock.send(greeting(guest.nonce))

    def _hear(self, guest: _Guest) -> tuple[Connection, Message] | None:
        """Reads what a guest has sent, and returns it as a member once it has said who it is."""
        try:
            piece = guest.sock.recv(_PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            piece = b''
        if not piece:
            # A program that only looks whether the port is open says nothing.
            self._turn_away(guest, 'it closed the connection' if guest.unread else '')
            return None
        guest.unread += piece
        if guest.theirs is None and b'\n' in guest.unread:
            line, _, guest.unread = guest.unread.partition(b'\n')
            guest.theirs = read_greeting(line)
            if guest.theirs is None:
                self._turn_away(guest, 'another program, or another version')
                return None
        if b'\n' in guest.unread and guest.theirs is not None:
            return self._examine(guest, guest.theirs)
        if len(guest.unread) > _MOST_BYTES:
            self._turn_away(guest, 'another program, or another version')
        return None

    def _examine(self, guest: _Guest, theirs: bytes) -> tuple[Connection, Message] | None:
        """Lets a guest in whose first message is a hello with the right seal."""
        of_guest, of_host = make_seals(self.secret, theirs, guest.nonce)
        sealed, _, rest = guest.unread.partition(b'\n')
        line = of_guest.verify(sealed)
        if line is None:
            with contextlib.suppress(OSError):
                guest.sock.send(REFUSAL + b'\n')
            self._turn_away(guest, OTHER_SECRET)
            return None
        hello = read_message(line)
        if hello is None or hello['kind'] != 'hello' or not _is_whole(hello):
            self._turn_away(guest, 'another program, or another version')
            return None
        self._selector.unregister(guest.sock)
        del self._guests[guest.sock]
        guest.sock.setblocking(True)
        return Connection(guest.sock, (of_host, of_guest), rest), hello

    def _turn_away(self, guest: _Guest, why: str) -> None:
        self._selector.unregister(guest.sock)
        del self._guests[guest.sock]
        guest.sock.close()
        if why:
            self.turned_away[guest.host, why] += 1


def _is_whole(hello: Message) -> bool:
    """Whether the fields of a hello have the right types, and its index is in its range."""
    typed = all(type(hello.get(name)) is kind for name, kind in _FIELDS.items())
    return typed and 0 <= hello['index'] < hello['count']
