"""Descriptions of TPUs: devices, hosts, slices, chips, options and errors."""

import collections
import itertools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from described_machines import MACHINES, described, ids, needs_libtpu
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from mock_devices import tpus

import partitioning
from partitioning import (
    CHIPS,
    bounds_from_last_device,
    create_mesh,
    default_mesh,
    describe_topology,
    get_coords,
)

all_machines = pytest.mark.parametrize('machine', MACHINES, ids=str)

# The memory of a device in GiB. The compiler's error for a larger program contains this limit.
HBM_GIB = {
    'v2': 7.48,
    'v3': 15.48,
    'v4': 30.75,
    'v5e': 15.75,
    'v5p': 95.73,
    'v6e': 31.24,
    'tpu7x': 94.74,
}
ONE_HOST = ['v2:2x2', 'v3:2x2', 'v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1']


def slice_of(device):
    return getattr(device, 'slice_index', 0)


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
def test_every_core_of_every_chip_is_one_device(machine):
    found = collections.Counter(
        (slice_of(d), *d.coords, d.core_on_chip) for d in machine.describe().devices
    )
    sizes = (machine.slices, *machine.bounds, machine.cores)
    assert found == collections.Counter(itertools.product(*map(range, sizes)))


@needs_libtpu
@all_machines
def test_each_process_has_a_tile_of_four_chips(machine):
    tiles = collections.defaultdict(set)
    for d in machine.describe().devices:
        x, y, z = d.coords
        tiles[d.process_index].add((slice_of(d), x // 2, y // 2, z))
    assert all(len(tile) == 1 for tile in tiles.values())
    assert len(set.union(*tiles.values())) == machine.processes


@needs_libtpu
@all_machines
def test_ids_count_along_x_first_and_restart_in_each_slice(machine):
    x_size, y_size, _ = machine.bounds
    for d in machine.describe().devices:
        x, y, z = d.coords
        place = d.core_on_chip + machine.cores * (x + x_size * (y + y_size * z))
        first = 100_000 * (d.slice_index + 1) if machine.slices > 1 else 0
        assert d.id == first + place


@needs_libtpu
@all_machines
def test_devices_have_a_slice_index_only_if_there_are_several_slices(machine):
    devices = machine.describe().devices
    if machine.slices == 1:
        assert not any(hasattr(d, 'slice_index') for d in devices)
    else:
        sizes = collections.Counter(d.slice_index for d in devices)
        assert sizes == dict.fromkeys(range(machine.slices), machine.devices // machine.slices)
        processes = [{d.process_index for d in devices if d.slice_index == s} for s in sizes]
        assert not set.intersection(*processes)


@needs_libtpu
@pytest.mark.parametrize(
    'name, kind, bounds, cores',
    [('v3:4x4', 'TPU v3', (4, 4, 1), 2), ('v5p:2x2x2', 'TPU v5', (2, 2, 2), 1)],
)
def test_described_devices_equal_the_mock_devices_of_t5x(name, kind, bounds, cores):
    def facts(devices):
        return {(d.id, d.process_index, *d.coords, d.core_on_chip, d.device_kind) for d in devices}

    assert facts(described(name).devices) == facts(tpus(bounds, kind, cores))


@needs_libtpu
def test_each_process_of_v5p_2x2x2_has_one_layer():
    by_process = collections.defaultdict(list)
    for d in described('v5p:2x2x2').devices:
        by_process[d.process_index].append((d.id, d.coords[2]))
    assert sorted(by_process[0]) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert sorted(by_process[1]) == [(4, 1), (5, 1), (6, 1), (7, 1)]


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


@pytest.mark.core
@pytest.mark.parametrize('name, gib', HBM_GIB.items())
def test_memory_of_a_device(name, gib):
    assert CHIPS[name].hbm_bytes_per_device / 2**30 == pytest.approx(gib, abs=0.01)


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
@pytest.mark.parametrize(
    'name, wrap',
    [
        ('v5p:4x4x8', (True, True, True)),
        ('v5p:2x2x4', (False, False, False)),  # does not consist of whole cubes of 4
        ('tpu7x:2x2x2', (False, False, False)),
        ('v5e:16x8', (True, False, False)),
        ('v6e:8x16', (False, True, False)),
        ('v2:16x16', (True, True, False)),
        ('v3:16x16', (False, False, False)),  # its pod is 32 x 32
    ],
)
def test_the_default_of_wrap(name, wrap):
    assert described(name).wrap == wrap


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


@needs_libtpu
def test_a_program_compiles_for_two_slices():
    devices = described('v5e:4x4', 2).devices
    mesh = default_mesh(None, ici_mesh_shape=(1, 4, 4), dcn_mesh_shape=(2, 1, 1), devices=devices)
    assert dict(mesh.shape) == {'replica': 2, 'data': 4, 'model': 4}
    assert ids(mesh) == 2 * [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]]
    rows = NamedSharding(mesh, P(('replica', 'data'), 'model'))
    array = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)
    compiled = jax.jit(lambda a: a + 1, out_shardings=rows).lower(array).compile()
    assert compiled.memory_analysis().argument_size_in_bytes >= 64 * 64 * 4 // 32


# Errors.


@pytest.mark.core
@pytest.mark.parametrize('name', ['', 'v7x:4x4x4', 'ironwood:4x4x4', 'v5litepod:4x4', 'V5E:4x4'])
def test_unknown_chips(name):
    with pytest.raises(ValueError, match='unknown topology') as error:
        describe_topology(name)
    assert repr(name) in str(error.value)
    assert all(chip in str(error.value) for chip in (*HBM_GIB, 'a100', 'h100', 'h200', 'b200'))


@pytest.mark.core
def test_a_misspelled_chip_gets_a_hint():
    with pytest.raises(ValueError, match=r"Did you mean 'v5p'\?"):
        describe_topology('v5pp:4x4x4')


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


@pytest.mark.parametrize(
    'options',
    [
        {'wrap': True},
        {'wrap': [1, 0, 1]},
        {'chips_per_host_bounds': 4},
        {'chips_per_host_bounds': (2.0, 2, 1)},
        {'chips_per_host_bounds': ()},
    ],
    ids=str,
)
def test_options_of_wrong_types(options):
    with pytest.raises(ValueError, match='needs 3 entries'):
        describe_topology('v5e:4x4', **options)


def test_a_chip_in_capital_letters_gets_a_hint():
    with pytest.raises(ValueError, match="Did you mean 'v5e'"):
        describe_topology('V5E:4x4')
