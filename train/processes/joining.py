"""How a process joins the others of its run: their channel first, and then jax's own."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import socket
import threading
import time
from typing import Any

import jax

from train.errors import ConfigError, first_line
from train.processes import signals
from train.processes.agreement import NotTogether
from train.processes.channel import current_member, open_channel
from train.processes.environment import ProcessAddress, find_processes
from train.processes.metadata import read_metadata
from train.processes.output import error_fd
from train.processes.wire import Limits

# jax's own limits are longer than ours, because its end of a process is an abortion with a trace.
_TIMES_OURS = 4
_SECONDS_BETWEEN_TRIES = 0.05
# gRPC's variables: its proxies, and the hosts that it reaches without them.
_PROXIES, _WITHOUT_PROXY = ('grpc_proxy', 'https_proxy', 'http_proxy'), 'no_grpc_proxy'


def find_address(
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    auto_detect: bool = False,
) -> ProcessAddress | None:
    """Finds the place of this process in a run, in flags or else in the environment.

    Args:
      coordinator_address: host:port of process 0.
      process_count: the number of processes.
      process_index: the index of this process.
      auto_detect: whether the environment says the rest.

    Returns:
      The place, or None if there is only one process.

    Raises:
      ConfigError: if only some of the three are given, if the index is out of range, or if the
        environment says nothing of processes.
    """
    given = (coordinator_address, process_count, process_index)
    if coordinator_address and process_count is not None and process_index is not None:
        if process_index not in range(process_count):
            raise ConfigError(
                f'--process_index={process_index} must be from 0 to {process_count - 1}, because '
                f'--process_count={process_count}'
            )
        return ProcessAddress(coordinator_address, process_count, process_index, 'flags')
    if any(x is not None for x in given[1:]) or (coordinator_address and not auto_detect):
        raise ConfigError(
            '--coordinator_address, --process_count and --process_index must be given together'
        )
    if not auto_detect:
        return None
    found = find_processes({**read_metadata(), **os.environ}, coordinator_address)
    if found is None:
        raise ConfigError(
            '--multihost: no variable of the environment says anything about processes (of TPU '
            'pods, Slurm, Open MPI or Kubernetes): give --coordinator_address, --process_count and '
            '--process_index'
        )
    return found


def join_processes(address: ProcessAddress, limits: Limits | None = None) -> None:
    """Connects this process to the others of its run: through a channel, and then through jax.

    Args:
      address: the place of this process.
      limits: how long the processes wait for each other, by default `Limits()`.

    Raises:
      ConfigError: if the processes have different packages.
      NotTogether: if the processes cannot connect in time.
    """
    limits = limits or Limits()
    where = address.coordinator_address, address.process_count, address.process_index
    one = open_channel(*where, limits)
    # A library of C++ that aborts this process does not say what it was called for.
    if not faulthandler.is_enabled():
        faulthandler.enable(error_fd())
    # jax would stop the processes at different steps, or take SIGTERM for itself.
    jax.config.update('jax_enable_preemption_service', False)
    settings: dict[str, Any] = {
        'initialization_timeout': math.ceil(_TIMES_OURS * limits.init_seconds),
        'heartbeat_timeout_seconds': math.ceil(_TIMES_OURS * limits.heartbeat_seconds),
        'shutdown_timeout_seconds': math.ceil(_TIMES_OURS * limits.heartbeat_seconds),
        # Under Slurm and Open MPI, jax would take one GPU without being asked.
        'cluster_detection_method': 'deactivate',
    }
    if address.local_device_ids is not None:
        settings['local_device_ids'] = address.local_device_ids
    try:
        relayed = relay(where[0]) if address.process_index else where[0]
        jax.distributed.initialize(relayed, *where[1:], **settings)
    except (ValueError, RuntimeError) as error:
        raise NotTogether(
            f'jax cannot connect process {address.process_index} of {address.process_count} at '
            f'{address.coordinator_address} ({first_line(error)})'
        ) from error
    finally:  # Also after an error: at exit, jax waits long for processes that have ended.
        atexit.register(leave_processes)
    signals.share(one.forward, one.leave)


def leave_processes() -> None:
    """Waits until all processes of the run are done. Without others it does nothing."""
    if one := current_member():
        one.leave()


# ---- the relay


def relay(address: str) -> str:
    """Relays connections to jax's coordinator, and keeps them open when the coordinator has gone.

    jax's client aborts its process as soon as its connection to process 0 breaks. That is often
    before Python has read from the channel why. No setting of jax changes it: a callback of Python
    for lost connections aborts the process as well, because jaxlib 0.10 cannot convert its
    argument. Behind the relay, jax learns nothing, and the channel ends this process with one line
    and its exit code. Without any sign from the coordinator, jax still aborts after its own limit.

    Args:
      address: host:port of the coordinator.

    Returns:
      The address to connect to instead, on this host.
    """
    listener = socket.create_server(('127.0.0.1', 0))
    if any(os.environ.get(name) for name in _PROXIES):  # gRPC would ask it even for this host.
        direct = os.environ.get(_WITHOUT_PROXY) or os.environ.get('no_proxy')
        os.environ[_WITHOUT_PROXY] = f'{direct},127.0.0.1' if direct else '127.0.0.1'

    def listen() -> None:
        while True:
            ours = listener.accept()[0]
            threading.Thread(target=_relay_one, args=(ours, address), daemon=True).start()

    threading.Thread(target=listen, name='relay', daemon=True).start()
    return f'127.0.0.1:{listener.getsockname()[1]}'


def _relay_one(ours: socket.socket, address: str) -> None:
    """Relays a connection until jax closes it."""
    host, _, port = address.rpartition(':')
    theirs = None
    while theirs is None:  # jax gives up by itself if process 0 does not answer.
        try:
            theirs = socket.create_connection((host.strip('[]'), int(port)))
        except OSError:
            time.sleep(_SECONDS_BETWEEN_TRIES)
    for one in (ours, theirs):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_copy, args=(theirs, ours), daemon=True).start()
    _copy(ours, theirs)
    ours.close()
    theirs.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Sends to one connection what arrives at another one, until the other one is closed.

    If the target has gone, the data is dropped: jax must not notice.
    """
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            with contextlib.suppress(OSError):
                target.sendall(data)
