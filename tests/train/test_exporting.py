"""Programs as files."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import partitioner

from train.errors import ConfigError
from train.exporting import export_program, load_program

ROW = {'x': jax.ShapeDtypeStruct((3,), np.float32)}
PARAMS = {'dense': {'kernel': jnp.arange(6.0).reshape(3, 2), 'bias': jnp.array([1.0, -1.0])}}


def affine(params, batch):
    return {'y': batch['x'] @ params['dense']['kernel'] + params['dense']['bias']}


def test_a_program_computes_the_same_with_any_batch_size(tmp_path):
    """The expected values are x @ [[0, 1], [2, 3], [4, 5]] + [1, -1], by hand."""
    export_program(affine, PARAMS, ROW, tmp_path / 'one', description={'model': 'affine'})
    program = load_program(tmp_path / 'one')
    x = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]], np.float32)
    np.testing.assert_array_equal(program({'x': x})['y'], [[1, 0], [3, 2], [7, 8]])
    np.testing.assert_array_equal(program({'x': x[:1]})['y'], [[1, 0]])
    assert program.description == json.loads((tmp_path / 'one/export.json').read_text())
    assert program.description['inputs'] == {'x': {'shape': [None, 3], 'dtype': 'float32'}}
    assert program.description['outputs'] == {'y': {'shape': [None, 2], 'dtype': 'float32'}}
    assert program.description['model'] == 'affine'
    assert {'cpu', 'tpu'} <= set(program.description['platforms'])


def test_parameters_of_a_mesh_run_on_another_one(tmp_path):
    def sharded(mesh):
        spec = jax.sharding.PartitionSpec(None, 'model')
        return jax.sharding.NamedSharding(mesh, spec)

    values = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    kernel = jax.device_put(values, sharded(partitioner(4, 2).mesh))
    params = {'dense': {'kernel': kernel, 'bias': jnp.zeros(4)}}
    export_program(affine, params, ROW, tmp_path / 'one', batch_size=2)
    other = partitioner(2, 4).mesh
    replicated = jax.sharding.NamedSharding(other, jax.sharding.PartitionSpec())
    places = {'dense/kernel': sharded(other), 'dense/bias': replicated}
    program = load_program(tmp_path / 'one', places)
    assert program.params['dense']['kernel'].sharding == places['dense/kernel']
    y = program({'x': np.eye(3, dtype=np.float32)[:2]})['y']
    np.testing.assert_array_equal(y, [[0, 1, 2, 3], [4, 5, 6, 7]])


@pytest.mark.long
def test_another_process_needs_only_the_folder(tmp_path):
    export_program(affine, PARAMS, ROW, tmp_path / 'one', platforms=('cpu',))
    code = (
        'import numpy as np; from train.exporting import load_program; '
        f'p = load_program({str(tmp_path / "one")!r}); '
        'print(p({"x": np.ones((1, 3), np.float32)})["y"].tolist())'
    )
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == '[[7.0, 8.0]]'


def test_errors_are_one_line(tmp_path):
    export_program(affine, PARAMS, ROW, tmp_path / 'one', platforms=('cpu',), batch_size=2)
    program = load_program(tmp_path / 'one')
    cases = [
        (
            lambda: export_program(affine, PARAMS, ROW, tmp_path / 'one'),
            'contains a program already',
        ),
        (lambda: load_program(tmp_path), r'contains no program \(expected export\.json'),
        (lambda: program({}), 'x is missing: the program needs x'),
        (lambda: program({'x': np.ones((3, 3), np.float32)}), r'float32\[3, 3\]: it must be'),
        (lambda: program({'x': np.ones((2, 3), np.int32)}), r'int32\[2, 3\]: it must be float32'),
    ]
    for call, expected in cases:
        with pytest.raises(ConfigError, match=expected) as error:
            call()
        assert '\n' not in str(error.value)

    def depends_on_size(params, batch):
        return {'y': batch['x'][: int(batch['x'].shape[0])]}

    with pytest.raises(ConfigError, match=r'cannot be exported .* or give a batch_size'):
        export_program(depends_on_size, PARAMS, ROW, tmp_path / 'two')
    assert not (tmp_path / 'two').exists()
    (tmp_path / 'one/program.stablehlo').write_bytes(b'')
    with pytest.raises(ConfigError, match='is damaged'):
        load_program(tmp_path / 'one')


@pytest.mark.parametrize('name', ['xla_ffi_python_cpu_callback', 'mosaic_gpu_v2', 'a call'])
def test_a_program_that_calls_more_than_mathematics_is_refused(tmp_path, name):
    """A wrong index in a call of xla_ffi_python_cpu_callback ends the process of jaxlib 0.10."""
    check = jax.export.DisabledSafetyCheck.custom_call(name)

    def call(params, batch):
        kind = jax.ShapeDtypeStruct((2, 3), np.float32)
        return {'y': jax.ffi.ffi_call(name, kind)(batch['x'], index=np.uint64(5))}

    export_program(affine, PARAMS, ROW, tmp_path / 'one', batch_size=2, platforms=('cpu',))
    arrays = {'x': jax.ShapeDtypeStruct((2, 3), np.float32)}
    made = jax.export.export(jax.jit(call), disabled_checks=[check])(PARAMS, arrays)
    (tmp_path / 'one/program.stablehlo').write_bytes(made.serialize())
    with pytest.raises(ConfigError, match=f'calls {name}, which may run code on the host'):
        load_program(tmp_path / 'one')


def test_a_program_may_call_the_libraries_of_jax(tmp_path):
    def solve(params, batch):
        values, _ = jnp.linalg.eigh(params['m'])
        return {'y': batch['x'] @ jnp.linalg.cholesky(params['m']), 'values': values}

    params = {'m': jnp.array([[4.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 1.0]])}
    export_program(solve, params, ROW, tmp_path / 'one', batch_size=1)
    found = load_program(tmp_path / 'one')({'x': np.ones((1, 3), np.float32)})
    np.testing.assert_allclose(found['y'], [[2, 3, 1]], rtol=1e-6)
    np.testing.assert_allclose(found['values'], [1, 4, 9], rtol=1e-5)
