"""How a process joins the others of its run: their channel first, and then jax's own."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import jax

from train.errors import ConfigError, first_line
from train.processes import signals
from train.processes.channel import current_member, interface_of, open_channel
from train.processes.disagreements import NotTogether
from train.processes.environment import ProcessAddress, check_index, find_processes
from train.processes.output import error_fd
from train.processes.wire import Limits

# jax's own limits are longer than ours, because its end of a process is an abortion with a trace.
_TIMES_OURS = 4
_SECONDS_BETWEEN_TRIES = 0.05
# The server of metadata of Google Cloud, and how often and how long it is asked.
_METADATA, _METADATA_SECONDS, _METADATA_TRIES = 'metadata.google.internal', 5.0, 3
# gRPC's variables: its proxies, and the hosts that it reaches without them.
_PROXIES, _WITHOUT_PROXY = ('grpc_proxy', 'https_proxy', 'http_proxy'), 'no_grpc_proxy'


def find_address(
    coordinator_address: str | None,
    process_count: int | None,
    process_index: int | None,
    auto_detect: bool = False,
) -> ProcessAddress | None:
    """Finds the place of this process in flags or the environment, or None if it is alone.

    Raises a ConfigError if only some of the three are given, if the index is out of range, or if
    the environment, which says the rest with `auto_detect`, says nothing of processes.
    """
    if coordinator_address and process_count is not None and process_index is not None:
        check_index(process_index, process_count, '--process_index', '--process_count')
        return ProcessAddress(coordinator_address, process_count, process_index, 'flags')
    incomplete = process_count is not None or process_index is not None
    if incomplete or (coordinator_address and not auto_detect):
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

    `limits` says how long the processes wait for each other, by default `Limits()`. Raises a
    ConfigError if the processes have different packages, and a NotTogether if the processes cannot
    connect in time.
    """
    limits = limits or Limits()
    count, index = address.process_count, address.process_index
    one, port = open_channel(address.coordinator_address, count, index, limits, address.other_ports)
    coordinator = f'{address.coordinator_address.rpartition(":")[0]}:{port}'
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
    interface = interface_of(address.coordinator_address.rpartition(':')[0].strip('[]'))
    if index == 0 and interface and 'JAX_COORDINATOR_BIND_ADDRESS' not in os.environ:
        bracketed = f'[{interface}]' if ':' in interface else interface
        settings['coordinator_bind_address'] = f'{bracketed}:{port}'
    if address.local_device_ids is not None:
        settings['local_device_ids'] = address.local_device_ids
    try:
        relayed = relay(coordinator) if index else coordinator
        jax.distributed.initialize(relayed, count, index, **settings)
    except (ValueError, RuntimeError) as error:
        raise NotTogether(
            f'jax cannot connect process {index} of {count} at {coordinator} ({first_line(error)})'
        ) from error
    finally:  # Also after an error: at exit, jax waits long for processes that have ended.
        atexit.register(leave_processes)
    signals.share(one.forward, one.leave)


def leave_processes() -> None:
    """Waits until all processes of the run are done. Without others it does nothing."""
    if one := current_member():
        one.leave()


# ---- Cloud TPU VMs, whose environment says nothing


def read_metadata(server: str | None = None, wait: float = 1.0) -> dict[str, str]:
    """Asks the server of metadata of Google Cloud for the place of this machine in a TPU slice.

    Each machine of Google Cloud has such a server. Other machines do not know its name, and learn
    this at once. Returns the variables that GKE would set in the environment, for `find_processes`:
    TPU_WORKER_ID, TPU_WORKER_HOSTNAMES, and for several slices those that begin with MEGASCALE_.
    Empty if this is not a Cloud TPU VM. Raises a ConfigError if the server fails, or its answer is
    not understood.
    """
    server = server or os.environ.get('GCE_METADATA_IP') or _METADATA
    worker = _ask(server, 'agent-worker-number', wait)
    if worker is None:
        return {}
    endpoints = _ask(server, 'worker-network-endpoints', wait) or ''
    # A host is written as its name, or as name:number:address.
    hosts = [entry.rpartition(':')[2].strip() for entry in endpoints.split(',')]
    if not worker.strip().isdecimal() or not all(hosts):
        raise ConfigError(
            f'the server of metadata gives {worker!r} as the index of this host of a TPU, and '
            f'{endpoints!r} as its hosts: give --coordinator_address, --process_count and '
            '--process_index'
        )
    # Lines such as MEGASCALE_NUM_SLICES: '2'
    slices = re.findall(
        r"^\s*(MEGASCALE_\w+)\s*:\s*'?([^'\n]*?)'?\s*$", _ask(server, 'tpu-env', wait) or '', re.M
    )
    return {
        'TPU_WORKER_ID': worker.strip(),
        'TPU_WORKER_HOSTNAMES': ','.join(hosts),
        **{name: value for name, value in slices if value},
    }


def _ask(server: str, attribute: str, wait: float) -> str | None:
    """An attribute of this machine, or None if the attribute or the server does not exist."""
    request = urllib.request.Request(
        f'http://{server}/computeMetadata/v1/instance/attributes/{attribute}',
        headers={'Metadata-Flavor': 'Google'},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows it
    for tries_left in reversed(range(_METADATA_TRIES)):
        try:
            with opener.open(request, timeout=_METADATA_SECONDS) as answer:
                if answer.headers.get('Metadata-Flavor') != 'Google':
                    return None  # Somebody else answers at this name.
                return str(answer.read().decode(errors='replace'))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            problem: Exception = error
        except OSError as error:
            if isinstance(getattr(error, 'reason', None), socket.gaierror):
                return None  # The name is known in Google Cloud only.
            problem = error
        if tries_left:
            time.sleep(wait)
    raise ConfigError(
        f'the server of metadata at {server} does not say which host of a TPU this is '
        f'({first_line(problem)}): give --coordinator_address, --process_count and --process_index'
    )


# ---- the relay


def relay(address: str) -> str:
    """Relays connections to jax's coordinator, and keeps them open when the coordinator has gone.

    jax's client aborts its process as soon as its connection to process 0 breaks. That is often
    before Python has read from the channel why. No setting of jax changes it: a callback of Python
    for lost connections aborts the process as well, because jaxlib 0.10 cannot convert its
    argument. Behind the relay, jax learns nothing, and the channel ends this process with one line
    and its exit code. Without any sign from the coordinator, jax still aborts after its own limit.
    Returns the address to connect to instead, on this host.
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
