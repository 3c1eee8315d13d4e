"""Messages between the processes of a run, one line of JSON each, and how long to wait for them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from typing import Any

from partitioning.untrusted_text import parse_json
from train.errors import check_seconds

Message = dict[str, Any]
# A message contains at most the settings of a run. A longer line is not one of ours.
MOST_BYTES = 32 * 2**20


class Connection:
    """One end of a connection. Any thread may send; one thread receives.

    Args:
      sock: a connected socket, which belongs to this object from now on.
    """

    def __init__(self, sock: socket.socket):
        self._socket, self._sending = sock, threading.Lock()
        self._unread = b''
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: str, **content: Any) -> bool:
        """Sends a message, and returns whether the other end may receive it."""
        line = json.dumps({'kind': kind, **content}).encode() + b'\n'
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:  # The other end has gone, which its reader notices as well.
            return False
        return True

    def receive(self, seconds: float | None = None) -> Message | None:
        """Waits for the next message.

        `seconds` is how long to wait, by default for ever.

        Returns:
          The message, or None if the other end has closed the connection or sends something else.

        Raises:
          TimeoutError: if nothing arrives in time.
        """
        self._socket.settimeout(seconds)
        while b'\n' not in self._unread:
            try:
                piece = self._socket.recv(2**16)
            except TimeoutError:
                raise
            except OSError:
                piece = b''
            if not piece or len(self._unread) > MOST_BYTES:
                return None
            self._unread += piece
        line, _, self._unread = self._unread.partition(b'\n')
        with contextlib.suppress(ValueError):
            message = parse_json(line.decode())
            if isinstance(message, dict) and isinstance(message.get('kind'), str):
                return message
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
