"""`python -m train` as a user runs it: exit codes, what it says, and what it leaves behind."""

import io
import json
import os
import subprocess
import sys

import gin
import pytest
from rich.console import Console

from partitioning import PjitPartitioner
from partitioning.rules import as_tuple
from train.__main__ import rewrite_gin_flags
from train.config import load_config
from train.config.load import REPOSITORY
from train.console import RunConsole
from train.train import train

FILES = ('configs/runs/pretrain.gin', 'configs/models/tiny.gin')
VERY_SMALL = (
    'TransformerConfig.num_layers=1',
    'TransformerConfig.embed_dim=32',
    'TransformerConfig.num_heads=4',
    'TransformerConfig.num_kv_heads=4',
    'TransformerConfig.head_dim=8',
    'TransformerConfig.mlp_dim=64',
    'BATCH_SIZE=8',
    'SEQUENCE_LENGTH=16',
    'TRAIN_STEPS=4',
    'TextFiles.holdout_percent=20',
    'train.sample=@SampleConfig()',
    'SampleConfig.length=24',
)


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    """A folder of text files."""
    folder = tmp_path_factory.mktemp('texts')
    for i in range(40):
        (folder / f'{i}.txt').write_text(f'This is text number {i}, of {i * i} words. ' * 10)
    return folder


def bindings(model_dir, texts, *changes):
    """What goes over the files, later ones over earlier ones."""
    own = (f"MODEL_DIR='{model_dir}'", "TEXT='**/*.txt'", f"TextFiles.root='{texts}'")
    return [*own, *VERY_SMALL, *changes]


def flags(model_dir, texts, *changes, files=FILES):
    return [
        *(f'--gin_file={file}' for file in files),
        *(f'--gin.{binding}' for binding in bindings(model_dir, texts, *changes)),
    ]


def run(*args, cwd=REPOSITORY):
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    environment.pop('XLA_FLAGS', None)
    return subprocess.run(
        [sys.executable, '-m', 'train', *args],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_fails(result, *said):
    """Exit code 2 and one line that says what is wrong."""
    assert 'Traceback' not in result.stderr, result.stderr
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith('error: ')
    for words in said:
        assert words in line


# A run that works.


@pytest.fixture(scope='module')
def finished(tmp_path_factory, texts):
    """A model directory after four steps, and what the run said."""
    model_dir = tmp_path_factory.mktemp('runs') / 'deep' / 'model'
    return model_dir, run(*flags(model_dir, texts))


def records(model_dir):
    return [json.loads(line) for line in (model_dir / 'metrics.jsonl').read_text().splitlines()]


def test_a_run_writes_its_files(finished):
    model_dir, result = finished
    assert result.returncode == 0, result.stderr
    assert {p.name for p in model_dir.iterdir()} == {
        'config.gin',
        'data.json',
        'model-info.txt',
        'plan.json',
        'metrics.jsonl',
        'tensorboard',
        'checkpoints',
    }
    assert [p.name for p in (model_dir / 'checkpoints').iterdir()] == ['4']
    assert list((model_dir / 'tensorboard').iterdir())
    table = (model_dir / 'model-info.txt').read_text()
    assert 'params/embedding' in table
    assert 'data 8' in table


def test_each_metrics_record_is_json_with_a_step(finished):
    model_dir, _ = finished
    written = records(model_dir)
    assert all(isinstance(record['step'], int) for record in written)
    last = {
        key: value for record in written if record['step'] == 4 for key, value in record.items()
    }
    assert last['train/loss'] > 0
    assert last['eval/bits_per_byte'] > 0
    assert last['train/tokens_per_second'] > 0


def test_a_run_says_what_it_did_without_escape_codes(finished):
    model_dir, result = finished
    assert '\x1b' not in result.stdout + result.stderr
    assert '8 devices' in result.stdout
    assert 'step 4/4' in result.stdout
    assert 'bits per byte' in result.stdout
    assert str(model_dir / 'config.gin') in result.stdout
    assert result.stderr == ''


def test_the_written_configuration_is_that_of_the_run(finished, texts):
    model_dir, _ = finished

    def settings():
        values = gin.get_bindings('train.train')
        partitioner = values.pop('partitioner')
        optimizer = values.pop('optimizer')
        rates = [float(optimizer.learning_rate(step)) for step in range(0, 5000, 500)]
        rules = [(name, as_tuple(axes)) for name, axes in partitioner.logical_axis_rules]
        return values, rules, dict(partitioner.mesh.shape), optimizer.clip_norm, rates

    load_config(FILES, bindings(model_dir, texts))
    given = settings()
    gin.clear_config()
    load_config([str(model_dir / 'config.gin')])
    written = settings()
    assert given[0].items() <= written[0].items()
    assert given[1:] == written[1:]


def test_the_same_command_again_resumes_and_more_steps_go_on(finished, texts):
    model_dir, _ = finished
    before = records(model_dir)
    again = run(*flags(model_dir, texts))
    assert again.returncode == 0, again.stderr
    assert 'resumed from step 4' in again.stdout
    assert 'nothing left to train' in again.stdout
    assert records(model_dir) == before

    # The written configuration is enough to go on.
    longer = run(f'--gin_file={model_dir / "config.gin"}', '--gin.TRAIN_STEPS=6')
    assert longer.returncode == 0, longer.stderr
    assert 'resumed from step 4' in longer.stdout
    assert 'step 6/6' in longer.stdout
    after = records(model_dir)
    assert after[: len(before)] == before
    assert {record['step'] for record in after[len(before) :]} == {6}
    assert {p.name for p in (model_dir / 'checkpoints').iterdir()} == {'4', '6'}


# Runs that cannot work.

FAILURES = {
    'a batch that the data axis does not divide': (
        ['BATCH_SIZE=9'],
        ['(9)', '(8)', 'Use 8 or 16'],
    ),
    'an mlp_dim that the model axis does not divide': (
        ['NUM_PARTITIONS=2', 'TransformerConfig.mlp_dim=63'],
        ['params/layers/mlp', "'mlp'", '63', 'model'],
    ),
    'a vocabulary smaller than the bytes': (
        ['VOCAB_SIZE=256'],
        ['vocab_size 256', '257'],
    ),
    'a corpus without files': (
        ["TextFiles.root='/nonexistent'"],
        ['empty corpus', '/nonexistent'],
    ),
}


@pytest.mark.parametrize('failure', FAILURES)
def test_a_failure_before_training(tmp_path, texts, failure):
    changes, said = FAILURES[failure]
    model_dir = tmp_path / 'model'
    assert_fails(run(*flags(model_dir, texts, *changes)), *said)
    assert not model_dir.exists()


def test_a_model_dir_below_a_file(tmp_path, texts):
    file = tmp_path / 'file'
    file.write_text('kept')
    assert_fails(run(*flags(file / 'model', texts)), 'MODEL_DIR', str(file), 'is a file')
    assert file.read_text() == 'kept'


def test_no_gin_file():
    assert_fails(run(), 'no gin file', '--gin_file=')


def test_a_stray_argument(tmp_path, texts):
    assert_fails(run(*flags(tmp_path / 'model', texts), 'stray'), "'stray'", '--help')
    assert not (tmp_path / 'model').exists()


def test_a_wrong_name_in_a_gin_file(tmp_path):
    file = tmp_path / 'run.gin'
    file.write_text('\ntrain.sed = 1\n')
    assert_fails(run(f'--gin_file={file}'), f'{file}:2: ', "Did you mean 'seed'?")


def test_a_configuration_without_a_model(tmp_path, texts):
    model_dir = tmp_path / 'model'
    file = tmp_path / 'run.gin'
    file.write_text(
        "include 'configs/runs/base.gin'\ninclude 'configs/partitioning/fsdp.gin'\n"
        'EVAL_PERIOD = 1\nCHECKPOINT_PERIOD = 1\nTRAIN_STEPS = 1\nBATCH_SIZE = 8\n'
        f"SEQUENCE_LENGTH = 8\nMODEL_DIR = '{model_dir}'\ntrain.task = @CausalLM()\n"
        f"CausalLM.source = @TextFiles()\nTextFiles.pattern = '{texts}/*'\n"
    )
    assert_fails(run(f'--gin_file={file}'), 'model')
    assert not model_dir.exists()


def test_from_another_folder_only_the_error_is_said(tmp_path, texts):
    # The configs are found in the repository; gin complains of every other place it looks in.
    result = run(*flags(tmp_path / 'model', texts, 'BATCH_SIZE=9'), cwd=tmp_path)
    assert_fails(result, '(9)')


@pytest.mark.parametrize(
    ('change', 'name'),
    [
        ('train.eval_tokens=0', 'eval_tokens'),
        ('train.eval_period=-1', 'eval_period'),
        ('SampleConfig.length=-1', 'length'),
        ('SampleConfig.length=1', 'length'),
        ('train.num_microbatches=3', 'microbatches'),
        ('train.log_period=0', 'log_period'),
        ('CheckpointConfig.keep=0', 'keep'),
        ('CheckpointConfig.period=-1', 'period'),
        ('SEQUENCE_LENGTH=0', 'sequence_length'),
        ('TRAIN_STEPS=0.5', 'total_steps'),
    ],
)
def test_a_setting_out_of_range_is_refused(tmp_path, texts, monkeypatch, change, name):
    def compile(*args):
        raise AssertionError(f'{change} is not refused')

    monkeypatch.setattr(PjitPartitioner, 'compile', compile)
    model_dir = tmp_path / 'model'
    load_config(FILES, bindings(model_dir, texts, change))
    with pytest.raises(ValueError, match=name):
        train()
    assert not model_dir.exists()


# Its parts.


def test_gin_flags_are_short_for_bindings():
    assert rewrite_gin_flags(['train', '--gin.A=1', '--gin_file=x', '--gin.a.b="c"']) == [
        'train',
        '--gin_bindings=A=1',
        '--gin_file=x',
        '--gin_bindings=a.b="c"',
    ]


def test_a_sample_cannot_steer_the_terminal():
    # Any byte may come out of an untrained model, ESC among them.
    for terminal in (False, True):
        output = io.StringIO()
        console = Console(file=output, force_terminal=terminal, no_color=True, width=80)
        RunConsole(console).sample('def ', 'a\x1b[2Jb\x1b]0;title\x07c\x9b31m')
        assert 'def ' in output.getvalue()
        assert '\x1b[2J' not in output.getvalue()
        assert '\x1b]0' not in output.getvalue()
        assert '\x9b' not in output.getvalue()
