"""What the environment says about the processes of a run, on clusters of every kind.

Variables are read, and nothing else: no package of a cluster, no server, no name is looked up.
Where variables do not say enough, the message names those that are missing.
"""

from __future__ import annotations

import dataclasses
import re

from train.errors import ConfigError
from train.processes.clusters import (
    ADDRESS,
    DEFAULT_PORT,
    Environment,
    Found,
    NotStarted,
    read_jax,
    read_kubernetes,
    read_number,
    read_open_mpi,
    read_slurm,
    read_tpus,
)


@dataclasses.dataclass(frozen=True)
class ProcessAddress:
    """The place of this process among the processes of a run.

    Attributes:
      coordinator_address: host:port of process 0.
      process_count: the number of processes.
      process_index: the index of this process.
      source: what says so, such as 'Slurm' or 'a TPU pod'.
      local_device_ids: the GPUs that this process uses, if it shares those of its host with other
        processes; None if it uses all that it sees. `jax.distributed.initialize` needs
        cluster_detection_method='deactivate' in addition, or it takes one GPU under Slurm.
    """

    coordinator_address: str
    process_count: int
    process_index: int
    source: str
    local_device_ids: tuple[int, ...] | None = None


def find_processes(
    environ: Environment, coordinator_address: str | None = None
) -> ProcessAddress | None:
    """Finds the processes of a run in the variables of the environment.

    It knows Slurm, Open MPI, Cloud TPUs in GKE with one slice or several, JobSets and indexed jobs
    of Kubernetes, and the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    Open MPI inside a Slurm job is read, and Slurm is not: it describes the programs of Open MPI.

    On Cloud TPU VMs the variables say nothing, but a server of metadata does:
    `find_processes({**read_metadata(), **os.environ})`.

    Args:
      environ: the variables, such as os.environ.
      coordinator_address: host:port of process 0, if the user has given it; it wins over all
        variables.

    Returns:
      The place of this process, or None if no variable says anything about processes.

    Raises:
      ConfigError: if variables are missing, malformed or contradict each other.
    """
    named = {ADDRESS: coordinator_address} if coordinator_address else {}
    systems: list[Found] = []
    problems = []
    for read in (read_open_mpi, read_slurm, read_tpus, read_kubernetes, read_jax):
        try:
            found = read({**environ, **named})
        except NotStarted as problem:
            problems.append(str(problem))
        else:
            systems += [found] if found else []
    if not systems and problems:
        raise ConfigError(problems[0])
    if not systems:
        return None
    first = systems[0]
    for other in systems[1:]:
        if (other.count, other.index) != (first.count, first.index):
            raise ConfigError(
                f'{_describe(first)}, but {_describe(other)}: unset the variables that do not '
                'belong to this run, or give --coordinator_address, --process_count and '
                '--process_index'
            )
    if given := coordinator_address or environ.get(ADDRESS):
        name = '--coordinator_address' if coordinator_address else ADDRESS
        address = _check_address(given, name, _read_port(environ))
    else:
        address = _derive_address(systems, _read_port(environ))
    devices = next((s.local_device_ids for s in systems if s.local_device_ids), None)
    return ProcessAddress(address, first.count, first.index, first.source, devices)


def _derive_address(systems: list[Found], port: int | None) -> str:
    """The address of process 0 by the first system that says where it runs."""
    system = next((system for system in systems if system.host is not None), None)
    if system is None:
        raise ConfigError(
            f'{systems[0].source} does not say where process 0 runs: give --coordinator_address='
            f'HOST:PORT on all processes, or set {ADDRESS}'
        )
    # A single process may have a name that no other knows, such as 'local'.
    host = '127.0.0.1' if system.count == 1 else str(system.host)
    return _join(host, port or system.port)


def _describe(found: Found) -> str:
    return f'{found.source} ({found.variables}) makes this process {found.index} of {found.count}'


def _read_port(environ: Environment) -> int | None:
    port = read_number(environ, 'JAX_COORDINATOR_PORT', 1)
    if port is not None and port > 65535:
        raise ConfigError(f'JAX_COORDINATOR_PORT={port} must be from 1 to 65535')
    return port


def _join(host: str, port: int) -> str:
    """host:port, without the port that a host of another server may have."""
    if host.startswith('['):
        return f'{host.partition("]")[0]}]:{port}'
    return f'[{host}]:{port}' if host.count(':') > 1 else f'{host.partition(":")[0]}:{port}'


def _check_address(address: str, name: str, port: int | None) -> str:
    """An address that somebody has given, with a port."""
    found = re.fullmatch(r'(\[[^]\s]+\]|[^:\s]+)(?::(\d+))?', address)
    if not found or int(found[2] or 1) not in range(1, 65536):
        raise ConfigError(f'{name}={address} must be HOST:PORT, such as host0:{DEFAULT_PORT}')
    return f'{found[1]}:{found[2] or port or DEFAULT_PORT}'
