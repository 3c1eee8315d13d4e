"""`meshwright train` and `python -m train` as a user runs them: exit codes, output, and files."""

import dataclasses
import json
import os
import subprocess
import sys

import gin
import pytest
from gin_fixtures import load_config

from partitioning.rules import as_tuple
from train.cli import main
from train.gin.load import find_config
from train.gin.parsing import find_config_root

REPOSITORY = find_config_root()
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
    "TrainConfig.evaluators={'eval': @HeldOut(), 'sample': @Samples()}",
    'Samples.length=24',
)


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    """A folder of text files."""
    folder = tmp_path_factory.mktemp('texts')
    for i in range(40):
        (folder / f'{i}.txt').write_text(f'This is text number {i}, of {i * i} words. ' * 10)
    return folder


def bindings(model_dir, texts, *changes):
    """The bindings of a run; later ones override earlier ones."""
    own = (f"MODEL_DIR='{model_dir}'", "TEXT='**/*.txt'", f"TextFiles.root='{texts}'")
    return [*own, *VERY_SMALL, *changes]


def arguments(model_dir, texts, *changes):
    return [
        *(f'--gin_file={file}' for file in FILES),
        *(f'--gin.{binding}' for binding in bindings(model_dir, texts, *changes)),
    ]


def start(*args, cwd=REPOSITORY):
    """Runs the command in a new process."""
    return subprocess.run(
        [sys.executable, '-m', 'train', *args],
        cwd=cwd,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def fails(meshwright, monkeypatch):
    """Runs the command in this process; it must exit with 2 and one line that contains `words`."""

    def fails(args, *words):
        monkeypatch.chdir(REPOSITORY)
        status, _, error = meshwright('train', *args)
        assert status == 2
        assert_one_error(error, *words)

    return fails


def assert_one_error(stderr, *words):
    (line,) = stderr.splitlines()
    assert line.startswith('error: ')
    for word in words:
        assert word in line


# A run that works.


@pytest.fixture(scope='module')
def trained(tmp_path_factory, texts):
    """A run of four steps: its folder and its output."""
    model_dir = tmp_path_factory.mktemp('runs') / 'deep' / 'model'
    return model_dir, start(*arguments(model_dir, texts))


def records(model_dir):
    return [json.loads(line) for line in (model_dir / 'metrics.jsonl').read_text().splitlines()]


def test_a_run_writes_its_files(trained):
    model_dir, result = trained
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
    written = records(model_dir)
    assert all(isinstance(record['step'], int) for record in written)
    last = {k: v for record in written if record['step'] == 4 for k, v in record.items()}
    assert last['train/loss'] > 0
    assert last['eval/bits_per_byte'] > 0
    assert last['train/tokens_per_second'] > 0


def test_the_output_of_a_run_has_no_escape_codes(trained):
    model_dir, result = trained
    assert '\x1b' not in result.stdout + result.stderr
    for words in (
        '8 CPU devices, 1 process',
        'step 4/4',
        'bits per byte',
        model_dir / 'config.gin',
    ):
        assert str(words) in result.stdout
    assert result.stderr == ''


def test_the_written_configuration_repeats_the_run(trained, texts):
    model_dir, _ = trained

    def settings():
        config = find_config()
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        partitioner, optimizer = values.pop('partitioner'), values.pop('optimizer')
        rates = [float(optimizer.learning_rate(step)) for step in range(0, 5000, 500)]
        rules = [(name, as_tuple(axes)) for name, axes in partitioner.logical_axis_rules]
        return values, rules, dict(partitioner.mesh.shape), optimizer.clip_norm, rates

    load_config(FILES, bindings(model_dir, texts))
    given = settings()
    gin.clear_config()
    load_config([str(model_dir / 'config.gin')])
    written = settings()
    assert given == written


@pytest.mark.long
def test_the_written_configuration_with_more_steps_resumes_the_run(trained, tmp_path):
    model_dir, _ = trained
    before = records(model_dir)
    longer = start(f'--gin_file={model_dir / "config.gin"}', '--gin.TRAIN_STEPS=6', cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert 'resumed from step 4' in longer.stdout
    assert 'step 6/6' in longer.stdout
    after = records(model_dir)
    assert after[: len(before)] == before
    assert {record['step'] for record in after[len(before) :]} == {6}
    assert {p.name for p in (model_dir / 'checkpoints').iterdir()} == {'4', '6'}


def test_a_run_is_scored_from_its_folder(trained, capsys):
    model_dir, _ = trained
    [logged] = [r for r in records(model_dir) if r['step'] == 4 and 'eval/loss' in r]
    assert main(['eval', str(model_dir), '--step=4']) == 0
    assert 'restored step 4' in capsys.readouterr().out
    [scored] = records(model_dir / 'eval/4')
    for score in ('eval/loss', 'eval/accuracy', 'eval/bits_per_byte'):
        assert scored[score] == pytest.approx(logged[score], rel=1e-6)


def test_a_run_continues_prompts(trained, capsys):
    model_dir, _ = trained
    prompts = ('--prompt=This is', '--prompt', 'words ')
    assert main(['generate', str(model_dir), *prompts, '--length=12', '--temperature=0']) == 0
    out = capsys.readouterr().out
    assert 'This is' in out and 'words ' in out


# Runs that cannot work.


def test_a_run_that_fails_prints_one_line(tmp_path, texts):
    # From another folder, gin would complain about every place where it looks for the configs.
    model_dir = tmp_path / 'model'
    result = start(*arguments(model_dir, texts, 'BATCH_SIZE=9'), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ''
    assert_one_error(result.stderr, '(9)', '(8)', '8 or 16')
    assert not model_dir.exists()


def test_a_failure_before_training(fails, tmp_path, texts):
    changes = 'NUM_PARTITIONS=2', 'TransformerConfig.mlp_dim=63'
    two_d = '--gin_file=configs/partitioning/two_d.gin'  # its rules shard 'mlp'
    words = 'constrain', "'mlp'", '63', 'model', '62 or 64'
    fails([*arguments(tmp_path / 'model', texts, *changes), two_d], *words)
    assert not (tmp_path / 'model').exists()


def test_a_model_dir_below_a_file(fails, tmp_path, texts):
    file = tmp_path / 'file'
    file.write_text('kept')
    fails(arguments(file / 'model', texts), 'MODEL_DIR', str(file), 'is a file')
    assert file.read_text() == 'kept'


def test_an_error_cannot_control_the_terminal(fails, tmp_path):
    model_dir = tmp_path / 'a\x1b[2Jb\x07'
    model_dir.write_text('a file')
    fails(arguments(model_dir / 'model', tmp_path), 'MODEL_DIR', 'a\N{REPLACEMENT CHARACTER}[2Jb')


def test_a_configuration_without_a_task(fails, tmp_path):
    model_dir = tmp_path / 'model'
    file = tmp_path / 'run.gin'
    file.write_text(
        "include 'configs/runs/base.gin'\ninclude 'configs/models/tiny.gin'\n"
        "include 'configs/partitioning/fsdp.gin'\n"
        'LEARNING_RATE = 0.1\nEVAL_PERIOD = 1\nCHECKPOINT_PERIOD = 1\nTRAIN_STEPS = 1\n'
        f"BATCH_SIZE = 8\nSEQUENCE_LENGTH = 8\nMODEL_DIR = '{model_dir}'\n"
    )
    fails([f'--gin_file={file}'], 'TrainConfig', "'task'")
    assert not model_dir.exists()
