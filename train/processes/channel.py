"""The connection of this process to the others, which begins before jax's own and ends after it.

Process 0 listens at the address at which jax's coordinator will listen. The others connect to it
and say who they are; `door.py` turns everybody else away. When all have come, or some are late, it
tells all of them. It then stops listening, so that jax can use the address, but the connections
stay: they are the channel of `hub.py` and `member.py`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import itertools
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
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
from train.processes.door import OTHER_SECRET, Door
from train.processes.hub import Hub
from train.processes.member import Member
from train.processes.output import print_error
from train.processes.secret import VARIABLE, find_secret, secret_of_one_run
from train.processes.wire import Connection, Limits, Message

_PACKAGES = ('meshwright', 'jax', 'jaxlib', 'flax', 'optax', 'numpy', 'orbax-checkpoint', 'libtpu')
_SECONDS_BETWEEN_TRIES = 0.2
# How long process 0 may take to say that it hears another one, and how much longer than process 0
# the others wait for it, so that its message arrives.
_SECONDS_FOR_THE_MESSAGE = 5.0
# How long a process whose connection is closed may take to come again: it does so at once if this
# process was too slow to hear it, because the machine was suspended or very busy.
_SECONDS_TO_COME_AGAIN = 2.0
_members: list[Member] = []


def connected_member() -> Member:
    """This process as a member of its run. The first call may open the channel.

    Raises a NotTogether if jax has connected the processes and they cannot open a channel as well.
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


def open_channel(
    address: str, count: int, index: int, limits: Limits, other_ports: Sequence[int] = ()
) -> tuple[Member, int]:
    """Connects this process to the others.

    Raises a ConfigError if the address, host:port of process 0, is malformed, its port is in use,
    the processes differ in the packages that they have, or this one has another secret than process
    0, and a NotTogether if not all processes come in time. `other_ports` of process 0 count if a
    firewall closes the one of `address`. Returns this process as a member of the run, and the first
    port at which all reach process 0.
    """
    host, _, port = address.rpartition(':')
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f'--coordinator_address={address}: write host:port, as in host0:1234')
    hello, ports = _hello(index, count), (int(port), *other_ports)
    secret, host = find_secret(os.environ), host.strip('[]')
    if index == 0:
        listeners = list(_listen_at(ports, interface_of(host)))
        with contextlib.closing(Door(listeners, secret)) as door:
            ports = tuple(one.getsockname()[1] for one in listeners)
            return _gather_all(door, hello | {'ports': [*ports]}, limits)
    return _connect(host, ports, hello, limits, secret)


def interface_of(host: str) -> str:
    """The address of the interface at which process 0 listens; empty stands for all of them.

    A name stands for all: its address may be another one on other hosts, and on this host often is
    the one of the loopback interface. So does an address that leads here through another host.
    """
    try:
        address = str(ipaddress.ip_address('127.0.0.1' if host == 'localhost' else host))
        family = socket.AF_INET6 if ':' in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            tried.bind((address, 0))
    except (ValueError, OSError):
        return ''
    return address


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


def _listen_at(ports: Sequence[int], interface: str) -> Iterator[socket.socket]:
    """Listens at all ports that are free. Raises a ConfigError if none is."""
    problems = []
    for port in ports:
        try:
            yield listen(port, interface)
        except ConfigError as error:
            problems.append(error)
    if len(problems) == len(ports):
        raise problems[0]


def listen(port: int, interface: str = '') -> socket.socket:
    """Listens at a port of an interface, by default of all. Raises a ConfigError if it is taken."""
    dual = not interface and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ':' in interface else socket.AF_INET
    settings: dict[str, Any] = {'family': family, 'backlog': socket.SOMAXCONN}
    try:
        return socket.create_server((interface, port), dualstack_ipv6=dual, **settings)
    except OSError as error:
        raise ConfigError(
            f'process 0 cannot listen at port {port} ({os.strerror(error.errno or 0)}): use '
            'another port in --coordinator_address'
        ) from error


def _gather_all(door: Door, own: Message, limits: Limits) -> tuple[Member, int]:
    """Waits for all other processes, and tells them to start and at which port they find jax."""
    hellos, connections = {0: own}, dict[int, Connection]()
    answered: list[Connection] = []  # all that wait for an answer, also those with a wrong index
    deadline, count = time.monotonic() + limits.init_seconds, int(own['count'])
    problem: Exception | None = None
    closed = dict[int, float]()  # since when the connection of a process is closed
    while problem is None:
        now = time.monotonic()
        closed = {i: closed.get(i, now) for i, one in connections.items() if one.is_closed()}
        if gone := [i for i, since in closed.items() if now - since > _SECONDS_TO_COME_AGAIN]:
            problem = NotTogether(f'process {gone[0]} ended before all others had started')
            break
        if len(hellos) == count and not closed:
            break
        joined = door.next_member(max(0.01, min(0.5, deadline - time.monotonic())))
        if joined is None:
            if time.monotonic() > deadline:
                missing = [i for i in range(count) if i not in hellos or i in closed]
                problem = _late(missing, own, limits, door)
            continue
        connection, hello = joined
        connection.send('heard')
        answered.append(connection)
        index = int(hello['index'])
        if index in connections and connections[index].is_closed():
            del hellos[index]
        problem = _check_hello(hello, own, hellos)
        if problem is None:
            hellos[index], connections[index] = hello, connection
    if problem is None and (found := differences([hellos[i]['packages'] for i in range(count)])):
        problem = disagreement(found, count, 'install the same versions on all hosts')
    ports = [p for p in own['ports'] if all(p in hello['ports'] for hello in hellos.values())]
    if problem is None and not ports:
        problem = _apart(hellos)
    for connection in answered:
        if problem is None:
            connection.send('start', port=ports[0])
        else:
            restartable = isinstance(problem, NotTogether)
            details = getattr(problem, 'details', '')
            connection.send('refused', line=str(problem), restartable=restartable, details=details)
    if problem is not None:
        note_raised_everywhere(problem)
        raise problem
    if door.turned_away:
        print_error(_strangers(door))
    ours, theirs = (Connection(one) for one in socket.socketpair())
    hosts = {i: str(hello['host']) for i, hello in hellos.items()}
    Hub({0: theirs, **connections}, hosts, limits).start()
    return _start_member(Member(ours, 0, count, limits, door.secret)), ports[0]


def _strangers(door: Door) -> str:
    """Says who was turned away while the processes joined."""
    times, found = door.turned_away.total(), door.turned_away.most_common(3)
    listed = '; '.join(f'{n:,} from {host}: {why}' for (host, why), n in found)
    more = f'; and {times - sum(n for _, n in found):,} more' if len(door.turned_away) > 3 else ''
    connections = 'connection was' if times == 1 else 'connections were'
    return f'{times:,} {connections} turned away while the processes joined ({listed}{more})'


def _late(missing: list[int], own: Message, limits: Limits, door: Door) -> NotTogether:
    who = ', '.join(map(str, missing[:8])) + (' ...' if len(missing) > 8 else '')
    several = len(missing) > 1
    return NotTogether(
        f'process{"es" if several else ""} {who} of {own["count"]} {"have" if several else "has"} '
        f'not started within {limits.init_seconds:g} s, or cannot reach {own["host"]} at port '
        f'{_either(own["ports"])} (--init_seconds={limits.init_seconds:g}): look at their output, '
        f'and let the firewall open this port{_others_with_a_secret(door)}'
    )


def _others_with_a_secret(door: Door) -> str:
    hosts = sorted({host for host, why in door.turned_away if why == OTHER_SECRET})
    return f'; {", ".join(hosts[:3])} had another {VARIABLE}: set the same everywhere' * bool(hosts)


def _apart(hellos: Mapping[int, Message]) -> NotTogether:
    """No port is open for all processes."""
    reached = [f'process {i} at {_either(hello["ports"])}' for i, hello in hellos.items() if i]
    listed = ', '.join(reached[:8]) + (' ...' if len(reached) > 8 else '')
    return NotTogether(
        f'no port of process 0 is open for all processes: {listed}; set JAX_COORDINATOR_PORT to '
        'one that the firewalls of all hosts open'
    )


def _either(ports: Sequence[int]) -> str:
    return ' or '.join(map(str, ports))


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


def _connect(
    host: str, ports: Sequence[int], hello: Message, limits: Limits, secret: bytes
) -> tuple[Member, int]:
    """Connects to process 0 at one of its ports, and waits until all processes have connected."""
    deadline, why = time.monotonic() + limits.init_seconds, ''
    answer: Message | None = None
    for port in itertools.cycle(ports):
        try:
            connection = Connection(socket.create_connection((host, port), timeout=5))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            answer = _introduce(connection, host, port, ports, hello, secret, deadline)
            if answer is not None:
                break
            connection.close()
            why = 'another program is there, or it has ended'
        if time.monotonic() > deadline:
            raise NotTogether(
                f'process {hello["index"]} cannot reach process 0 at {host}:{_either(ports)} '
                f'within {limits.init_seconds:g} s ({why}): is it running, is '
                '--coordinator_address right, and does the firewall open the port?'
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)
    assert answer is not None
    if answer['kind'] != 'start':
        line, details = str(answer['line']), str(answer['details'])
        refusal = NotTogether(line) if answer['restartable'] else Disagreement(line, details)
        note_raised_everywhere(refusal)
        raise refusal
    one = Member(connection, int(hello['index']), int(hello['count']), limits, secret)
    return _start_member(one), int(answer['port'])


def _introduce(
    connection: Connection,
    host: str,
    port: int,
    ports: Sequence[int],
    hello: Message,
    secret: bytes,
    deadline: float,
) -> Message | None:
    """What process 0 says when all processes have connected, or None if it is not process 0.

    Raises a ConfigError if process 0 has another secret.
    """
    with contextlib.suppress(TimeoutError):
        if not connection.greet(secret, _SECONDS_FOR_THE_MESSAGE):
            return None
        open_ports = [p for p in ports if p == port or _is_open(host, p)]
        connection.send('hello', **hello, ports=open_ports)
        heard = connection.receive(_SECONDS_FOR_THE_MESSAGE)
        if connection.refused:
            raise ConfigError(
                f'process {hello["index"]} on {hello["host"]} has another secret than process 0 at '
                f'{host}:{port}: set {VARIABLE} to the same text for all processes of the run'
            )
        if heard is not None and heard['kind'] == 'heard':
            left = deadline + _SECONDS_FOR_THE_MESSAGE - time.monotonic()
            return connection.receive(max(0.1, left))
    return None


def _is_open(host: str, port: int) -> bool:
    """Whether process 0 can be reached at another of its ports, too."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False


def _start_member(one: Member) -> Member:
    one.start()
    _members[:] = [one]
    return one


# ---- processes that jax has connected already


def _open_over_jax(limits: Limits) -> None:
    """Opens the channel of processes that are connected by jax, at any free port of process 0.

    Process 0 makes the secret, and jax brings it to the others.
    """
    import numpy as np
    from jax.experimental import multihost_utils

    count, index = jax.process_count(), jax.process_index()
    hello = _hello(index, count)
    listener = listen(0) if index == 0 else None
    port = 0 if listener is None else listener.getsockname()[1]
    text = f'{secret_of_one_run()} {socket.gethostname()}:{port}'.encode()[:256]
    padded = np.zeros(256, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes()
    secret, _, address = told.rstrip(b'\0').decode().partition(' ')
    host, _, number = address.rpartition(':')
    if listener is not None:
        with contextlib.closing(Door([listener], secret.encode())) as door:
            _gather_all(door, hello | {'ports': [port]}, limits)
    else:
        _connect(host, [int(number)], hello, limits, secret.encode())
