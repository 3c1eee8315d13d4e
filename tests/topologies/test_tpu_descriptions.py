"""Descriptions of TPUs: devices, hosts, slices, chips, options and errors."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from described_machines import MACHINES, described, needs_libtpu
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from mock_devices import tpu_slices

import partitioning
from partitioning import (
    CHIPS,
    bounds_from_last_device,
    create_mesh,
    describe_topology,
    get_coords,
)

all_machines = pytest.mark.parametrize('machine', MACHINES, ids=str)

ONE_HOST = ['v2:2x2', 'v3:2x2', 'v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1']


# Devices, processes and slices.


@needs_libtpu
@all_machines
def test_devices_of_a_description(machine):
    topology = machine.describe()
    assert len(topology.devices) == machine.devices
    assert len({d.id for d in topology.devices}) == machine.devices
    assert topology.num_processes == machine.processes
    assert {d.process_index for d in topology.devices} == set(range(machine.processes))
    assert {d.device_kind for d in topology.devices} == {machine.kind}
    assert {d.platform for d in topology.devices} == {'tpu'}
    assert topology.bounds == machine.bounds
    assert topology.wrap == machine.wrap
    assert topology.num_slices == machine.slices
    assert topology.name == machine.name
    assert topology.chip is CHIPS[machine.name.split(':')[0]]
    assert topology.chip.device_kind == machine.kind
    assert topology.chip.devices == machine.cores


@needs_libtpu
@all_machines
def test_described_devices_equal_the_mock_devices_of_t5x(machine):
    """So the orders that other tests find for mock devices hold for described ones."""

    def facts(devices):
        return {(d.id % 100_000, d.process_index, *d.coords, d.core_on_chip) for d in devices}

    devices, slices = machine.describe().devices, machine.slices
    mock = tpu_slices(slices, machine.bounds, machine.kind, machine.cores)
    each = len(devices) // slices
    assert facts(devices) == facts(dataclasses.replace(d, id=d.id % each) for d in mock)
    assert {getattr(d, 'slice_index', None) for d in devices} == (
        {None} if slices == 1 else {*range(slices)}
    )
    for d in devices if slices > 1 else ():
        assert d.id // 100_000 - 1 == d.slice_index == d.process_index * slices // machine.processes


@needs_libtpu
@all_machines
def test_bounds_from_the_last_device(machine):
    last = max(machine.describe().devices, key=get_coords)
    assert bounds_from_last_device(last) == (*machine.bounds, machine.cores)


@needs_libtpu
def test_a_single_chip_is_one_host():
    assert [len(described(n).devices) for n in ('v5e:1x1', 'v4:1x1x1', 'v2:1x1')] == [1, 1, 2]
    assert described('v5e:1x1').num_processes == 1


@needs_libtpu
def test_the_repr_of_a_description():
    assert repr(described('v5e:4x4')) == "Topology('v5e:4x4': 16 devices, 4 processes)"
    assert 'num_slices=2: 32 devices, 8 processes' in repr(described('v5e:4x4', 2))


# Chips.


@needs_libtpu
@pytest.mark.parametrize('name', ONE_HOST)
def test_memory_equals_the_limit_of_the_compiler(name):
    topology = described(name)
    here = SingleDeviceSharding(topology.devices[0])
    too_large = jax.ShapeDtypeStruct((800, 2**28), jnp.float32, sharding=here)
    with pytest.raises(Exception, match='exceeds available HBM') as error:
        jax.jit(lambda a: a + 1, out_shardings=here).lower(too_large).compile()
    limit = re.search(r'available HBM \(([\d.]+)G\)', str(error.value))
    assert limit is not None, str(error.value)
    gib = topology.chip.hbm_bytes_per_device / 2**30
    assert gib == pytest.approx(float(limit[1]), abs=0.01)


@pytest.mark.core
def test_every_chip_names_its_source():
    for name, chip in CHIPS.items():
        assert chip.name == name
        assert len(chip.source) > 10
        assert chip.devices * chip.hbm_bytes_per_device == pytest.approx(chip.hbm_bytes, abs=1)
        assert chip.devices * chip.peak_flops_per_device == chip.peak_flops


# Options.


@needs_libtpu
@pytest.mark.parametrize('wrap', [(False, False, False), (True, False, True)])
def test_the_argument_wrap(wrap):
    topology = describe_topology('v5p:4x4x4', wrap=wrap)
    assert topology.wrap == wrap
    assert topology.bounds == (4, 4, 4)


@needs_libtpu
@pytest.mark.parametrize('wrap, gathers', [(None, True), ((False, False, False), False)])
def test_wrap_reaches_the_compiler(wrap, gathers):
    # Without rings, the compiler replaces this all-gather by an all-reduce.
    mesh = create_mesh((64,), ('data',), devices=describe_topology('v5p:4x4x4', wrap=wrap).devices)
    rows = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, P('data')))
    double = jax.jit(lambda a: 2 * a, out_shardings=NamedSharding(mesh, P()))
    text = double.lower(rows).compile().as_text()
    assert ('all-gather' in text, 'all-reduce' in text) == (gathers, not gathers)


@needs_libtpu
@pytest.mark.parametrize(
    'name, host, processes',
    [
        ('v5e:4x4', (1, 1, 1), 16),
        ('v5e:4x4', (4, 2, 1), 2),
        ('v5e:4x4', (4, 4, 1), 1),
        ('v5e:1x4', (1, 4, 1), 1),
        ('v5p:4x4x4', (2, 2, 2), 8),
    ],
)
def test_the_argument_chips_per_host_bounds(name, host, processes):
    topology = describe_topology(name, chips_per_host_bounds=host)
    assert topology.num_processes == processes
    tiles = {
        (d.process_index, *(c // h for c, h in zip(d.coords, host, strict=True)))
        for d in topology.devices
    }
    assert len(tiles) == processes


# Errors.


@pytest.mark.core
@pytest.mark.parametrize('name', ['', 'v7x:4x4x4', 'ironwood:4x4x4', 'v5litepod:4x4', 'V5E:4x4'])
def test_unknown_chips(name):
    with pytest.raises(ValueError, match='unknown topology') as error:
        describe_topology(name)
    assert repr(name) in str(error.value)
    assert all(name.split(':')[0] in str(error.value) for name in ONE_HOST)
    assert all(chip in str(error.value) for chip in ('a100', 'h100', 'h200', 'b200'))


@pytest.mark.core
@pytest.mark.parametrize('name, meant', [('v5pp:4x4x4', 'v5p'), ('V5E:4x4', 'v5e')])
def test_a_misspelled_chip_gets_a_hint(name, meant):
    with pytest.raises(ValueError, match=rf"Did you mean '{meant}'\?"):
        describe_topology(name)


@pytest.mark.core
@pytest.mark.parametrize(
    'name, dimensions',
    [
        *[(n, 2) for n in ('v5e', 'v5e:', 'v5e:4', 'v5e:4x4x4', 'v5e:0x4', 'v5e:4x-4', 'v5e:axb')],
        *[(n, 3) for n in ('v4:4x4', 'v5p:4x4', 'tpu7x:4x4', 'v5p:4x4x4x4', 'v5p:4x4x4\n')],
        *[(n, 2) for n in ('h100:8', 'h100:1x8x2')],
    ],
)
def test_the_wrong_number_of_dimensions(name, dimensions):
    chip = name.split(':')[0]
    with pytest.raises(ValueError, match=f'{chip} machines have {dimensions} dimensions'):
        describe_topology(name)


@pytest.mark.core
@pytest.mark.parametrize(
    'name, options, message',
    [
        ('v5e:3x4', {}, r'3x4x1 chips.*2x2x1.*chips_per_host_bounds'),
        ('v5e:1x4', {}, r'1x4x1 chips.*2x2x1'),
        ('v5e:4x4', {'chips_per_host_bounds': (3, 2, 1)}, r'4x4x1 chips.*3x2x1'),
        ('v5e:4x4', {'chips_per_host_bounds': (8, 2, 1)}, r'4x4x1 chips.*8x2x1'),
        ('v5e:4x4', {'chips_per_host_bounds': (0, 1, 1)}, r'4x4x1 chips.*0x1x1'),
        (
            'v5e:4x4',
            {'chips_per_host_bounds': (2, 2)},
            r'bounds=\(2, 2\) needs 3 entries',
        ),
        ('v5e:4x4', {'wrap': (True, True)}, r'wrap=\(True, True\) needs 3 entries'),
        ('v5p:4x4x4', {'wrap': ()}, r'wrap=\(\) needs 3 entries'),
        ('v5p:4x4x4', {'wrap': (True,) * 4}, 'needs 3 entries'),
        ('v5e:4x4', {'wrap': True}, 'needs 3 entries'),
        ('v5e:4x4', {'wrap': [1, 0, 1]}, 'needs 3 entries'),
        ('v5e:4x4', {'chips_per_host_bounds': 4}, 'needs 3 entries'),
        ('v5e:4x4', {'chips_per_host_bounds': (2.0, 2, 1)}, 'needs 3 entries'),
        ('v5e:4x4', {'chips_per_host_bounds': ()}, 'needs 3 entries'),
        *[('v5e:4x4', {'num_slices': n}, f'num_slices={n}') for n in (0, -1, True, 2.0, None)],
        ('h100:1x8', {'num_slices': 0}, 'num_slices=0'),
        ('h100:1x8', {'wrap': (False, False, False)}, 'h100:1x8 is a GPU machine: wrap'),
        ('h100:1x8', {'chips_per_host_bounds': (1, 8, 1)}, 'h100:1x8 is a GPU machine'),
    ],
)
def test_options_that_do_not_fit_the_machine(name, options, message):
    with pytest.raises(ValueError, match=message):
        describe_topology(name, **options)


# Side effects.


@needs_libtpu
def test_the_environment_variables_are_restored(monkeypatch):
    monkeypatch.setenv('TPU_WORKER_HOSTNAMES', 'my-own-host')
    monkeypatch.delenv('ALLOW_MULTIPLE_LIBTPU_LOAD', raising=False)
    before = dict(os.environ)
    describe_topology('v5e:4x4')
    assert dict(os.environ) == before
    with pytest.raises(ValueError, match='unknown topology'):
        describe_topology('v5z:4x4')
    assert dict(os.environ) == before


@pytest.mark.core
@pytest.mark.parametrize('own', [None, 'my-own-folder'])
def test_a_failure_restores_the_environment_variables(monkeypatch, own):
    seen = {}

    def refuse(*_, **__):
        seen.update(os.environ)
        raise RuntimeError('the machine is too odd')

    monkeypatch.setattr(topologies, 'get_topology_desc', refuse)
    monkeypatch.delenv('ALLOW_MULTIPLE_LIBTPU_LOAD', raising=False)
    monkeypatch.delenv('TPU_LOG_DIR', raising=False)
    if own:
        monkeypatch.setenv('TPU_LOG_DIR', own)
    before = dict(os.environ)
    with pytest.raises(ValueError, match=r'v5e:4x4.*the machine is too odd'):
        describe_topology('v5e:4x4')
    assert dict(os.environ) == before
    # Other processes may load libtpu, too, and it writes log files only if the user asks for them.
    assert seen['ALLOW_MULTIPLE_LIBTPU_LOAD'] == '1'
    assert seen['TPU_LOG_DIR'] == (own or 'disabled')


def run_python(program: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs a program without the environment variables of TPUs and jax."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(('TPU_', 'JAX_'))}
    environment.pop('ALLOW_MULTIPLE_LIBTPU_LOAD', None)
    paths = [str(pathlib.Path(partitioning.__file__).parents[1]), environment.get('PYTHONPATH', '')]
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [sys.executable, '-c', program],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_libtpu
def test_describing_prints_nothing_even_if_another_process_has_loaded_libtpu(tmp_path):
    described(
        'v5e:4x4'
    )  # This process loads libtpu, which by default prevents other processes from loading it.
    done = run_python(
        "from partitioning import describe_topology; print(describe_topology('v5p:2x2x2'))",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout == "Topology('v5p:2x2x2': 8 devices, 2 processes)\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.core
def test_without_libtpu_the_error_says_what_to_install(tmp_path):
    done = run_python(
        "import sys; sys.modules['libtpu'] = None\n"
        "from partitioning import describe_topology; describe_topology('v5e:4x4')",
        tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.count('Traceback') == 1
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: describing TPUs needs libtpu: pip install 'meshwright[aot]'"
    )
