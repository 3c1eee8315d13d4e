"""`meshwright forecast` compiles the train step of a run for a TPU that is not here."""

import json
import sys

import gin
import pytest
from described_machines import needs_libtpu

from train.cli import main
from train.machine import devices as machine

pytestmark = needs_libtpu


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


def test_a_step_is_compiled_for_a_tpu(capsys, tmp_path):
    """Two layers, tied embeddings, everything divided over 4 devices; counted by hand."""
    run = ['pretrain', 'configs/models/tiny.gin', '--gin.BATCH_SIZE=16']
    flags = ['--gin.SEQUENCE_LENGTH=128', '--topology=v5e:2x2', '--json', f'--out={tmp_path}/made']
    status = main(['forecast', *run, *flags])
    out = capsys.readouterr().out
    [one] = json.loads(out)['forecasts']
    assert (status, one['fits'], one['back_end']) == (0, True, 'tpu')
    count = 384 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128
    memory = one['memory']
    assert (memory['parameters'], memory['batch']) == (count * 4 // 4, 16 // 4 * 128 * 3 * 4)
    assert memory['arguments'] < memory['peak'] < 2**30 < memory['limit']
    # The model multiplies 6 times per parameter and token, and the scores of attention in addition.
    assert one['model_flops'] > 6 * count * 16 * 128 / 4
    assert one['time']['low'] < one['time']['seconds'] < one['time']['high']
    program = (tmp_path / 'made/v5e-2x2.hlo.txt').read_text()
    assert 'is_scheduled=true' in program and 'all-gather' in program
    assert (tmp_path / 'made/forecast.html').read_text().count('v5e:2x2')
