"""The plugin of pytest, in test runs of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Tests with a golden file that need no jax, so that these runs are short.
GOLDEN = """
from pathlib import Path
import pytest
from meshwright.records.files import must_write, write_golden

@pytest.mark.parametrize('name', ['one', 'two', 'three'])
def test_text(name):
    file = Path(f'golden/{name}.json')
    if must_write(file, None, None):
        write_golden(file, TEXT)
    assert file.read_text() == TEXT
"""
# A test as its users write it, next to the regular expression that it replaces.
USERS = """
import re
import jax, jax.numpy as jnp
jax.config.update('jax_num_cpu_devices', 8)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import meshwright as mw

mesh = jax.make_mesh((4, 2), ('fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 2)

def struct(shape, *spec):
    return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

@jax.jit
def forward(weights, batch):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, weights)[0]

ARGS = struct((6, 32, 32), None, 'fsdp'), struct((16, 32), 'fsdp')

def test_gathers_by_a_regular_expression():
    hlo = forward.lower(*ARGS).compile().as_text()
    assert len(re.findall(r' all-gather(?:-start)?\\(', hlo)) == 1  # in the loop

def test_gathers():
    mw.assert_exchanges(forward, ARGS, {('all-gather', 'fsdp'): (6, '18.4 kB')})

def test_gathers_as_somebody_changes_them():
    mw.assert_exchanges(forward, ARGS, {('all-gather', 'fsdp'): 7})

def test_the_forecast():
    mw.assert_forecast_unchanged(forward, ARGS, update=False, on_missing='error')
"""


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs pytest on a text: (status, output)."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(('PYTEST', 'MESHWRIGHT'))
    }
    environment |= {'PYTHONPATH': str(ROOT), 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1', 'CI': ''}

    def run(text, *flags, plugin=('-p', 'meshwright.pytest_plugin'), **variables):
        (tmp_path / 'test_it.py').write_text(text)
        command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *plugin, *flags]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.long
def test_golden_files_are_updated_on_request_and_listed(run, tmp_path):
    """Also by the processes of pytest-xdist."""
    (tmp_path / 'golden').mkdir()
    (tmp_path / 'golden/one.json').write_text('1')
    status, out = run(f'TEXT = "2"\n{GOLDEN}')
    assert status == 1 and '1 failed, 2 passed' in out
    assert listed(out) == ['three', 'two']
    status, out = run(f'TEXT = "3"\n{GOLDEN}', '--update-forecasts', '-p', 'xdist', '-n', '2')
    assert status == 0 and listed(out) == ['one', 'three', 'two']
    assert 'golden files written; commit them' in out
    assert {file.read_text() for file in (tmp_path / 'golden').iterdir()} == {'3'}


def listed(out):
    """The files of the summary."""
    return sorted(re.findall(r'^golden/(\w+)\.json$', out, re.M))


def test_the_variable_is_left_as_it_was(tmp_path):
    """Also where pytest runs in a process that goes on."""
    (tmp_path / 'test_it.py').write_text('def test(): pass')
    code = f"""
import os, sys, pytest
flags = ['-q', '-p', 'no:cacheprovider', '-p', 'meshwright.pytest_plugin', {str(tmp_path)!r}]
assert pytest.main([*flags, '--update-forecasts']) == 0
assert 'MESHWRIGHT_UPDATE_FORECASTS' not in os.environ
assert 'jax' not in sys.modules and 'numpy' not in sys.modules
"""
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}
    environment.pop('MESHWRIGHT_UPDATE_FORECASTS', None)
    subprocess.run([sys.executable, '-c', code], env=environment, cwd=tmp_path, check=True)


def test_the_package_registers_it(tmp_path, run):
    """As the metadata of a wheel do, whose entry points pyproject.toml has."""
    project = (ROOT / 'pyproject.toml').read_text()
    entry = re.search(r'\[project\.entry-points\.pytest11\]\n(\w+) = "([\w.]+)"', project)
    folder = tmp_path / 'installed/meshwright_test-1.0.dist-info'
    folder.mkdir(parents=True)
    (folder / 'METADATA').write_text('Metadata-Version: 2.1\nName: meshwright-test\nVersion: 1.0\n')
    (folder / 'entry_points.txt').write_text(f'[pytest11]\n{entry[1]} = {entry[2]}\n')
    path = os.pathsep.join([str(ROOT), str(folder.parent)])
    status, out = run(
        'def test(): pass', '--help', plugin=(), PYTHONPATH=path, PYTEST_DISABLE_PLUGIN_AUTOLOAD=''
    )
    assert status == 0 and '--update-forecasts' in out


@pytest.mark.long
def test_a_test_in_place_of_a_regular_expression(run):
    """Six layers gather 32 x 32 floats, of which a device has a quarter: 3 kB for each layer."""
    status, out = run(USERS, JAX_PLATFORMS='cpu')
    assert status == 1 and '2 failed, 2 passed' in out
    assert '~ all-gather over fsdp: executed 6 times, expected 7' in out
    assert "as it is now: {('all-gather', 'fsdp'): 6}" in out
    assert re.search(r'18\.4 kB  6 x all-gather over fsdp of f32\[8,32\].*test_it\.py:\d+', out)
    assert 'there is no golden file: commit one' in out and 'asserting.py' not in out
