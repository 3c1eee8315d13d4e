"""With which compiler options a run is compiled, and what it says about them."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from small import partitioner, small_config

from partitioning import Plan
from train.data import RandomTokens
from train.errors import ConfigError
from train.machine.compiling import choose_options
from train.planning.precompiling import compile_step, precompile
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
