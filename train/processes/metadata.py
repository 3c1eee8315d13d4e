"""Reads from the metadata server what the environment of a Cloud TPU VM does not say."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.error
import urllib.request

from train.errors import ConfigError, first_line

SERVER = 'metadata.google.internal'
SECONDS, TRIES = 5.0, 3


def read_metadata(server: str | None = None, wait: float = 1.0) -> dict[str, str]:
    """Asks the server of metadata of Google Cloud for the place of this machine in a TPU slice.

    Each machine of Google Cloud has such a server. Other machines do not know its name, and learn
    this at once.

    Args:
      server: host or host:port of the server; by default GCE_METADATA_IP, or the usual name.
      wait: the seconds between two tries if the server does not answer.

    Returns:
      The variables that GKE would set in the environment, for `find_processes`: TPU_WORKER_ID,
      TPU_WORKER_HOSTNAMES, and for several slices those that begin with MEGASCALE_. Empty if this
      is not a Cloud TPU VM.

    Raises:
      ConfigError: if the server fails, or its answer is not understood.
    """
    server = server or os.environ.get('GCE_METADATA_IP') or SERVER
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
    for tries_left in reversed(range(TRIES)):
        try:
            with opener.open(request, timeout=SECONDS) as answer:
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
