"""With which compiler options a run is compiled, and what it says about them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from small import partitioner, small_config

from partitioning import Plan
from partitioning.hardware import CompilerOption
from train import train
from train.cli import main
from train.data import RandomTokens
from train.errors import ConfigError
from train.machine import devices as machine
from train.machine.compiling import choose_options
from train.planning.precompiling import compile_step, precompile
from train.running.programs import UnexpectedLayout
from train.running.run import prepare, report_run
from train.running.start import write_run_files

OFF = 'xla_jf_spmd_threshold_for_windowed_einsum_mib'


class Mesh:
    """The devices of a mesh of two v5e chips."""

    devices = np.array([type('Device', (), {'device_kind': 'TPU v5 lite'})()] * 2)


def test_a_setting_changes_the_options_of_the_chips_and_an_empty_dict_removes_them():
    def names(setting):
        return {option.name for option in choose_options(setting, Mesh)}

    default = names('auto')
    assert OFF in default
    assert names({'xla_mine': 1}) == {*default, 'xla_mine'}
    assert names({OFF: None}) == default - {OFF}
    assert names({}) == set()
    abstract = AbstractMesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    assert choose_options('auto', abstract) == ()
    with pytest.raises(ConfigError, match=f'TrainConfig.compiler_options: .*xla_other.*{OFF}'):
        choose_options({'xla_other': None}, Mesh)


def test_malformed_options_are_refused_when_the_settings_are_made(texts, tmp_path):
    for setting, words in (
        ('fast', "'fast'.*'auto'"),
        (['xla_x'], 'xla_x.*a dict'),
        ({'xla_x': (1, 2)}, 'xla_x.*a number or a text'),
    ):
        with pytest.raises(ConfigError, match=f'TrainConfig.compiler_options.*{words}'):
            small_config(tmp_path, texts, compiler_options=setting)


def test_a_run_says_and_records_its_options_and_those_of_the_environment(
    texts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv('LIBTPU_INIT_ARGS', '--xla_tpu_x=1')
    options = {'xla_cpu_enable_fast_math': False}
    run = prepare(small_config(tmp_path / 'run', texts, compiler_options=options))
    report_run(run)
    write_run_files(run)
    [option] = Plan.load(tmp_path / 'run/plan.json').compiler_options
    assert (option.name, option.value) == ('xla_cpu_enable_fast_math', False)
    for text in (capsys.readouterr().out, (tmp_path / 'run/model-info.txt').read_text()):
        assert 'xla_cpu_enable_fast_math=False' in text
        assert 'LIBTPU_INIT_ARGS=--xla_tpu_x=1' in text


def test_an_unknown_option_is_one_line_that_names_it(texts, tmp_path):
    config = small_config(tmp_path / 'run', texts, compiler_options={'xla_fast': True})
    with pytest.raises(ValueError, match=r"^train_step: .*cpu devices.*'xla_fast'") as error:
        precompile(config)
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'run').exists()


# The compiled train step as files.


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


# `--expect_plan`: a run that would be laid out differently ends before it starts.


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
