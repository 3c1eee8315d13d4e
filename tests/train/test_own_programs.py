"""Measured rows forecast from their own programs: the commands of MaxText, and the campaign.

Nothing is compiled here. The commands are held against what the recipes of the rows say.
"""

import copy
import json
import sys
from pathlib import Path

import pytest

from benchmarks.measured_steps import own_programs
from benchmarks.measured_steps.maxtext import Command, command_of
from benchmarks.measured_steps.own_cases import (
    OwnForecast,
    model_flops_of,
    naive_forecast,
    print_own,
    score_own,
)
from benchmarks.measured_steps.own_programs import Programs, read_found, run_campaign
from benchmarks.measured_steps.own_records import with_slices
from benchmarks.measured_steps.rows import MeasuredRow, load_rows
from meshwright.time.step_model import StepTime

ROWS = {row.name: row for row in load_rows()}
# What the file of settings of MaxText has, as far as these tests need it.
BASE = """
run_name: ""
model_name: "default"
override_model_config: false
base_emb_dim: 2048
num_experts: 1
decoder_block: "llama2"
mlp_activations: ["silu", "linear"]
per_device_batch_size: 12.0
max_target_length: 2048
ici_fsdp_parallelism: -1
ici_tensor_parallelism: 1
dcn_data_parallelism: -1
remat_policy: 'full'
query_proj: 'remat'
decoder_layer_input: 'device'
quantization: ""
shard_exp_on_fsdp: false
attention: 'autoselected'
sa_block_q: 512
hardware: 'tpu'
num_slices: -1
"""


@pytest.fixture
def package(tmp_path):
    """A folder with the settings of MaxText."""
    (tmp_path / 'maxtext' / 'configs').mkdir(parents=True)
    (tmp_path / 'maxtext' / 'configs' / 'base.yml').write_text(BASE)
    return tmp_path / 'maxtext'


def settings_of(row, package):
    command = command_of(row, package)
    assert isinstance(command, Command)
    module, name, base, *written = command.arguments
    assert (module, name) == ('-m', 'maxtext.trainers.pre_train.train')
    assert base == str(package / 'configs' / 'base.yml')
    return command, dict(pair.split('=', 1) for pair in written)


def test_the_command_of_a_recipe(package):
    """The 8B recipe for 8 chips of v6e, as its README and the settings of its commit have it."""
    command, settings = settings_of(ROWS['v6e-8-llama3.1-8b'], package)
    assert command.topology == 'v6e:2x4' and command.variable == 'LIBTPU_INIT_ARGS'
    assert command.flags['xla_tpu_scoped_vmem_limit_kib'] == '98304'
    assert not any('chip_config_name' in flag for flag in command.flags)
    expected = {
        'model_name': 'llama2-7b',
        'override_model_config': 'true',
        'base_emb_dim': '4096',
        'per_device_batch_size': '3',
        'max_target_length': '8192',
        'ici_fsdp_parallelism': '8',
        'dcn_data_parallelism': '1',
        'remat_policy': 'custom',
        'query_proj': 'offload',
        'decoder_layer_input': 'offload',
        'attention': 'flash',
        'sa_block_q': '2048',
    }
    assert {name: settings[name] for name in expected} == expected
    assert 'hardware' not in settings


@pytest.mark.parametrize(
    ('name', 'topology', 'expected'),
    [
        (
            'v5e-512-maxtext-128b',
            '2xv5e:16x16',
            {
                'decoder_block': 'default',
                'mlp_activations': '[relu]',
                'ici_tensor_parallelism': '16',
                'dcn_data_parallelism': '2',
            },
        ),
        (
            'tpu7x-256-deepseek-v3-4k-fp8',
            'tpu7x:4x8x8',
            {
                'model_name': 'deepseek3-671b',
                'quantization': 'fp8_full',
                'num_experts': '256',
                'shard_exp_on_fsdp': 'true',
            },
        ),
        (
            'h100-16-llama2-7b-maxtext',
            'h100:2x8',
            {
                'hardware': 'gpu',
                'num_slices': '2',
                'attention': 'cudnn_flash_jax',
                'remat_policy': 'minimal_with_context',
            },
        ),
    ],
)
def test_each_kind_of_row_has_its_settings(package, name, topology, expected):
    command, settings = settings_of(ROWS[name], package)
    assert command.topology == topology
    assert {name: settings[name] for name in expected} == expected


def test_every_row_of_maxtext_has_a_command(package):
    rows = [row for row in load_rows() if row['framework'] == 'MaxText']
    assert len(rows) == 89
    assert all(isinstance(command_of(row, package), Command) for row in rows)
    others = {row['framework'].split()[0]: row for row in load_rows()}
    assert 'torchtitan' in command_of(others['torchtitan'], package)


def test_what_is_not_known_has_a_reason(package):
    entry = copy.deepcopy(ROWS['v6e-8-llama3.1-8b'].settings)
    entry['model']['decoder_block'] = 'spiral'
    assert "'spiral'" in command_of(MeasuredRow(entry), package)
    entry = copy.deepcopy(ROWS['v6e-8-llama3.1-8b'].settings)
    entry['other_settings']['of_the_future'] = 3
    assert "no setting 'of_the_future'" in ' '.join(command_of(MeasuredRow(entry), package).notes)


def test_programs_run_once_and_failures_are_told(package, tmp_path, monkeypatch, capsys):
    """Equal commands are one program; a program that failed runs again if asked."""
    monkeypatch.setattr(own_programs, 'STORE', tmp_path / 'store')
    monkeypatch.setattr(own_programs, '_accepted', lambda command, programs: iter(()))
    started = []

    def run(full, *, stdout, **_):
        started.append(full)
        topology, target, early = full[full.index('--') - 3 : full.index('--')]
        assert (topology, early) == ('v6e:2x4', 'early')
        if len(started) == 1:
            stdout.write('recording: KeyError: nothing\n')
            return
        Path(f'{target}.json').write_text('{"fits": true}')
        stdout.write('recording: stored\n')

    monkeypatch.setattr(own_programs.subprocess, 'run', run)
    first = ROWS['v6e-8-llama3.1-8b']
    entry = copy.deepcopy(first.settings) | {'id': 'another', 'command': ['train.py', 3]}
    same = copy.deepcopy(first.settings) | {'id': 'same'}
    rows = [first, MeasuredRow(same), MeasuredRow(entry)]
    programs = Programs(package.parent)
    run_campaign(rows[:1], programs)
    assert read_found(first) == 'KeyError: nothing' and read_found(rows[1]) == 'it was not run'
    run_campaign(rows[:1], programs)
    assert len(started) == 1
    run_campaign(rows, programs, again=True)
    assert len(started) == 3 and started[-1][-2:] == ['train.py', '3']
    assert started[0][0] == sys.executable
    assert read_found(rows[1]) == {'fits': True, 'stored_as': first.name}
    run_campaign(rows, programs, again=True)
    assert len(started) == 3
    assert json.loads((tmp_path / 'store' / 'same.json').read_text()) == {'same_as': first.name}


def test_flags_that_newer_compilers_refuse_are_turned_off(package, tmp_path, monkeypatch):
    monkeypatch.setattr(own_programs, 'STORE', tmp_path)
    monkeypatch.setattr(
        own_programs, '_accepted', lambda *_: iter(['--xla_other=3', '--xla_tpu_fuse=true'])
    )
    given = []

    def run(full, *, stdout, env, **_):
        given.append(env['LIBTPU_INIT_ARGS'])
        if '--xla_tpu_fuse=true' in env['LIBTPU_INIT_ARGS']:
            stdout.write('recording: JaxRuntimeError: Please disable it with xla_tpu_fuse.\n')
        else:
            stdout.write('recording: stored\n')

    monkeypatch.setattr(own_programs.subprocess, 'run', run)
    run_campaign([ROWS['v6e-8-llama3.1-8b']], Programs(package.parent))
    assert given == ['--xla_other=3 --xla_tpu_fuse=true', '--xla_other=3 --xla_tpu_fuse=false']


def forecast_of(name, ratio, peak=2**30):
    """A forecast of a row, whose range is 7% to both sides."""
    row = ROWS[name]
    seconds = ratio * row.step_seconds
    time = StepTime(
        seconds=seconds, low=seconds / 1.07, high=seconds * 1.07, parts=(), constants=()
    )
    found = {
        'memory': {'peak': peak},
        'memory_limit': 2 * 2**30,
        'fits': peak <= 2 * 2**30,
        'parameters': row.params_total,
        'seconds': {'all': 20.0},
    }
    return OwnForecast(row=row, found=found, compiled=None, traced=time, naive=row.step_seconds / 2)


def test_scores_of_forecasts():
    """Errors of +10% and -5%: the mean is 7.5%, the bias +2.5%, and one of two is in its range."""
    forecasts = [forecast_of('v6e-8-llama3.1-8b', 1.1), forecast_of('v6e-8-mistral-7b', 0.95)]
    found = score_own(forecasts, 'jaxpr')
    assert found['rows'] == 2 and score_own(forecasts, 'compiler') is None
    expected = {'mean': 0.075, 'median': 0.075, 'worst': 0.1, 'bias': 0.025, 'naive': 0.5}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found['within'] == 0.5 and found['rank'] is None


def test_the_naive_forecast_has_the_median_mfu_of_other_rows():
    """Of three rows, the two others have 40% and 50% of the peak; the middle is 45%."""
    names = ('v6e-8-llama3.1-8b', 'v6e-8-mistral-7b', 'v6e-16-llama3.1-8b')
    rows = []
    for name, mfu in zip(names, (0.1, 0.4, 0.5), strict=True):
        entry = copy.deepcopy(ROWS[name].settings)
        entry['measured']['step_time_s'] = model_flops_of(ROWS[name]) / (918e12 * mfu)
        entry['measured'].pop('step_time_refined_s', None)
        rows.append(MeasuredRow(entry))
    naive = naive_forecast(rows[0], rows)
    assert naive == pytest.approx(model_flops_of(rows[0]) / (918e12 * 0.45))


def test_the_table_says_what_does_not_fit_and_what_is_missing(capsys):
    forecasts = [
        forecast_of('v6e-8-llama3.1-8b', 1.1),
        forecast_of('v6e-8-mistral-7b', 0.95, peak=3 * 2**30),
    ]
    print_own(forecasts, {'another': 'its program is of NeMo'})
    out = capsys.readouterr().out
    assert out.startswith('2 rows are forecast from their own programs, 1 are not.\n')
    assert '3.00 GiB of 2.00 GiB, by the compiler' in out.partition('do not fit')[2]
    assert 'its program is of NeMo' in out.partition('without a forecast')[2]
    [line] = [line for line in out.splitlines() if line.startswith('v6e-8-mistral-7b')]
    assert '-5.0%' in line and line.split()[-2:] == ['no', '20']


def test_programs_stand_for_rows_with_other_numbers_of_slices():
    """A ring over 4 slices sends 3/4 of an array in 3 phases, and over 2 slices 1/2 in one."""
    record = {
        'exchanges': [
            {'name': 'inside', 'slow': False, 'seconds': 1.0, 'phases': 0},
            {'name': 'between', 'slow': True, 'seconds': 3.0, 'phases': 30},
        ],
        'num_separate': 4,
        'num_processes': 256,
    }
    two, one = (with_slices(record, 4, slices) for slices in (2, 1))
    assert two['exchanges'] == [
        record['exchanges'][0],
        {'name': 'between', 'slow': True, 'seconds': pytest.approx(2.0), 'phases': 10},
    ]
    assert (two['num_separate'], two['num_processes']) == (2, 128)
    assert one['exchanges'] == record['exchanges'][:1] and one['num_processes'] == 64
