"""What the environment says about the processes of a run, on clusters of every kind.

Only variables are read: no package of a cluster, no server, and no name is looked up. If
variables are missing, the message names them.

jax's own detection is not used. It connects in the same call, while the channel of `channel.py` is
opened before jax connects. For the environments of `test_cluster_environment.py`, its answer is the
same for ordinary Slurm steps and for TPU pods. It does not know Open MPI 5, the variables of JAX
other than the address, indexed jobs without an API server, and steps of Slurm with fewer tasks than
their job; it gives one GPU to each process of a host; and it accepts nearly all variables that
contradict each other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from train.errors import ConfigError

# The port of process 0 where the job has no number to derive one from. It is jax's port on TPUs.
_DEFAULT_PORT = 8482
# jax's port on TPUs before 0.8.1. Google Cloud opens it between the hosts of v6e, and not the other
# one (jax#35905); libtpu may use it itself, so it comes second.
_EARLIER_PORT = 8476
# Other ports are the highest ones, which Linux does not hand out to clients by itself.
_FIRST_PORT, _PORTS = 61440, 4096
_ADDRESS, _COUNT, _INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
# XPK, which starts jobs on GKE, sets this one.
_COUNT_OF_XPK = 'JAX_PROCESS_COUNT'

Environment = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ProcessAddress:
    """The place of this process among the processes of a run.

    Attributes:
      coordinator_address: host:port of process 0.
      source: what says so, such as 'Slurm' or 'a TPU pod'.
      other_ports: other ports of process 0, in case a firewall closes the one of the address.
      local_device_ids: the GPUs that this process uses, if it shares its host's GPUs with other
        processes; None if it uses all that it sees. `jax.distributed.initialize` needs
        cluster_detection_method='deactivate' in addition, or it takes one GPU under Slurm.
    """

    coordinator_address: str
    process_count: int
    process_index: int
    source: str
    local_device_ids: tuple[int, ...] | None = None
    other_ports: tuple[int, ...] = ()


def find_processes(
    environ: Environment, coordinator_address: str | None = None
) -> ProcessAddress | None:
    """Finds a process and its run in the variables of the environment, or None if they say nothing.

    It knows Slurm, Open MPI, Cloud TPUs in GKE with one slice or several, JobSets and indexed jobs
    of Kubernetes, and the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    Open MPI inside a Slurm job is read, and Slurm is not: it describes the programs of Open MPI. On
    Cloud TPU VMs the variables say nothing, but a server of metadata does:
    `find_processes({**read_metadata(), **os.environ})`. The user's `coordinator_address` wins over
    all variables. Raises a ConfigError if variables are missing, malformed or contradict each
    other.
    """
    named = {_ADDRESS: coordinator_address} if coordinator_address else {}
    systems: list[_Found] = []
    problems = []
    for read in (_read_open_mpi, _read_slurm, _read_tpus, _read_kubernetes, _read_jax):
        try:
            found = read({**environ, **named})
        except _NotStarted as problem:
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
    if given := coordinator_address or environ.get(_ADDRESS):
        name = '--coordinator_address' if coordinator_address else _ADDRESS
        address, others = _check_address(given, name, _read_port(environ)), tuple[int, ...]()
    else:
        address, others = _derive_address(systems, _read_port(environ))
    devices = next((s.local_device_ids for s in systems if s.local_device_ids), None)
    return ProcessAddress(address, first.count, first.index, first.source, devices, others)


def _derive_address(systems: list[_Found], port: int | None) -> tuple[str, tuple[int, ...]]:
    """The address of process 0 by the first system that says where it runs, and its other ports."""
    system = next((system for system in systems if system.host is not None), None)
    if system is None:
        raise ConfigError(
            f'{systems[0].source} does not say where process 0 runs: give --coordinator_address='
            f'HOST:PORT on all processes, or set {_ADDRESS}'
        )
    # A single process may have a name that no other knows, such as 'local'.
    host = '127.0.0.1' if system.count == 1 else str(system.host)
    return _join(host, port or system.port), () if port else system.other_ports


def _describe(found: _Found) -> str:
    return f'{found.source} ({found.variables}) makes this process {found.index} of {found.count}'


def _read_port(environ: Environment) -> int | None:
    port = _read_number(environ, 'JAX_COORDINATOR_PORT', 1)
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
        raise ConfigError(f'{name}={address} must be HOST:PORT, such as host0:{_DEFAULT_PORT}')
    return f'{found[1]}:{found[2] or port or _DEFAULT_PORT}'


# ---- what each system says


@dataclasses.dataclass(frozen=True)
class _Found:
    """What one system says about this process and the others.

    Attributes:
      variables: the values that say so, for messages.
      host: the host of process 0, with the port of another server or none; None if the system does
        not say it.
      port, other_ports: the ports of process 0; the others are for firewalls that close the first.
      local_device_ids: the GPUs of this process, or None for all that it sees.
    """

    source: str
    count: int
    index: int
    variables: str
    host: str | None
    port: int = _DEFAULT_PORT
    local_device_ids: tuple[int, ...] | None = None
    other_ports: tuple[int, ...] = ()


class _NotStarted(ConfigError):
    """A system is there, but has not started this process. Another one may have."""


def _read_open_mpi(environ: Environment) -> _Found | None:
    """Reads what mpirun sets, which does not say where process 0 runs, but where mpirun does."""
    size, rank = 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK'
    count, index = _read_number(environ, size, 1), _read_number(environ, rank)
    if count is None and index is None:
        return None
    if count is None or index is None:
        raise ConfigError(
            f'{rank if count is None else size} is set, but {size if count is None else rank} is '
            'not: start the processes with mpirun'
        )
    check_index(index, count, rank, size)
    local = _read_number(environ, 'OMPI_COMM_WORLD_LOCAL_SIZE', 1) or 1
    host, job = _find_mpirun(environ)
    here = environ.get('PMIX_HOSTNAME') or host
    if local == count:
        host = '127.0.0.1'
    elif index == 0 and here != host and not environ.get(_ADDRESS):
        raise ConfigError(
            f'process 0 runs on {here}, but mpirun was started on {host}: give '
            f'--coordinator_address={here}:{_DEFAULT_PORT} on all processes'
        )
    local_index = _read_number(environ, 'OMPI_COMM_WORLD_LOCAL_RANK') or 0
    devices = _share_devices(environ, local_index, local)
    variables = f'{size}={count} and {rank}={index}'
    return _Found('Open MPI', count, index, variables, host, _port_of(job), devices)


def _find_mpirun(environ: Environment) -> tuple[str | None, int]:
    """The host on which mpirun was started, where process 0 usually runs, and the job's number."""
    # Version 4: '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911'. Numbers are multiples of 2^16.
    uri = environ.get('OMPI_MCA_orte_hnp_uri', '')
    if found := re.match(r'(\d+)\.\d+;tcp6?://(?:\[([^],]+)|([^,:;]+))', uri):
        return found[2] or found[3], int(found[1]) >> 16
    # Version 5: 'prterun-node01-27183@1', with the number of the process of mpirun.
    name = environ.get('PMIX_NAMESPACE', '')
    if found := re.fullmatch(r'(?:prterun|prte)-(.+)-(\d+)@(\d+)', name):
        return found[1], int(found[2]) + int(found[3])
    return None, 0


def _read_slurm(environ: Environment) -> _Found | None:
    """Reads what srun sets, unless mpirun has started the processes: then Open MPI knows them."""
    if not environ.get('SLURM_JOB_ID') or environ.get('OMPI_COMM_WORLD_RANK'):
        return None
    name = 'SLURM_STEP_NUM_TASKS' if environ.get('SLURM_STEP_NUM_TASKS') else 'SLURM_NTASKS'
    count, index = _read_number(environ, name, 1), _read_number(environ, 'SLURM_PROCID')
    of_step = name != 'SLURM_NTASKS' or environ.get('SLURM_STEP_NODELIST')
    if count is None or index is None or (count > 1 and not of_step):
        raise _NotStarted(
            'srun has not started this process of a Slurm job, because SLURM_STEP_NUM_TASKS, '
            'SLURM_STEP_NODELIST or SLURM_PROCID is not set: write srun in front of the command'
        )
    check_index(index, count, 'SLURM_PROCID', name)
    hosts = environ.get('SLURM_STEP_NODELIST') or environ.get('SLURM_JOB_NODELIST')
    # Steps of one job can share a host, and so can jobs with successive numbers.
    job, step = _read_number(environ, 'SLURM_JOB_ID'), _read_number(environ, 'SLURM_STEP_ID')
    port = _port_of((job or 0) + 1009 * (step or 0))
    per_host = environ.get('SLURM_STEP_TASKS_PER_NODE') or environ.get('SLURM_TASKS_PER_NODE')
    devices = None
    if per_host and not environ.get('SLURM_GPUS_PER_TASK'):  # which would bind them to tasks
        local = _tasks_of_host(per_host, _read_number(environ, 'SLURM_NODEID') or 0)
        devices = _share_devices(environ, _read_number(environ, 'SLURM_LOCALID') or 0, local)
    variables = f'{name}={count} and SLURM_PROCID={index}'
    host = _first_host(hosts) if hosts else None
    return _Found('Slurm', count, index, variables, host, port, devices)


def _read_tpus(environ: Environment) -> _Found | None:
    """Reads what GKE sets in pods with TPUs: the hosts of a slice, and its place among slices."""
    names = ('TPU_PROCESS_ADDRESSES', 'TPU_WORKER_HOSTNAMES')
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None  # On Cloud TPU VMs, jax asks the server of metadata.
    hosts = [host.strip() for host in environ[name].split(',')]
    worker = _read_number(environ, 'TPU_WORKER_ID')
    if worker is None and len(hosts) > 1:
        raise ConfigError(f'{name} lists {len(hosts)} hosts, but TPU_WORKER_ID is not set')
    worker = worker or 0
    if worker >= len(hosts):
        raise ConfigError(
            f'TPU_WORKER_ID={worker} must be from 0 to {len(hosts) - 1}, because {name} lists '
            f'{len(hosts)} hosts'
        )
    variables = f'{name} has {len(hosts)} hosts, TPU_WORKER_ID={worker}'
    others = (_EARLIER_PORT,)
    slices = _read_number(environ, 'MEGASCALE_NUM_SLICES', 1) or 1
    index = _read_number(environ, 'MEGASCALE_SLICE_ID')
    if slices == 1 and not index:
        return _Found('a TPU pod', len(hosts), worker, variables, hosts[0], other_ports=others)
    coordinator = environ.get('MEGASCALE_COORDINATOR_ADDRESS')
    if index is None or not coordinator:
        missing = 'MEGASCALE_SLICE_ID' if index is None else 'MEGASCALE_COORDINATOR_ADDRESS'
        raise ConfigError(f'this is one of {slices} TPU slices, but {missing} is not set')
    check_index(index, slices, 'MEGASCALE_SLICE_ID', 'MEGASCALE_NUM_SLICES')
    variables += f', MEGASCALE_NUM_SLICES={slices} and MEGASCALE_SLICE_ID={index}'
    count, place = slices * len(hosts), index * len(hosts) + worker
    return _Found(f'{slices} TPU slices', count, place, variables, coordinator, other_ports=others)


def _read_kubernetes(environ: Environment) -> _Found | None:
    """Reads an indexed job or a JobSet. Only the index is Kubernetes' own; manifests set the rest.

    JOB_INDEX and PROCESSES_IN_JOB are the names of XPK; Google's recipes have JOBSET_NAME
    and REPLICATED_JOB_NAME. The variables of TPUs say more, and come first.
    """
    pod = _read_number(environ, 'JOB_COMPLETION_INDEX')
    if pod is None or environ.get(_INDEX):
        return None
    name = _COUNT if environ.get(_COUNT) else _COUNT_OF_XPK
    count = _read_number(environ, name, 1)
    if count is None:
        raise _NotStarted(
            f'JOB_COMPLETION_INDEX={pod} is set, but {_COUNT} is not: set it and {_ADDRESS} in the '
            'manifest, as in configs/launch/indexed_job.yaml'
        )
    job, pods = (
        _read_number(environ, 'JOB_INDEX') or 0,
        _read_number(environ, 'PROCESSES_IN_JOB', 1),
    )
    if job and pods is None:
        raise ConfigError(
            f'JOB_INDEX={job} is set, but PROCESSES_IN_JOB is not: set it to the pods per job'
        )
    index = job * (pods or 0) + pod
    check_index(index, count, 'the index of the pod', name)
    variables = f'{name}={count} and JOB_COMPLETION_INDEX={pod}'
    jobset, replicated = environ.get('JOBSET_NAME'), environ.get('REPLICATED_JOB_NAME')
    if not jobset or not replicated:
        return _Found('a Kubernetes indexed job', count, index, variables, None)
    # The name that JobSet gives to a pod: <jobset>-<replicated job>-<job>-<pod>.<subdomain>.
    return _Found('JobSet', count, index, variables, f'{jobset}-{replicated}-0-0.{jobset}')


def _read_jax(environ: Environment) -> _Found | None:
    """Reads the names of JAX, which Kubeflow and many scripts set. jax reads only the address."""
    name = _COUNT if environ.get(_COUNT) else _COUNT_OF_XPK
    count, index = _read_number(environ, name, 1), _read_number(environ, _INDEX)
    if count is None and index is not None:
        raise ConfigError(f'{_INDEX}={index} is set, but {_COUNT} is not: set both')
    if count is None and environ.get(_ADDRESS):
        raise _NotStarted(
            f'the address of process 0 is given, but {_COUNT} and {_INDEX} are not set: set both'
        )
    if count is None or (index is None and environ.get('JOB_COMPLETION_INDEX')):
        return None  # The latter is read with the variables of Kubernetes.
    if index is None:
        raise ConfigError(f'{name}={count} is set, but {_INDEX} is not: set both')
    check_index(index, count, _INDEX, name)
    variables = f'{name}={count} and {_INDEX}={index}'
    return _Found('the variables of JAX', count, index, variables, None)


def _share_devices(environ: Environment, index: int, count: int) -> tuple[int, ...] | None:
    """The GPUs of process `index` of the `count` processes of a host; None for all it sees.

    jax would give each process of Slurm and Open MPI a single GPU, however few there are per host.
    """
    names = ('CUDA_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES')
    name = next((name for name in names if environ.get(name)), None)
    if count == 1:
        return None
    if name is None:
        return (index,)  # One GPU per process, as in jax.
    visible = len(environ[name].split(','))
    if visible == 1:
        return None  # The system has chosen the GPU of this process.
    if visible % count:
        raise ConfigError(
            f'{count} processes of a host cannot share the {visible} GPUs of {name} evenly: start '
            f'a number of them that divides {visible}'
        )
    each = visible // count
    return tuple(range(index * each, (index + 1) * each))


def _read_number(environ: Environment, name: str, minimum: int = 0) -> int | None:
    """A variable that is an integer; None if it is not set, or empty."""
    text = environ.get(name, '').strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < minimum:
        raise ConfigError(f'{name}={text!r} must be an integer >= {minimum}')
    return int(text)


def check_index(index: int, count: int, name: str, name_of_count: str) -> None:
    """Checks that the index of a process is smaller than the number of processes."""
    if index not in range(count):
        raise ConfigError(
            f'{name}={index} must be from 0 to {count - 1}, because {name_of_count}={count}'
        )


def _port_of(number: int) -> int:
    return _FIRST_PORT + number % _PORTS


# ---- Slurm's short forms

_HOSTS = r'(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+'
_TASKS = r'\d+(?:\(x\d+\))?'


def _first_host(hosts: str) -> str:
    """The first host of a list of Slurm such as 'gpu[08-10,12],login1'."""
    if not re.fullmatch(f'{_HOSTS}(?:,{_HOSTS})*', hosts):
        raise ConfigError(f"{hosts!r} is not a list of hosts: write it as 'gpu[08-10,12],login1'")
    first = re.match(_HOSTS, hosts)
    assert first is not None
    return re.sub(r'\[(\d+)[^]]*\]', r'\1', first[0])


def _tasks_of_host(tasks: str, host: int) -> int:
    """The number of tasks of a host, given a list for all hosts: '4(x2),1' is 4, 4 and 1."""
    if not re.fullmatch(f'{_TASKS}(?:,{_TASKS})*', tasks):
        raise ConfigError(f"{tasks!r} is not a list of tasks per host, such as '4(x2),1'")
    left = host
    for count, times in re.findall(r'(\d+)(?:\(x(\d+)\))?', tasks):
        left -= int(times or 1)
        if left < 0:
            return int(count)
    raise ConfigError(f'{tasks!r} lists the tasks of {host - left} hosts, and not of host {host}')
