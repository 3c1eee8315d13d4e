"""`meshwright forecast` of runs on described TPUs, and `--search` with a made-up compiler."""

import json
import sys

import gin
import pytest
from described_machines import needs_libtpu

from train.cli import main, searching
from train.machine import devices as machine
from train.planning import search_runs
from train.planning.presets import Layout
from train.planning.searching import Outcome
from train.planning.space import Choices

ARGUMENTS = [
    'forecast',
    'pretrain',
    'configs/models/tiny.gin',
    '--gin.BATCH_SIZE=16',
    '--gin.SEQUENCE_LENGTH=256',
    '--search',
]


@pytest.fixture(autouse=True)
def _own_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.setattr(sys, 'path', [*sys.path])
    # jax has its devices already.
    monkeypatch.setattr(machine, 'use_virtual_devices', lambda count: None)
    yield
    gin.clear_config()


@pytest.mark.long
@needs_libtpu
def test_a_search_prints_its_winner_and_writes_it(capsys, monkeypatch, tmp_path):
    """A batch of 16 on 4 devices has no 8 microbatches; the candidate that is left is compiled."""
    outcome = Outcome(
        fits=True, peak=2**30, seconds=500.0, low=400.0, high=600.0, compile_seconds=3
    )
    layouts = [Layout('fsdp')]
    choices = Choices(
        layouts=layouts, num_microbatches=(1, 8), remats=('full',), output_chunks=(None,)
    )
    monkeypatch.setattr(search_runs, 'choices_for', lambda chip: choices)
    monkeypatch.setattr(searching, 'compile_in_new_process', lambda *args: lambda one: outcome)
    out = tmp_path / 'out'
    assert main([*ARGUMENTS, '--topology=v5e:2x2', f'--out={out}']) == 0
    printed, progress = capsys.readouterr()
    assert 'fsdp, remat full' in printed and '500.000 s' in printed and '1.00 GiB' in printed
    assert 'at most 0.0% slower than the best' in printed
    assert f'winner: {out}/best.gin' in printed
    assert 'compiling 1 of at most 8: fsdp, remat full' in progress
    assert "TransformerConfig.remat = 'full'" in (out / 'best.gin').read_text()
    written = {file.name for file in out.iterdir()}
    assert written == {'best.gin', 'search.json', 'search.png', 'remembered.json'}

    assert main([*ARGUMENTS, '--topology=v5e:2x2', f'--out={out}', '--json']) == 0
    assert json.loads(capsys.readouterr().out)['num_compiled'] == 1


@pytest.mark.parametrize(
    ('flags', 'words'),
    [
        (['--topology=v5e:2x2', '--topology=v5e:4x4'], 'given 2 topologies: search on one'),
        (['--topology=v5e:2x2', '--no_compile'], 'remove --no_compile'),
        (['--topology=v5e:2x2', '--best=0'], '--best is 0: it must be an integer >= 1'),
        (['--topology=v9:2x2'], "unknown topology 'v9:2x2'"),
    ],
)
def test_a_search_that_cannot_be_made(capsys, flags, words):
    assert main([*ARGUMENTS, *flags]) == 2
    printed, error = capsys.readouterr()
    assert (printed, error.count('\n')) == ('', 1)
    assert error.startswith('error: ') and words in error


@pytest.mark.long
@needs_libtpu
def test_a_step_is_compiled_for_a_tpu(capsys, tmp_path):
    """Two layers, tied embeddings, everything divided over 4 devices; counted by hand."""
    run = ['pretrain', 'configs/models/tiny.gin', '--gin.BATCH_SIZE=16']
    flags = ['--gin.SEQUENCE_LENGTH=128', '--topology=v5e:2x2', '--json', f'--out={tmp_path}/made']
    status = main(['forecast', *run, *flags])
    out = capsys.readouterr().out
    [one] = [answer['details'] for answer in json.loads(out)['answers']]
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
