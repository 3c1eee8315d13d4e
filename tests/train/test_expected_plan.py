"""`--expect_plan`: a run that would be laid out differently ends before it starts."""

import dataclasses

import pytest
from small import partitioner, small_config

from partitioning import Plan
from partitioning.hardware import CompilerOption
from train import train
from train.cli import main
from train.errors import ConfigError
from train.machine import devices as machine
from train.running.checks import UnexpectedLayout


def test_a_run_with_another_layout_is_refused_before_it_compiles(finished, texts, tmp_path):
    """The embedding of 264 x 16 is sharded over model and data: 2 and 4, then 4 and 2."""
    config = small_config(tmp_path / 'run', texts, partitioner=partitioner(2, 4))
    with pytest.raises(UnexpectedLayout, match=r'arrays, \d+ differ; nothing') as error:
        train(config, expect_plan=finished.directory)
    assert error.value.details.startswith('mesh: data 4 x model 2 -> data 2 x model 4\n')
    assert '~ params/Embed_0/embedding: shard shape 132 x 4 -> 66 x 8\n' in error.value.details
    assert not (tmp_path / 'run').exists() and 'train' not in config.objective.traces


def test_a_run_with_the_same_layout_is_trained(finished, texts, tmp_path):
    """Other options of the compiler are not another layout."""
    plan, expected = Plan.load(finished.directory / 'plan.json'), tmp_path / 'plan.json'
    option = CompilerOption(name='xla_tpu_scoped_vmem_limit_kib', value=1, reason='of a TPU')
    dataclasses.replace(plan, compiler_options=(option,)).save(expected)
    config = small_config(tmp_path / 'run', texts)
    assert int(train(config, expect_plan=expected).step) == 6


def test_arrays_that_the_plan_lacks_are_another_layout(finished, texts, tmp_path):
    plan, expected = Plan.load(finished.directory / 'plan.json'), tmp_path / 'plan.json'
    only_first = dataclasses.replace(plan, rows=plan.rows[:1])
    only_first.save(expected)
    config = small_config(tmp_path / 'run', texts)
    with pytest.raises(UnexpectedLayout, match=f'{len(plan.rows) - 1} are new') as error:
        train(config, expect_plan=expected)
    new = [line for line in error.value.details.splitlines() if line.startswith('+ ')]
    assert len(new) == len(plan.rows) - 1


def test_a_plan_that_does_not_exist(texts, tmp_path):
    with pytest.raises(ConfigError, match=r'no such file; write the plan\.json of a run'):
        train(small_config(tmp_path / 'run', texts), expect_plan=tmp_path / 'plan.json')
    (tmp_path / 'plan.json').write_text('{}')
    with pytest.raises(ValueError, match=r'plan\.json: '):
        train(small_config(tmp_path / 'run', texts), expect_plan=tmp_path / 'plan.json')
    assert not (tmp_path / 'run').exists()


def test_the_command_prints_one_line_and_the_differences(tmp_path, monkeypatch, capsys, finished):
    monkeypatch.setattr(machine, 'use_virtual_devices', lambda count: None)
    settings = {
        'MODEL_DIR': repr(str(tmp_path / 'run')),
        'TEXT': 'None',
        'TrainConfig.task': '@RandomTokens()',
        'RandomTokens.vocab_size': '%VOCAB_SIZE',
        'TrainConfig.evaluators': '{}',
    }
    given = [f'--gin.{name}={value}' for name, value in settings.items()]
    run = ['train', 'pretrain', 'configs/models/tiny.gin', *given]
    assert main([*run, f'--expect_plan={finished.directory}']) == 2
    line, *lines = capsys.readouterr().err.splitlines()
    assert line.startswith('error: the layout is not the one of --expect_plan')
    assert lines[0] == 'mesh: data 4 x model 2 -> data 8 x model 1'
    assert lines[-1].startswith('bytes per device: ')
    assert not (tmp_path / 'run').exists()
