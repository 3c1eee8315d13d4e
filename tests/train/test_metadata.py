"""Cloud TPU VMs are described by a server of metadata, which a local server stands for here."""

import http.server
import socket
import threading

import pytest

from train.errors import ConfigError
from train.processes.environment import ProcessAddress, find_processes
from train.processes.joining import read_metadata

pytestmark = pytest.mark.core

# The attributes of host 1 of 2, as jax reads them (jax._src.clusters.cloud_tpu_cluster): hosts have
# names or, in an older form, name:number:address.
WORKERS = {
    'agent-worker-number': '1',
    'worker-network-endpoints': 'w0:8470:10.0.0.2,w1:8470:10.0.0.3',
}
NAMES = WORKERS | {'worker-network-endpoints': 't1v-n-abc-w-0,t1v-n-abc-w-1'}
SLICES = """ACCELERATOR_TYPE: 'v5litepod-16'
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


@pytest.mark.parametrize(
    ('attributes', 'expected'),
    [
        (WORKERS, ProcessAddress('10.0.0.2:8482', 2, 1, 'a TPU pod')),
        (NAMES, ProcessAddress('t1v-n-abc-w-0:8482', 2, 1, 'a TPU pod')),
        (WORKERS | {'tpu-env': SLICES}, ProcessAddress('10.0.0.2:8482', 4, 3, '2 TPU slices')),
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
