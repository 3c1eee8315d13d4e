"""The connection of this process to the others, which begins before jax's own and ends after it.

Process 0 listens at the address at which jax's coordinator will listen. The others connect to it
and say who they are. When all have come, or some are late, it tells all of them. It then stops
listening, so that jax can use the address, but the connections stay: they are the channel of
`hub.py` and `member.py`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

import jax

from train.errors import ConfigError
from train.processes.disagreements import (
    Disagreement,
    NotTogether,
    differences,
    disagreement,
    note_raised_everywhere,
)
from train.processes.hub import Hub
from train.processes.member import Member
from train.processes.wire import Connection, Limits, Message

_PACKAGES = ('meshwright', 'jax', 'jaxlib', 'flax', 'optax', 'numpy', 'orbax-checkpoint', 'libtpu')
_SECONDS_BETWEEN_TRIES = 0.2
# How much longer than process 0 the others wait for it, so that its message arrives.
_SECONDS_FOR_THE_MESSAGE = 5.0
_members: list[Member] = []


def connected_member() -> Member:
    """This process as a member of its run. The first call may open the channel.

    Raises:
      NotTogether: if jax has connected the processes and they cannot open a channel as well.
    """
    if not _members:
        _open_over_jax(Limits())
    return _members[0]


def current_member() -> Member | None:
    """This process as a member of its run, or None if it is alone or has not joined."""
    return _members[0] if _members else None


def tick() -> None:
    """Passes a tick; see `member.py`. A process that is alone has none."""
    if _members:
        _members[0].tick()


def open_channel(address: str, count: int, index: int, limits: Limits) -> Member:
    """Connects this process to the others.

    Args:
      address: host:port of process 0.

    Raises:
      ConfigError: if the address is malformed, its port is in use, or the processes differ in the
        packages that they have.
      NotTogether: if not all processes come in time.
    """
    host, _, port = address.rpartition(':')
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f'--coordinator_address={address}: write host:port, as in host0:1234')
    hello = _hello(index, count)
    if index == 0:
        with _listen(int(port)) as listener:
            return _gather_all(listener, hello, limits)
    return _connect(host.strip('[]'), int(port), hello, limits)


def packages() -> dict[str, str]:
    """The versions of Python and of the packages that must be the same everywhere."""
    found = {'python': platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _hello(index: int, count: int) -> dict[str, Any]:
    """What a process says of itself when it joins."""
    return {'index': index, 'count': count, 'host': socket.gethostname(), 'packages': packages()}


# ---- process 0


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(
            ('', port), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN
        )
    except OSError as error:
        raise ConfigError(
            f'process 0 cannot listen at port {port} ({os.strerror(error.errno or 0)}): use '
            'another port in --coordinator_address'
        ) from error


def _gather_all(listener: socket.socket, own: Message, limits: Limits) -> Member:
    """Waits for all other processes, and tells them to start."""
    hellos, connections = {0: own}, dict[int, Connection]()
    answered: list[Connection] = []  # all that wait for an answer, also those with a wrong index
    deadline, count = time.monotonic() + limits.init_seconds, int(own['count'])
    problem: Exception | None = None
    while len(hellos) < count and problem is None:
        gone = [i for i, one in connections.items() if one.is_closed()]
        if gone:
            problem = NotTogether(f'process {gone[0]} ended before all others had started')
            break
        listener.settimeout(max(0.01, min(0.5, deadline - time.monotonic())))
        try:
            connection = Connection(listener.accept()[0])
            hello = connection.receive(_SECONDS_FOR_THE_MESSAGE)
        except TimeoutError:
            if time.monotonic() > deadline:
                problem = _late([i for i in range(count) if i not in hellos], own, limits)
            continue
        if hello is None or hello['kind'] != 'hello':
            connection.close()  # another program
            continue
        answered.append(connection)
        problem = _check_hello(hello, own, hellos)
        if problem is None:
            hellos[int(hello['index'])], connections[int(hello['index'])] = hello, connection
    if problem is None and (found := differences([hellos[i]['packages'] for i in range(count)])):
        problem = disagreement(found, count, 'install the same versions on all hosts')
    for connection in answered:
        if problem is None:
            connection.send('start')
        else:
            restartable = isinstance(problem, NotTogether)
            details = getattr(problem, 'details', '')
            connection.send('refused', line=str(problem), restartable=restartable, details=details)
    if problem is not None:
        note_raised_everywhere(problem)
        raise problem
    ours, theirs = (Connection(one) for one in socket.socketpair())
    hosts = {i: str(hello['host']) for i, hello in hellos.items()}
    Hub({0: theirs, **connections}, hosts, limits).start()
    return _start_member(Member(ours, 0, count, limits))


def _late(missing: list[int], own: Message, limits: Limits) -> NotTogether:
    who = ', '.join(map(str, missing[:8])) + (' ...' if len(missing) > 8 else '')
    several = len(missing) > 1
    return NotTogether(
        f'process{"es" if several else ""} {who} of {own["count"]} {"have" if several else "has"} '
        f'not started within {limits.init_seconds:g} s, or cannot reach {own["host"]} '
        f'(--init_seconds={limits.init_seconds:g})'
    )


def _check_hello(hello: Message, own: Message, hellos: Mapping[int, Message]) -> ConfigError | None:
    """What is wrong with a process that wants to join, or None."""
    index, count = int(hello['index']), int(hello['count'])
    if count != own['count']:
        return ConfigError(
            f'process {index} on {hello["host"]} was started with --process_count={count}, and '
            f'process 0 with --process_count={own["count"]}: use the same'
        )
    if index in hellos:
        return ConfigError(
            f'two processes have --process_index={index}: one on {hellos[index]["host"]} and one '
            f'on {hello["host"]}'
        )
    return None


# ---- the other processes


def _connect(host: str, port: int, hello: Message, limits: Limits) -> Member:
    """Connects to process 0, and waits until all processes have connected."""
    deadline, why = time.monotonic() + limits.init_seconds, ''
    while True:
        try:
            connection = Connection(socket.create_connection((host, port), timeout=5))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            connection.send('hello', **hello)
            left = deadline + _SECONDS_FOR_THE_MESSAGE - time.monotonic()
            with contextlib.suppress(TimeoutError):
                if (answer := connection.receive(max(0.1, left))) is not None:
                    break
            why = 'it has closed the connection'
        if time.monotonic() > deadline:
            raise NotTogether(
                f'process {hello["index"]} cannot reach process 0 at {host}:{port} within '
                f'{limits.init_seconds:g} s ({why}): is it running, and is '
                '--coordinator_address right?'
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)
    if answer['kind'] != 'start':
        line, details = str(answer['line']), str(answer['details'])
        refusal = NotTogether(line) if answer['restartable'] else Disagreement(line, details)
        note_raised_everywhere(refusal)
        raise refusal
    return _start_member(Member(connection, int(hello['index']), int(hello['count']), limits))


def _start_member(one: Member) -> Member:
    one.start()
    _members[:] = [one]
    return one


# ---- processes that jax has connected already


def _open_over_jax(limits: Limits) -> None:
    """Opens the channel of processes that are connected by jax, at any free port of process 0."""
    import numpy as np
    from jax.experimental import multihost_utils

    count, index = jax.process_count(), jax.process_index()
    hello = _hello(index, count)
    listener = _listen(0) if index == 0 else None
    port = 0 if listener is None else listener.getsockname()[1]
    address = f'{socket.gethostname()}:{port}'.encode()[:256]
    padded = np.zeros(256, np.uint8)
    padded[: len(address)] = np.frombuffer(address, np.uint8)
    text = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes()
    host, _, number = text.rstrip(b'\0').decode().rpartition(':')
    if listener is not None:
        with listener:
            _gather_all(listener, hello, limits)
    else:
        _connect(host, int(number), hello, limits)
