"""`meshwright forecast` and `fits`: their output, files, exit status, and errors."""

import dataclasses
import json
import shutil
import subprocess
import time
from pathlib import Path

import gin
import pytest
from contract import check_answers
from forecasts_by_hand import GIB, make_forecast

from train.cli import forecasting as command
from train.planning import machines
from train.planning.forecasts import Subject

pytestmark = pytest.mark.core

NOT_INSTALLED = (
    ', or add --on_cpu to compile for virtual CPU devices, or --no_compile for figures by formula'
)


@pytest.fixture
def forecast(meshwright, monkeypatch, tmp_path):
    """Returns a function that forecasts in an empty folder: status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('XLA_FLAGS', raising=False)  # other compilers do not know conftest's flags
    return lambda *arguments, command='forecast': meshwright(command, *arguments)


def test_a_run_is_forecast_on_two_machines_without_its_data(forecast, tmp_path):
    """The parameters of 8B are float32, and the batch has 3 arrays of 4 bytes; counted by hand."""
    arguments = ('pretrain', 'configs/models/8b.gin', '--gin.BATCH_SIZE=512', '--no_compile')
    machines = ('--topology=v5p:4x4x4', '--topology=2xv5e-256')
    status, out, err = forecast(*arguments, *machines, '--json', f'--out={tmp_path}/made')
    held = json.loads(out)
    check_answers(held)
    first, second = (answer['details'] for answer in held['answers'])
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
        (['pretrain', '--topology=0xv5e:4x4'], ["'0xv5e:4x4' has 0 slices", "'v5e:4x4'"]),
        (['pretrain', '--topology=v5e'], ["'v5e'", '2 dimensions', 'v5e:4x4']),
        (['pretrain', '--topology=2xv5e:4x4', '--on_cpu'], ['one slice', "'v5e:4x4'", '--on_cpu']),
        (['pretrain', '--topology=v5e:4x4', '--search'], ['--search', 'remove --no_compile']),
        (['pretrain', '--topology=v5e:4x4', '--out=file'], ['--out=file cannot be created']),
        (['pretrain', '--topology=v5e:4x4', '--out=file/x'], ['--out=file/x cannot be created']),
    ],
)
def test_errors_are_one_line(forecast, tmp_path, arguments, words):
    (tmp_path / 'no_model.gin').write_text('X = 1\n')
    (tmp_path / 'file').touch()
    status, out, err = forecast(*arguments, '--no_compile')
    assert (status, out) == (2, '')
    assert err.startswith('error: ') and err.count('\n') == 1
    assert not [word for word in words if word not in err]


@pytest.mark.parametrize(
    ('command', 'arguments', 'hint'),
    [
        ('forecast', ['pretrain'], NOT_INSTALLED),
        ('forecast', ['pretrain', '--search'], ''),
        ('fits', ['config.json'], ''),
    ],
)
def test_a_compiler_that_is_not_installed(forecast, monkeypatch, command, arguments, hint):
    def refuse(*args, **kwargs):
        raise RuntimeError("describing TPUs needs libtpu: pip install 'meshwright[aot]'")

    monkeypatch.setattr(machines, 'describe_topology', refuse)
    Path('config.json').write_text(json.dumps(SMALL))
    status, out, err = forecast(*arguments, '--topology=v5e:4x4', command=command)
    assert (status, out) == (2, '')
    message = f"error: v5e:4x4: describing TPUs needs libtpu: pip install 'meshwright[aot]'{hint}"
    assert err.splitlines()[-1] == message


def test_virtual_devices_stand_for_a_machine_whose_compiler_is_not_installed(forecast, monkeypatch):
    monkeypatch.setattr(machines, 'describe_topology', None)
    arguments = ('pretrain', 'configs/models/tiny.gin', '--topology=v5e:4x4', '--gin.BATCH_SIZE=16')
    sizes = ('--gin.SEQUENCE_LENGTH=8', '--gin.TransformerConfig.num_layers=1')
    status, out, _ = forecast(*arguments, *sizes, '--on_cpu', '--json')
    [one] = [answer['details'] for answer in json.loads(out)['answers']]
    assert (status, one['back_end'], one['chip'], one['num_devices']) == (0, 'cpu', 'v5e', 16)
    assert one['memory']['limit'] and any('virtual CPU devices' in note for note in one['notes'])
    # Embedding, norms, attention and MLP of one layer; the norms' 3 x 128 scales are divided too.
    count = 384 * 128 + 3 * 128 + 4 * 128 * 128 + 3 * 128 * 256
    assert one['memory']['parameters'] == 4 * count // 16


SMALL = {
    'model_type': 'qwen2',
    'vocab_size': 1024,
    'hidden_size': 256,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'intermediate_size': 512,
}


@pytest.mark.long
def test_what_would_make_a_run_fit(forecast):
    """Data parallel, each device holds 8 B parameters with two moments: 96 GB, of 16.9 GB."""
    status, out, _ = forecast(
        *('pretrain', 'configs/models/8b.gin', 'configs/partitioning/data_parallel.gin'),
        *('--gin.BATCH_SIZE=64', '--topology=v5e:8x8', '--no_compile', '--json'),
    )
    [one] = [answer['details'] for answer in json.loads(out)['answers']]
    assert status == 1 and one['fits'] is False
    assert one['memory']['peak'] > 12 * 8_030_261_248 > one['memory']['limit']
    fitting = [change['setting'] for change in one['changes'] if change['fits']]
    assert "include 'configs/partitioning/fsdp.gin'" in fitting
    assert {change['peak_from'] for change in one['changes']} == {'jaxpr'}


@pytest.mark.long
def test_the_machines_that_a_model_fits_into(forecast, tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(SMALL))
    flags = ('--topology=v5e:2x2', '--batch_tokens=8K', '--sequence_length=128', '--json')
    status, out, _ = forecast(str(tmp_path), *flags, f'--out={tmp_path}/run.gin', command='fits')
    held = json.loads(out)
    check_answers(held)
    made, [row] = held['details'], held['answers']
    assert (status, made['batch_tokens'], made['model']) == (0, 8192, 'qwen2')
    assert row['fits'] and row['details']['layout'] == 'fsdp, remat none'
    assert (row['machine'], row['compiler']) == ('v5e:2x2', 'by formula')
    assert row['time']['low'] < row['time']['seconds'] < row['time']['high']
    speed = row['details']['tokens_per_second']
    assert speed == pytest.approx(8192 / row['time']['seconds'])
    assert made['smallest']['v5e']['machine'] == 'v5e:1x1'
    assert (tmp_path / 'run.gin').read_text() == made['gin']
    arguments = (f'{tmp_path}/run.gin', '--topology=v5e:2x2', '--no_compile', '--json')
    gin.clear_config()
    [again] = json.loads(forecast(*arguments)[1])['answers']
    # Biases are replicated; everything else is divided over the 4 devices.
    assert again['details']['memory']['parameters'] == pytest.approx(
        made['num_parameters'], rel=0.01
    )


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['no.json', '--topology=v5e:4x4'], ['no.json cannot be read']),
        (['.', '--topology=v5q:4x4'], ["unknown topology 'v5q:4x4'"]),
        (['.', '--topology=v5e:4x4', '--batch_tokens=-4M'], ["'-4M'", '512K']),
        (['.'], ['required: --topology']),
        (['unknown.json', '--topology=v5e:4x4'], ["'rwkv'", 'llama', 'The known ones are']),
    ],
)
def test_errors_of_fits_are_one_line(forecast, tmp_path, arguments, words):
    (tmp_path / 'config.json').write_text(json.dumps(SMALL))
    (tmp_path / 'unknown.json').write_text('{"model_type": "rwkv"}')
    status, out, err = forecast(*arguments, command='fits')
    assert (status, out) == (2, '')
    assert err.startswith('error: ') and err.count('\n') == 1
    assert not [word for word in words if word not in err]


@pytest.mark.parametrize('price', ['0', '-1.5', 'nan', 'inf'])
def test_a_price_is_above_0(forecast, price):
    status, out, err = forecast('pretrain', '--topology=v5e:4x4', f'--price={price}')
    assert (status, out) == (2, '')
    assert err.startswith('error: --price=') and 'above 0' in err and err.count('\n') == 1


# --golden: what it writes, what it compares, and its exit status.


@pytest.fixture
def run(meshwright, monkeypatch, tmp_path):
    """Returns a function (peak, flags) -> exit status and errors, without compiling."""
    monkeypatch.chdir(tmp_path)
    for name in ('CI', 'MESHWRIGHT_UPDATE_FORECASTS', 'XLA_FLAGS'):
        monkeypatch.delenv(name, raising=False)

    def start(peak, *flags):
        memory = dataclasses.replace(make_forecast().memory, peak=peak)
        made = make_forecast(memory=memory)
        about = Subject(
            run=('pretrain',),
            settings=(),
            batch_size=1,
            sequence_length=None,
            num_parameters=1,
            commit=None,
            modified=False,
        )
        monkeypatch.setattr(command, '_forecast_all', lambda *given: ([made], {}, about))
        arguments = ['forecast', 'pretrain', 'configs/models/8b.gin', '--topology=v5p:4x4x4']
        status, _, error = meshwright(*arguments, *flags)
        return status, error

    return start


def test_a_change_ends_with_one_until_it_is_agreed_to(run, tmp_path):
    file = tmp_path / 'golden/pretrain-8b.v5p-4x4x4.json'
    assert run(7 * GIB, '--golden=golden') == (0, f'wrote {file.relative_to(tmp_path)}\n')
    assert run(7 * GIB, '--golden=golden') == (0, '')
    status, error = run(8 * GIB, '--golden=golden')
    assert status == 1
    assert 'peak memory of a device: 7.00 GiB -> 8.00 GiB (+14%)' in error
    assert run(8 * GIB, '--golden=golden', '--update')[0] == 0
    assert run(8 * GIB, '--golden=golden') == (0, '')


def test_a_step_that_does_not_fit_ends_with_one(run):
    assert run(100 * GIB, '--golden=golden')[0] == 1


def test_a_missing_file_ends_with_one_in_continuous_integration(run, monkeypatch, tmp_path):
    monkeypatch.setenv('CI', '1')
    status, error = run(7 * GIB, '--golden=golden')
    assert status == 1 and 'there is no golden file' in error
    assert not (tmp_path / 'golden').exists()


def test_an_update_needs_a_folder(run):
    status, error = run(7 * GIB, '--update')
    assert status == 2 and '--golden=DIR' in error and error.count('\n') == 1


def test_a_search_is_not_compared_with_golden_forecasts(run):
    status, error = run(7 * GIB, '--golden=golden', '--search')
    assert status == 2 and '--golden' in error and '--search' in error and error.count('\n') == 1


def test_a_forecast_says_what_it_is_of(forecast, tmp_path):
    git = ['git', '-C', str(tmp_path), '-c', 'user.name=a', '-c', 'user.email=a@b']
    if shutil.which('git') is None:
        pytest.skip('git is not installed')
    for arguments in (['init', '-q'], ['commit', '-q', '--allow-empty', '-m', 'first']):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, 'rev-parse', 'HEAD'], capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    flags = ['--topology=v5e:2x2', '--on_cpu', '--no_compile', '--gin.BATCH_SIZE=8']
    run = ['quickstart', '--gin.SEQUENCE_LENGTH=64']
    status, out, err = forecast(*run, *flags, f'--out={tmp_path}/my out')
    assert status == 0, err
    assert out.splitlines()[:3] == [
        'run         quickstart',
        'settings    --gin.SEQUENCE_LENGTH=64 --gin.BATCH_SIZE=8',
        'batch       8 rows of 64 tokens, 512 tokens in all',
    ]
    assert f'commit      {commit[:12]}\n' in out
    assert f'wrote {tmp_path}/my out/forecast.json, {tmp_path}/my out/forecast.html' in err
    held = json.loads((tmp_path / 'my out/forecast.json').read_text())['details']['subject']
    # The embedding, which is also the output layer, the norms, and two layers of the model.
    layer = 4 * 128 * 128 + 3 * 128 * 256 + 2 * 128
    assert held['num_parameters'] == 384 * 128 + 128 + 2 * layer
    assert (held['batch_size'], held['sequence_length']) == (8, 64)
    assert (held['commit'], held['modified']) == (commit, False)
    assert f'commit: {commit[:12]}' in (tmp_path / 'my out/forecast.html').read_text()


def test_long_work_tells_a_file_what_it_does(monkeypatch, capfd):
    monkeypatch.setattr(command, '_SECONDS_BETWEEN_LINES', 0.01)
    with command.show_progress('v5p:4x4x4') as progress:
        progress('compiling')
        told, ends = '', time.monotonic() + 60.0
        while 'v5p:4x4x4: compiling, ' not in told and time.monotonic() < ends:
            told += capfd.readouterr().err
    assert 'v5p:4x4x4: compiling, ' in told
