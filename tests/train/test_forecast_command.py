"""`meshwright forecast`: its output, its files, its exit status, and its errors."""

import json
import sys

import gin
import pytest

from train.cli import main
from train.forecasting import machines
from train.runtime import machine

pytestmark = pytest.mark.core

GIB = 2**30


@pytest.fixture(autouse=True)
def _own_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.setattr(sys, 'path', [*sys.path])
    # jax has its devices already.
    monkeypatch.setattr(machine, 'use_virtual_devices', lambda count: None)
    gin.clear_config()
    yield
    gin.clear_config()


def forecast(capsys, *arguments):
    """Returns the exit status, what is on standard output, and what is on standard error."""
    try:
        status = main(['forecast', *arguments])
    except SystemExit as exit_:
        status = exit_.code
    return status, *capsys.readouterr()


def test_a_run_is_forecast_on_two_machines_without_its_data(capsys, tmp_path):
    """The parameters of 8B are float32, and the batch has 3 arrays of 4 bytes; counted by hand."""
    arguments = ('pretrain', 'configs/models/8b.gin', '--gin.BATCH_SIZE=512', '--no_compile')
    machines = ('--topology=v5p:4x4x4', '--topology=2xv5e-256')
    status, out, err = forecast(capsys, *arguments, *machines, '--json', f'--out={tmp_path}/made')
    held = json.loads(out)
    first, second = held['forecasts']
    assert status == (0 if held['fits'] else 1)
    assert (first['topology'], first['num_devices']) == ('v5p:4x4x4', 64)
    assert (second['topology'], second['num_slices']) == ('v5e:16x16', 2)
    assert second['mesh'] == {'replica': 2, 'data': 256, 'model': 1}
    count = 8_030_261_248  # Llama 3 8B, as its authors publish it
    assert first['memory']['parameters'] == count * 4 // 64
    assert first['memory']['batch'] == 512 // 64 * 2048 * 3 * 4
    assert 'v5p:4x4x4' in err and 'v5p' not in out.partition('{')[0]
    written = {path.name for path in (tmp_path / 'made').iterdir()}
    assert written >= {'forecast.json', 'forecast.html'}
    assert json.loads((tmp_path / 'made/forecast.json').read_text()) == held


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['pretrain', '--topology=v5q:4x4'], ["unknown topology 'v5q:4x4'", 'v5e, v5p']),
        (['pretrain', '--topology=v5p:4x4'], ['3 dimensions', 'v5p:4x4x4']),
        (['pretrain', '--topology=v5p-100'], ["'v5p-100'", "'v5p-128'", "'v5p:4x4x4'"]),
        (['pretrain', '--topology=v5e:4x4', '--gin.BATCH_SIZE=-1'], ['batch_size is -1']),
        (['pretrain', '--topology=v5e:4x4', '--gin.BATCH_SIZE=8'], ['(8)', '(16)']),
        (
            [
                *('pretrain', 'configs/models/8b.gin', 'configs/partitioning/fsdp_tensor.gin'),
                *('--gin.NUM_PARTITIONS=16', '--topology=v5e:8x8'),
            ],
            ['v5e:8x8', 'size 8 is not divisible by 16', "'kv_heads'"],
        ),
        (['no_model.gin', '--topology=v5e:4x4'], ['no run, and so no model', 'pretrain.gin']),
        (['--topology=v5e:4x4'], ['no run: name one', 'pretrain']),
        (['pretrain'], ['required: --topology']),
        (['pretrain', '--topology=v5e:4x4', '--out=file/x'], ['--out=file/x cannot be created']),
    ],
)
def test_errors_are_one_line(capsys, tmp_path, arguments, words):
    (tmp_path / 'no_model.gin').write_text('X = 1\n')
    (tmp_path / 'file').touch()
    status, out, err = forecast(capsys, *arguments, '--no_compile')
    assert (status, out) == (2, '')
    assert err.startswith('error: ') and err.count('\n') == 1
    assert not [word for word in words if word not in err]


def test_a_compiler_that_is_not_installed(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("describing TPUs needs libtpu: pip install 'meshwright[aot]'")

    monkeypatch.setattr(machines, 'describe_topology', refuse)
    status, out, err = forecast(capsys, 'pretrain', '--topology=v5e:4x4')
    assert (status, out) == (2, '')
    assert err == "error: v5e:4x4: describing TPUs needs libtpu: pip install 'meshwright[aot]'\n"
