"""The processes of a run, read from environments as clusters make them."""

import http.server
import itertools
import socket
import threading

import pytest

from train.errors import ConfigError
from train.processes.environment import ProcessAddress, find_processes
from train.processes.joining import read_metadata

pytestmark = pytest.mark.core

# What srun sets, by its manual (OUTPUT ENVIRONMENT VARIABLES) and as version 22.05 does: task 5 of
# 8, on two hosts. The port is jax's for this job: one of the highest 4096, by its number.
SLURM = {
    'SLURM_JOB_ID': '4242',
    'SLURM_JOB_NODELIST': 'gpu[07,09-11]',
    'SLURM_STEP_ID': '0',
    'SLURM_STEP_NODELIST': 'gpu[09-10]',
    'SLURM_STEP_NUM_TASKS': '8',
    'SLURM_STEP_TASKS_PER_NODE': '4(x2)',
    'SLURM_NTASKS': '8',
    'SLURM_PROCID': '5',
    'SLURM_NODEID': '1',
    'SLURM_LOCALID': '1',
}
SLURM_PORT = 65535 - 4096 + 1 + 4242 % 4096

# What a script of sbatch gets without srun, in version 22.05: numbers of the job, but of no step.
SBATCH = {
    'SLURM_JOB_ID': '4242',
    'SLURM_JOB_NODELIST': 'gpu[09-10]',
    'SLURM_NTASKS': '2',
    'SLURM_PROCID': '0',
    'SLURM_NODEID': '0',
    'SLURM_LOCALID': '0',
}

# Of `mpirun -n 4` of version 5.0.11, printed by `env` in rank 3; the hosts have other names.
OPEN_MPI_5 = {
    'OMPI_COMM_WORLD_SIZE': '4',
    'OMPI_COMM_WORLD_RANK': '3',
    'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
    'OMPI_COMM_WORLD_LOCAL_RANK': '1',
    'OMPI_VERSION': '5.0.11',
    'PMIX_HOSTNAME': 'gpu-node-02',
    'PMIX_NAMESPACE': 'prterun-gpu-node-01-27183@1',
    'PMIX_RANK': '3',
    'PMIX_SERVER_URI4': 'prterun-gpu-node-01-27183@0.1;tcp4://127.0.0.1:44091',
}
OPEN_MPI_5_PORT = 61440 + (27183 + 1) % 4096

# Version 4. The two forms of the address are examples in jax's own detection of Open MPI.
OPEN_MPI_4 = {
    'OMPI_COMM_WORLD_SIZE': '4',
    'OMPI_COMM_WORLD_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_SIZE': '1',
    'OMPI_COMM_WORLD_LOCAL_RANK': '0',
    'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911',
}
OPEN_MPI_4_PORT = 61440 + 23370 % 4096  # 1531576320 is 23370 * 2**16
IPV6 = '1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370'
IPV6_PORT = 61440 + 20058 % 4096  # 1314521088 is 20058 * 2**16

# What GKE sets in pods that ask for TPUs ("About TPUs in GKE"), here host 2 of 4 in slice 1 of 2.
# JobSet sets the variables of slices, with the address of a pod by JobSet's names and no port.
TPU = {
    'TPU_WORKER_HOSTNAMES': ','.join(f'train-slice-1-{n}.train' for n in range(4)),
    'TPU_WORKER_ID': '2',
    'TPU_TOPOLOGY': '4x4',
    'JOB_COMPLETION_INDEX': '2',
    'KUBERNETES_SERVICE_HOST': '34.118.224.1',
}
SLICES = {
    'MEGASCALE_NUM_SLICES': '2',
    'MEGASCALE_SLICE_ID': '1',
    'MEGASCALE_COORDINATOR_ADDRESS': 'train-slice-0-0.train',
}

# An indexed job: Kubernetes sets the first one, and the manifest the others.
INDEXED_JOB = {
    'JOB_COMPLETION_INDEX': '3',
    'JAX_NUM_PROCESSES': '4',
    'JAX_COORDINATOR_ADDRESS': 'train-0.train:8482',
}
# A JobSet on GPUs. Its manifest passes its names; the API of JobSet (Network.enableDNSHostnames)
# says that a pod is <jobset>-<replicated job>-<job>-<pod>.<subdomain>.
JOBSET = {
    'JOB_COMPLETION_INDEX': '1',
    'JAX_NUM_PROCESSES': '4',
    'JOBSET_NAME': 'llm',
    'REPLICATED_JOB_NAME': 'workers',
}
JAX = {
    'JAX_COORDINATOR_ADDRESS': '10.0.0.1:1234',
    'JAX_NUM_PROCESSES': '4',
    'JAX_PROCESS_ID': '1',
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ('environ', 'expected'),
    [
        (SLURM, f'5 of 8 at gpu09:{SLURM_PORT}, by Slurm'),
        # Two steps of a job at the same time have different ports.
        (SLURM | {'SLURM_STEP_ID': '1'}, f'5 of 8 at gpu09:{SLURM_PORT + 1009}, by Slurm'),
        # srun -n 3 in a job of 8 tasks
        (
            SLURM | {'SLURM_STEP_NUM_TASKS': '3', 'SLURM_PROCID': '2'},
            f'2 of 3 at gpu09:{SLURM_PORT}, by Slurm',
        ),
        (without(SLURM, 'SLURM_STEP_NODELIST'), f'5 of 8 at gpu07:{SLURM_PORT}, by Slurm'),
        (without(SLURM, 'SLURM_STEP_NUM_TASKS'), f'5 of 8 at gpu09:{SLURM_PORT}, by Slurm'),
        (SBATCH | {'SLURM_NTASKS': '1'}, f'0 of 1 at 127.0.0.1:{SLURM_PORT}, by Slurm'),
        (SLURM | {'JAX_COORDINATOR_PORT': '7000'}, '5 of 8 at gpu09:7000, by Slurm'),
        (OPEN_MPI_5, f'3 of 4 at gpu-node-01:{OPEN_MPI_5_PORT}, by Open MPI'),
        (
            OPEN_MPI_5 | {'OMPI_COMM_WORLD_LOCAL_SIZE': '4'},
            f'3 of 4 at 127.0.0.1:{OPEN_MPI_5_PORT}, by Open MPI',
        ),
        (OPEN_MPI_4, f'1 of 4 at 10.96.0.1:{OPEN_MPI_4_PORT}, by Open MPI'),
        (
            OPEN_MPI_4 | {'OMPI_MCA_orte_hnp_uri': IPV6},
            f'1 of 4 at [fe80::b9b:ac5d:9cf0:b858]:{IPV6_PORT}, by Open MPI',
        ),
        # mpirun in a job of Slurm: the tasks of Slurm are mpirun's own.
        (OPEN_MPI_5 | SBATCH, f'3 of 4 at gpu-node-01:{OPEN_MPI_5_PORT}, by Open MPI'),
        (OPEN_MPI_4 | SLURM, f'1 of 4 at 10.96.0.1:{OPEN_MPI_4_PORT}, by Open MPI'),
        (TPU, '2 of 4 at train-slice-1-0.train:8482, by a TPU pod'),
        (TPU | SLICES, '6 of 8 at train-slice-0-0.train:8482, by 2 TPU slices'),
        (
            TPU | SLICES | {'MEGASCALE_COORDINATOR_ADDRESS': 'train-slice-0-0.train:8080'},
            '6 of 8 at train-slice-0-0.train:8482, by 2 TPU slices',
        ),
        # Several processes per host
        (
            TPU | {'TPU_PROCESS_ADDRESSES': '10.0.0.1:8476,10.0.0.1:8477,10.0.0.2:8476'},
            '2 of 3 at 10.0.0.1:8482, by a TPU pod',
        ),
        # Notebooks with one TPU host
        (
            {'TPU_PROCESS_ADDRESSES': 'local', 'TPU_WORKER_ID': '0'},
            '0 of 1 at 127.0.0.1:8482, by a TPU pod',
        ),
        (INDEXED_JOB, '3 of 4 at train-0.train:8482, by a Kubernetes indexed job'),
        (JOBSET, '1 of 4 at llm-workers-0-0.llm:8482, by JobSet'),
        # XPK: two jobs with two pods each
        (
            without(JOBSET, 'JAX_NUM_PROCESSES')
            | {'JAX_PROCESS_COUNT': '4', 'JOB_INDEX': '1', 'PROCESSES_IN_JOB': '2'},
            '3 of 4 at llm-workers-0-0.llm:8482, by JobSet',
        ),
        (JAX, '1 of 4 at 10.0.0.1:1234, by the variables of JAX'),
        (
            JAX | {'JAX_COORDINATOR_ADDRESS': '[::1]'},
            '1 of 4 at [::1]:8482, by the variables of JAX',
        ),
        # An address next to a system: jax's variable wins.
        (SLURM | {'JAX_COORDINATOR_ADDRESS': 'ib09:1234'}, '5 of 8 at ib09:1234, by Slurm'),
        # Two systems that agree
        (TPU | JAX | {'JAX_PROCESS_ID': '2'}, '2 of 4 at 10.0.0.1:1234, by a TPU pod'),
        # A process's own index wins over the pod's.
        (
            INDEXED_JOB | {'JAX_PROCESS_ID': '0'},
            '0 of 4 at train-0.train:8482, by the variables of JAX',
        ),
    ],
)
def test_environments_of_clusters(environ, expected):
    found = find_processes(environ)
    where = f'{found.coordinator_address}, by {found.source}'
    assert f'{found.process_index} of {found.process_count} at {where}' == expected


@pytest.mark.parametrize(
    'environ',
    [
        {},
        {'PATH': '/bin', 'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'SLURM_CONF': '/etc/slurm.conf'},
        {'MEGASCALE_NUM_SLICES': '2'},  # a Cloud TPU VM, whose server of metadata knows the rest
        {'TPU_WORKER_HOSTNAMES': '', 'OMPI_COMM_WORLD_SIZE': ''},
    ],
)
def test_an_environment_that_says_nothing(environ):
    assert find_processes(environ) is None


def test_all_processes_agree_on_process_0():
    sizes = {'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}
    of_rank = [
        OPEN_MPI_5 | sizes | {'OMPI_COMM_WORLD_RANK': f'{n}', 'PMIX_HOSTNAME': f'gpu-node-0{n + 1}'}
        for n in range(2)
    ]
    of_slice = [
        TPU | SLICES | {'TPU_WORKER_ID': str(worker), 'MEGASCALE_SLICE_ID': str(number)}
        for number, worker in itertools.product(range(2), range(4))
    ]
    of_task = [SLURM | {'SLURM_PROCID': str(task)} for task in range(8)]
    for environments in (of_rank, of_slice, of_task):
        found = [find_processes(environ) for environ in environments]
        assert [f.process_index for f in found] == list(range(len(environments)))
        assert {f.process_count for f in found} == {len(environments)}
        assert len({f.coordinator_address for f in found}) == 1


def test_a_given_address_wins():
    for environ in (SLURM, OPEN_MPI_4, JAX, INDEXED_JOB):
        found = find_processes(environ, 'mine:99')
        assert found.coordinator_address == 'mine:99'
        assert found.process_count == find_processes(environ).process_count


FOUR_GPUS, ONE_GPU = {'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, {'CUDA_VISIBLE_DEVICES': '2'}
ONE_TASK = {'SLURM_STEP_NUM_TASKS': '2', 'SLURM_PROCID': '1', 'SLURM_LOCALID': '0'}
ONE_TASK |= {'SLURM_STEP_TASKS_PER_NODE': '1(x2)'}


@pytest.mark.parametrize(
    ('environ', 'devices'),
    [
        (SLURM | FOUR_GPUS, (1,)),  # four tasks per host
        (SLURM | ONE_TASK | FOUR_GPUS, None),  # one task per host uses all GPUs
        (SLURM | ONE_GPU, None),  # each task sees one GPU only
        (SLURM | FOUR_GPUS | {'SLURM_GPUS_PER_TASK': '4'}, None),
        (SLURM | FOUR_GPUS | {'SLURM_STEP_TASKS_PER_NODE': '4,2'}, (2, 3)),
        (SLURM, (1,)),
        (OPEN_MPI_5 | FOUR_GPUS, (2, 3)),
        (OPEN_MPI_4 | FOUR_GPUS, None),
        (TPU, None),
        (JAX | FOUR_GPUS, None),
    ],
)
def test_processes_of_a_host_share_its_gpus(environ, devices):
    assert find_processes(environ).local_device_ids == devices


@pytest.mark.parametrize(
    ('environ', 'words'),
    [
        # A count without an index, and the reverse
        (without(JAX, 'JAX_PROCESS_ID'), ['JAX_NUM_PROCESSES=4', 'JAX_PROCESS_ID is not']),
        (without(JAX, 'JAX_NUM_PROCESSES'), ['JAX_PROCESS_ID=1', 'JAX_NUM_PROCESSES is not']),
        ({'JAX_COORDINATOR_ADDRESS': 'a:1'}, ['JAX_NUM_PROCESSES and JAX_PROCESS_ID are not']),
        (without(OPEN_MPI_4, 'OMPI_COMM_WORLD_RANK'), ['OMPI_COMM_WORLD_RANK is not', 'mpirun']),
        (without(OPEN_MPI_4, 'OMPI_COMM_WORLD_SIZE'), ['OMPI_COMM_WORLD_SIZE is not', 'mpirun']),
        (without(TPU, 'TPU_WORKER_ID'), ['TPU_WORKER_HOSTNAMES', '4 hosts', 'TPU_WORKER_ID']),
        (without(TPU | SLICES, 'MEGASCALE_SLICE_ID'), ['2 TPU slices', 'MEGASCALE_SLICE_ID is']),
        (
            without(TPU | SLICES, 'MEGASCALE_COORDINATOR_ADDRESS'),
            ['2 TPU slices', 'MEGASCALE_COORDINATOR_ADDRESS is not'],
        ),
        ({'JOB_COMPLETION_INDEX': '3'}, ['JOB_COMPLETION_INDEX=3', 'JAX_NUM_PROCESSES is not']),
        (JOBSET | {'JOB_INDEX': '1'}, ['JOB_INDEX=1', 'PROCESSES_IN_JOB is not']),
        # A job of Slurm without srun
        (SBATCH, ['srun', 'SLURM_STEP_NUM_TASKS']),
        ({'SLURM_JOB_ID': '4242', 'SLURM_NTASKS': '4'}, ['srun', 'SLURM_PROCID']),
        # Where process 0 runs is not known, or is elsewhere
        (
            without(OPEN_MPI_4, 'OMPI_MCA_orte_hnp_uri'),
            ['Open MPI does not say', '--coordinator_address', 'JAX_COORDINATOR_ADDRESS'],
        ),
        (
            OPEN_MPI_5 | {'OMPI_COMM_WORLD_RANK': '0'},
            ['gpu-node-02', 'mpirun was started on gpu-node-01', '=gpu-node-02:8482'],
        ),
        (without(INDEXED_JOB, 'JAX_COORDINATOR_ADDRESS'), ['Kubernetes', 'does not say']),
        # Out of range
        (SLURM | {'SLURM_PROCID': '8'}, ['SLURM_PROCID=8', '0 to 7', 'SLURM_STEP_NUM_TASKS=8']),
        (JAX | {'JAX_PROCESS_ID': '4'}, ['JAX_PROCESS_ID=4', '0 to 3', 'JAX_NUM_PROCESSES=4']),
        (TPU | {'TPU_WORKER_ID': '4'}, ['TPU_WORKER_ID=4', '0 to 3', 'TPU_WORKER_HOSTNAMES']),
        (TPU | SLICES | {'MEGASCALE_SLICE_ID': '2'}, ['MEGASCALE_SLICE_ID=2', '0 to 1']),
        (TPU | without(SLICES, 'MEGASCALE_NUM_SLICES'), ['MEGASCALE_SLICE_ID=1', 'NUM_SLICES=1']),
        (INDEXED_JOB | {'JOB_COMPLETION_INDEX': '4'}, ['index of the pod=4', '0 to 3']),
        # Two systems with different answers
        (SLURM | JAX, ['Slurm (', '5 of 8', 'variables of JAX (', '1 of 4', 'SLURM_PROCID=5']),
        (TPU | JAX, ['TPU_WORKER_ID=2', '2 of 4', 'JAX_PROCESS_ID=1', '1 of 4', 'unset']),
        (OPEN_MPI_4 | TPU, ['OMPI_COMM_WORLD_RANK=1', 'TPU_WORKER_ID=2']),
        # Malformed
        (SLURM | {'SLURM_PROCID': 'two'}, ["SLURM_PROCID='two'", 'integer >= 0']),
        (JAX | {'JAX_NUM_PROCESSES': '0'}, ["JAX_NUM_PROCESSES='0'", 'integer >= 1']),
        (JAX | {'JAX_NUM_PROCESSES': '-4'}, ["'-4'", 'integer >= 1']),
        (SLURM | {'SLURM_STEP_NODELIST': 'gpu[1-'}, ["'gpu[1-'", 'gpu[08-10,12]']),
        (JAX | {'JAX_COORDINATOR_ADDRESS': 'a:b'}, ['JAX_COORDINATOR_ADDRESS=a:b', 'HOST:PORT']),
        (JAX | {'JAX_COORDINATOR_ADDRESS': 'a:70000'}, ['a:70000', 'HOST:PORT']),
        (SLURM | {'JAX_COORDINATOR_PORT': '70000'}, ['JAX_COORDINATOR_PORT=70000', '65535']),
        (
            SLURM | {'CUDA_VISIBLE_DEVICES': '0,1,2'},
            ['4 processes', '3 GPUs of CUDA_VISIBLE_DEVICES'],
        ),
    ],
)
def test_an_environment_that_cannot_be_right(environ, words):
    with pytest.raises(ConfigError) as caught:
        find_processes(environ)
    message = str(caught.value)
    assert '\n' not in message
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ('hosts', 'first'),
    [
        # The manuals of slurm_hostlist_create and of libslurm's Perl interface
        ('linux[1-3,6]', 'linux1'),
        ('node1,node[2-5,12]', 'node1'),
        ('login', 'login'),
        ('a[098-101]', 'a098'),
        ('r[0-1]n[01-02]x,b', 'r0n01x'),
        ('n-1.dom[5]', 'n-1.dom5'),
    ],
)
def test_process_0_runs_on_the_first_host_of_slurms_list(hosts, first):
    found = find_processes(SLURM | {'SLURM_STEP_NODELIST': hosts})
    assert found.coordinator_address == f'{first}:{SLURM_PORT}'


@pytest.mark.parametrize('hosts', ['a,', ',a', 'a b', 'a[', 'a]', 'a[]', 'a[1-]', 'a[x]', 'a[[1]]'])
def test_a_malformed_list_of_hosts(hosts):
    with pytest.raises(ConfigError, match='list of hosts'):
        find_processes(SLURM | {'SLURM_STEP_NODELIST': hosts})


def test_a_host_shares_its_gpus_among_its_own_tasks():
    # The manual of srun: "2(x3),1" are two tasks on each of three hosts, and one on the fourth.
    tasks = SLURM | FOUR_GPUS | {'SLURM_STEP_TASKS_PER_NODE': '2(x3),1'}
    found = [find_processes(tasks | {'SLURM_NODEID': str(host)}) for host in range(4)]
    assert [one.local_device_ids for one in found] == [(2, 3), (2, 3), (2, 3), None]
    with pytest.raises(ConfigError, match=r'4 hosts, and not of host 4'):
        find_processes(tasks | {'SLURM_NODEID': '4'})
    with pytest.raises(ConfigError, match='4x2'):
        find_processes(SLURM | {'SLURM_STEP_TASKS_PER_NODE': '4x2'})


# Cloud TPU VMs are described by a server of metadata, which a local server stands for here.

# The attributes of host 1 of 2, as jax reads them (jax._src.clusters.cloud_tpu_cluster): hosts have
# names or, in an older form, name:number:address.
WORKERS = {
    'agent-worker-number': '1',
    'worker-network-endpoints': 'w0:8470:10.0.0.2,w1:8470:10.0.0.3',
}
NAMES = WORKERS | {'worker-network-endpoints': 't1v-n-abc-w-0,t1v-n-abc-w-1'}
TPU_ENV = """ACCELERATOR_TYPE: 'v5litepod-16'
MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2'
MEGASCALE_NUM_SLICES: '2'
MEGASCALE_SLICE_ID: '1'
TPU_CHIPS_PER_HOST_BOUNDS: '2,2,1'
"""


@pytest.fixture
def metadata():
    """Returns a function (attributes, failures) -> host:port of a server with them."""
    servers = []

    def serve(attributes, failures=0, flavor='Google'):
        left = [503] * failures

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                folder, _, name = self.path.rpartition('/')
                known = folder == '/computeMetadata/v1/instance/attributes' and name in attributes
                asked = self.headers['Metadata-Flavor'] == 'Google'
                self.send_response(left.pop() if left else 200 if known and asked else 404)
                self.send_header('Metadata-Flavor', flavor)
                self.end_headers()
                self.wfile.write(attributes.get(name, '').encode())

            def log_message(self, *arguments):
                pass

        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f'127.0.0.1:{server.server_port}'

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


# The port that Google Cloud opens between hosts of v6e: "tcp: 8470, 8471, 8474, 8476, 11211".
OTHER = {'other_ports': (8476,)}


@pytest.mark.parametrize(
    ('attributes', 'expected'),
    [
        (WORKERS, ProcessAddress('10.0.0.2:8482', 2, 1, 'a TPU pod', **OTHER)),
        (NAMES, ProcessAddress('t1v-n-abc-w-0:8482', 2, 1, 'a TPU pod', **OTHER)),
        (
            WORKERS | {'tpu-env': TPU_ENV},
            ProcessAddress('10.0.0.2:8482', 4, 3, '2 TPU slices', **OTHER),
        ),
    ],
)
def test_the_place_of_a_tpu_vm(attributes, expected, metadata):
    assert find_processes(read_metadata(metadata(attributes))) == expected


def test_machines_that_are_not_tpu_vms(metadata, monkeypatch):
    assert read_metadata(metadata({'hostname': 'cpu'})) == {}  # another machine of Google Cloud
    assert read_metadata(metadata(WORKERS, flavor='nginx')) == {}

    def unknown(*arguments, **others):
        raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')

    monkeypatch.setattr(socket, 'getaddrinfo', unknown)
    assert read_metadata() == {}  # a machine elsewhere


def test_a_server_that_fails_is_asked_again(metadata):
    assert read_metadata(metadata(WORKERS, failures=2), wait=0)['TPU_WORKER_ID'] == '1'
    with pytest.raises(ConfigError, match=r'503.*--coordinator_address'):
        read_metadata(metadata(WORKERS, failures=3), wait=0)
    with pytest.raises(ConfigError, match=r'127\.0\.0\.1:1 .*refused'):
        read_metadata('127.0.0.1:1', wait=0)


def test_an_answer_that_is_not_understood(metadata):
    with pytest.raises(ConfigError, match="'first' as the index"):
        read_metadata(metadata(WORKERS | {'agent-worker-number': 'first'}))
    with pytest.raises(ConfigError, match="'' as its hosts"):
        read_metadata(metadata({'agent-worker-number': '1'}))
