"""The compiled train step as files."""

import json

import pytest
from small import partitioner, small_config

from partitioning import Plan
from train.data import RandomTokens
from train.errors import ConfigError
from train.planning.precompiling import compile_step, precompile


def test_the_files_describe_the_step_that_a_run_compiles(finished, texts, tmp_path, capsys):
    """The arguments are the state and the batch: int32 tokens and targets, float32 weights."""
    config = small_config(tmp_path / 'one', texts, partitioner=partitioner(4, 2))
    memory = precompile(config)
    folder = tmp_path / 'one'
    assert {p.name for p in folder.iterdir()} == {
        'train_step.stablehlo.txt',
        'train_step.hlo.txt',
        'memory.json',
        'costs.json',
        'precompile-plan.json',
    }, 'no checkpoint, no metrics'
    assert memory == json.loads((folder / 'memory.json').read_text())
    assert memory['mesh'] == {'data': 4, 'model': 2} and len(memory['devices']) == 8
    plan = Plan.load(finished.directory / 'plan.json')
    assert Plan.load(folder / 'precompile-plan.json') == plan
    rows = 8 // 4 * 16
    assert memory['bytes_per_device']['arguments'] == plan.bytes_per_device + rows * 3 * 4
    assert 'stablehlo' in (folder / 'train_step.stablehlo.txt').read_text()
    assert 'all-reduce' in (folder / 'train_step.hlo.txt').read_text()
    costs = json.loads((folder / 'costs.json').read_text())
    assert costs['memory']['arguments'] == memory['bytes_per_device']['arguments']
    assert {'all-reduce'} <= {c['kind'] for c in costs['collectives'] if 'data' in c['axes']}
    said = capsys.readouterr().out
    assert 'all-reduce over data (ICI)' in said and 'at its fullest' in said


def test_a_run_without_data(tmp_path):
    """The step needs no files, and its program no device of its mesh."""
    config = small_config(tmp_path / 'run', tmp_path, task=RandomTokens(vocab_size=256))
    assert compile_step(config).costs.at_peak.arrays
    assert not (tmp_path / 'run').exists()
    rows = config.task.open(16).training(seed=0)
    assert {name: (x.shape, x.dtype) for name, x in rows[7].items()} == {
        'decoder_input_tokens': ((16,), 'int32'),
        'decoder_target_tokens': ((16,), 'int32'),
        'decoder_loss_weights': ((16,), 'float32'),
    }
    assert [(rows[7][x] == rows[7][x]).all() and rows[7][x].max() < 256 for x in rows[7]]
    assert (rows[7]['decoder_target_tokens'] != rows[8]['decoder_target_tokens']).any()
    with pytest.raises(ConfigError, match=r'RandomTokens\.vocab_size is 0'):
        RandomTokens(vocab_size=0)
