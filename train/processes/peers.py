"""Connections between any two processes of a run, for what is too large for the hub.

Every process listens at a port of its own, and its `Door` lets in only processes that know the
secret of the run. Whoever connects sends requests, one after another, and the listener answers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

from train.processes.channel import connected_member, listen
from train.processes.door import Door
from train.processes.wire import Connection, Message

_PURPOSE = b'peers'
_SECONDS_TO_CONNECT = 10.0
Answer = Callable[[Connection, Message], None]


class Peers:
    """The other processes of the run. All processes create it together, in their main threads.

    Args:
      answer: answers a request; it runs in a thread for each connection.

    Attributes:
      index: the index of this process.
      hosts: the name of the host of each process.
    """

    def __init__(self, answer: Answer):
        one = connected_member()
        self.index, self._answer, self._secret = one.index, answer, one.secret_for(_PURPOSE)
        own, self._process_0 = one.addresses()
        told = one.gather('the addresses of the processes', [socket.gethostname(), own])
        self.hosts: Sequence[str] = [str(host) for host, _ in told]
        self._addresses = [str(address) for _, address in told]
        on_one_host = all(_is_loopback(address) for address in self._addresses[1:])
        interface = '127.0.0.1' if on_one_host else '' if not own or _is_loopback(own) else own
        listener = listen(0, interface)
        self._ports = one.gather('the ports of the processes', listener.getsockname()[1])
        self._door, self._ends = Door([listener], self._secret), threading.Event()
        self._connections: dict[int, tuple[threading.Lock, Connection]] = {}
        self._connecting = threading.Lock()
        threading.Thread(target=self._let_in, name='peers', daemon=True).start()

    @contextlib.contextmanager
    def connected(self, index: int) -> Iterator[Connection]:
        """The connection to a process, for one request and its answer.

        After an error of the body, the next request uses a new connection. Raises an OSError if the
        process cannot be reached.
        """
        with self._connecting:
            if index not in self._connections:
                self._connections[index] = threading.Lock(), self._connect(index)
            lock, connection = self._connections[index]
        with lock:
            try:
                yield connection
            except BaseException:
                with self._connecting:
                    if self._connections.get(index, (None, None))[1] is connection:
                        del self._connections[index]
                connection.close()
                raise

    def close(self) -> None:
        """Ends all connections."""
        self._ends.set()
        for _, connection in list(self._connections.values()):  # Another thread may connect now.
            connection.close()

    def _connect(self, index: int) -> Connection:
        address = self._addresses[index]
        if not address or _is_loopback(address):  # It is process 0, or on the host of process 0.
            address = self._process_0 or '127.0.0.1'
        where = (address, self._ports[index])
        connection = Connection(socket.create_connection(where, timeout=_SECONDS_TO_CONNECT))
        if not connection.greet(self._secret, _SECONDS_TO_CONNECT):
            raise ConnectionError(f'another program is at port {where[1]} of {address}')
        connection.send(
            'hello', index=self.index, count=len(self.hosts), host='', packages={}, ports=[]
        )
        return connection

    def _let_in(self) -> None:
        while not self._ends.is_set():
            if joined := self._door.next_member(0.5):
                connection, _ = joined
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        self._door.close()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(OSError), contextlib.closing(connection):
            while not self._ends.is_set() and (message := connection.receive()) is not None:
                self._answer(connection, message)


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address.partition('%')[0]).is_loopback
