"""What each kind of cluster says about the processes of a run, in variables of the environment."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from train.errors import ConfigError
from train.processes.slurm import expand_hosts, tasks_of_host

# The port of process 0 where the job has no number to derive one from. It is jax's port on TPUs.
DEFAULT_PORT = 8482
# Other ports are the highest ones, which Linux does not hand out to clients by itself.
FIRST_PORT, PORTS = 61440, 4096
ADDRESS, COUNT, INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
# XPK, which starts jobs on GKE, sets this one.
COUNT_OF_XPK = 'JAX_PROCESS_COUNT'

Environment = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Found:
    """What one system says about this process and the others.

    Attributes:
      source: the system.
      count: the number of processes.
      index: the index of this process.
      variables: the values that say so, for messages.
      host: the host of process 0, with the port of another server or none; None if the system does
        not say it.
      port: the port of process 0.
      local_device_ids: the GPUs of this process, or None for all that it sees.
    """

    source: str
    count: int
    index: int
    variables: str
    host: str | None
    port: int = DEFAULT_PORT
    local_device_ids: tuple[int, ...] | None = None


class NotStarted(ConfigError):
    """A system is there, but has not started this process. Another one may have."""


def read_open_mpi(environ: Environment) -> Found | None:
    """Reads what mpirun sets, which does not say where process 0 runs, but where mpirun does."""
    size, rank = 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK'
    count, index = read_number(environ, size, 1), read_number(environ, rank)
    if count is None and index is None:
        return None
    if count is None or index is None:
        raise ConfigError(
            f'{rank if count is None else size} is set, but {size if count is None else rank} is '
            'not: start the processes with mpirun'
        )
    _check_index(index, count, rank, size)
    local = read_number(environ, 'OMPI_COMM_WORLD_LOCAL_SIZE', 1) or 1
    host, job = _find_mpirun(environ)
    here = environ.get('PMIX_HOSTNAME') or host
    if local == count:
        host = '127.0.0.1'
    elif index == 0 and here != host and not environ.get(ADDRESS):
        raise ConfigError(
            f'process 0 runs on {here}, but mpirun was started on {host}: give '
            f'--coordinator_address={here}:{DEFAULT_PORT} on all processes'
        )
    local_index = read_number(environ, 'OMPI_COMM_WORLD_LOCAL_RANK') or 0
    devices = _share_devices(environ, local_index, local)
    variables = f'{size}={count} and {rank}={index}'
    return Found('Open MPI', count, index, variables, host, _port_of(job), devices)


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


def read_slurm(environ: Environment) -> Found | None:
    """Reads what srun sets, unless its tasks are mpirun's: then those of Open MPI are the run's."""
    if not environ.get('SLURM_JOB_ID') or environ.get('OMPI_COMM_WORLD_RANK'):
        return None
    name = 'SLURM_STEP_NUM_TASKS' if environ.get('SLURM_STEP_NUM_TASKS') else 'SLURM_NTASKS'
    count, index = read_number(environ, name, 1), read_number(environ, 'SLURM_PROCID')
    of_step = name != 'SLURM_NTASKS' or environ.get('SLURM_STEP_NODELIST')
    if count is None or index is None or (count > 1 and not of_step):
        raise NotStarted(
            'srun has not started this process of a Slurm job, because SLURM_STEP_NUM_TASKS, '
            'SLURM_STEP_NODELIST or SLURM_PROCID is not set: write srun in front of the command'
        )
    _check_index(index, count, 'SLURM_PROCID', name)
    hosts = environ.get('SLURM_STEP_NODELIST') or environ.get('SLURM_JOB_NODELIST')
    # Steps of one job can share a host, and so can jobs with successive numbers.
    job, step = read_number(environ, 'SLURM_JOB_ID'), read_number(environ, 'SLURM_STEP_ID')
    port = _port_of((job or 0) + 1009 * (step or 0))
    per_host = environ.get('SLURM_STEP_TASKS_PER_NODE') or environ.get('SLURM_TASKS_PER_NODE')
    devices = None
    if per_host and not environ.get('SLURM_GPUS_PER_TASK'):  # which would bind them to tasks
        local = tasks_of_host(per_host, read_number(environ, 'SLURM_NODEID') or 0)
        devices = _share_devices(environ, read_number(environ, 'SLURM_LOCALID') or 0, local)
    variables = f'{name}={count} and SLURM_PROCID={index}'
    host = next(expand_hosts(hosts)) if hosts else None
    return Found('Slurm', count, index, variables, host, port, devices)


def read_tpus(environ: Environment) -> Found | None:
    """Reads what GKE sets in pods with TPUs: the hosts of a slice, and its place among slices."""
    names = ('TPU_PROCESS_ADDRESSES', 'TPU_WORKER_HOSTNAMES')
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None  # On Cloud TPU VMs, jax asks the server of metadata.
    hosts = [host.strip() for host in environ[name].split(',')]
    worker = read_number(environ, 'TPU_WORKER_ID')
    if worker is None and len(hosts) > 1:
        raise ConfigError(f'{name} lists {len(hosts)} hosts, but TPU_WORKER_ID is not set')
    worker = worker or 0
    if worker >= len(hosts):
        raise ConfigError(
            f'TPU_WORKER_ID={worker} must be from 0 to {len(hosts) - 1}, because {name} lists '
            f'{len(hosts)} hosts'
        )
    variables = f'{name} has {len(hosts)} hosts, TPU_WORKER_ID={worker}'
    slices = read_number(environ, 'MEGASCALE_NUM_SLICES', 1) or 1
    index = read_number(environ, 'MEGASCALE_SLICE_ID')
    if slices == 1 and not index:
        return Found('a TPU pod', len(hosts), worker, variables, hosts[0])
    coordinator = environ.get('MEGASCALE_COORDINATOR_ADDRESS')
    if index is None or not coordinator:
        missing = 'MEGASCALE_SLICE_ID' if index is None else 'MEGASCALE_COORDINATOR_ADDRESS'
        raise ConfigError(f'this is one of {slices} TPU slices, but {missing} is not set')
    _check_index(index, slices, 'MEGASCALE_SLICE_ID', 'MEGASCALE_NUM_SLICES')
    variables += f', MEGASCALE_NUM_SLICES={slices} and MEGASCALE_SLICE_ID={index}'
    count, place = slices * len(hosts), index * len(hosts) + worker
    return Found(f'{slices} TPU slices', count, place, variables, coordinator)


def read_kubernetes(environ: Environment) -> Found | None:
    """Reads an indexed job or a JobSet. Only the index is Kubernetes' own; manifests set the rest.

    JOB_INDEX and PROCESSES_IN_JOB are the names of XPK; JOBSET_NAME and REPLICATED_JOB_NAME those
    of Google's recipes. The variables of TPUs say more, and come first.
    """
    pod = read_number(environ, 'JOB_COMPLETION_INDEX')
    if pod is None or environ.get(INDEX):
        return None
    name = COUNT if environ.get(COUNT) else COUNT_OF_XPK
    count = read_number(environ, name, 1)
    if count is None:
        raise NotStarted(
            f'JOB_COMPLETION_INDEX={pod} is set, but {COUNT} is not: set it and {ADDRESS} in the '
            'manifest, as in configs/launch/indexed_job.yaml'
        )
    job, pods = read_number(environ, 'JOB_INDEX') or 0, read_number(environ, 'PROCESSES_IN_JOB', 1)
    if job and pods is None:
        raise ConfigError(
            f'JOB_INDEX={job} is set, but PROCESSES_IN_JOB is not: set it to the pods per job'
        )
    index = job * (pods or 0) + pod
    _check_index(index, count, 'the index of the pod', name)
    variables = f'{name}={count} and JOB_COMPLETION_INDEX={pod}'
    jobset, replicated = environ.get('JOBSET_NAME'), environ.get('REPLICATED_JOB_NAME')
    if not jobset or not replicated:
        return Found('a Kubernetes indexed job', count, index, variables, None)
    # The name that JobSet gives to a pod: <jobset>-<replicated job>-<job>-<pod>.<subdomain>.
    return Found('JobSet', count, index, variables, f'{jobset}-{replicated}-0-0.{jobset}')


def read_jax(environ: Environment) -> Found | None:
    """Reads the names of JAX, which Kubeflow and many scripts set. jax reads only the address."""
    name = COUNT if environ.get(COUNT) else COUNT_OF_XPK
    count, index = read_number(environ, name, 1), read_number(environ, INDEX)
    if count is None and index is not None:
        raise ConfigError(f'{INDEX}={index} is set, but {COUNT} is not: set both')
    if count is None and environ.get(ADDRESS):
        raise NotStarted(
            f'the address of process 0 is given, but {COUNT} and {INDEX} are not set: set both'
        )
    if count is None or (index is None and environ.get('JOB_COMPLETION_INDEX')):
        return None  # The latter is read with the variables of Kubernetes.
    if index is None:
        raise ConfigError(f'{name}={count} is set, but {INDEX} is not: set both')
    _check_index(index, count, INDEX, name)
    variables = f'{name}={count} and {INDEX}={index}'
    return Found('the variables of JAX', count, index, variables, None)


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


def read_number(environ: Environment, name: str, minimum: int = 0) -> int | None:
    """A variable that is an integer; None if it is not set, or empty."""
    text = environ.get(name, '').strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < minimum:
        raise ConfigError(f'{name}={text!r} must be an integer >= {minimum}')
    return int(text)


def _check_index(index: int, count: int, name: str, name_of_count: str) -> None:
    if index >= count:
        raise ConfigError(
            f'{name}={index} must be from 0 to {count - 1}, because {name_of_count}={count}'
        )


def _port_of(number: int) -> int:
    return FIRST_PORT + number % PORTS
