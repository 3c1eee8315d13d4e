"""The compiled train step as files."""

import json

from small import partitioner, small_config

from partitioning import Plan
from train.precompiling import precompile


def test_the_files_describe_the_step_that_a_run_compiles(finished, texts, tmp_path):
    """The arguments are the state and the batch: int32 tokens and targets, float32 weights."""
    config = small_config(tmp_path / 'one', texts, partitioner=partitioner(4, 2))
    memory = precompile(config)
    folder = tmp_path / 'one'
    assert {p.name for p in folder.iterdir()} == {
        'train_step.stablehlo.txt',
        'train_step.hlo.txt',
        'memory.json',
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
