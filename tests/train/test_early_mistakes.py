"""Mistakes that a command finds before it imports jax: each is one line that names the flag."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from train.cli.command import CommandParser
from train.cli.early import check_folder, check_run
from train.data.text.files import find_files
from train.errors import ConfigError
from train.processes.holding import hold_folder
from train.processes.signals import handling

PRETRAIN = 'configs/runs/pretrain.gin'
NOTHING_EVALUATED = ['--gin.TEXT=texts/*.md', '--gin.TrainConfig.evaluators={}']


def check(*arguments, files=(PRETRAIN,)):
    check_run(CommandParser('meshwright train', '', '').read(arguments), files)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Returns a function that writes as many files, of whose names 2% hold out none."""
    monkeypatch.chdir(tmp_path)

    def write(count):
        (tmp_path / 'texts').mkdir()
        names = (f'texts/{i}.md' for i in range(1000))
        kept = [name for name in names if zlib.crc32(name.encode()) / 2**32 >= 0.02][:count]
        for name in kept:
            (tmp_path / name).write_text('text')
        return tmp_path

    return write


def test_a_corpus_too_small_to_hold_anything_out_is_no_empty_corpus(corpus):
    corpus(35)
    with pytest.raises(ConfigError) as caught:
        check('--gin.TEXT=texts/*.md')
    text = str(caught.value)
    assert "TextFiles.pattern 'texts/*.md' matches 35 files" in text and 'empty' not in text
    percent = float(text.partition('--gin.TextFiles.holdout_percent=')[2].partition(' ')[0])
    check('--gin.TEXT=texts/*.md', f'--gin.TextFiles.holdout_percent={percent}')
    check('--gin.TEXT=texts/*.md', '--gin.TrainConfig.evaluators={}')


def test_macros_that_refer_to_each_other_are_refused(corpus):
    corpus(3)
    circle = ['--gin.TEXT=%A', '--gin.A=%B', '--gin.B=%A']
    options = CommandParser('meshwright train', '', '').read(circle)
    with pytest.raises(ConfigError, match=r' needs %.: give one of them another'):
        check_folder(options, [PRETRAIN])


def test_a_large_corpus_is_not_listed(corpus):
    corpus(35)
    found = find_files('texts/*.md', (), '', most=4)
    assert len(found) == 4 and {*found} < {*find_files('texts/*.md', (), '')}


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--gin.TEXT=texts/*.txt'], r"--gin.TEXT='texts/\*.txt': .*no file matches"),
        (
            ['--gin.TEXT=texts/*', '--gin.TRAIN_STEPS=-5'],
            '^--gin.TRAIN_STEPS=-5: TrainConfig.total_steps is -5: .*>= 0',
        ),
        (['--gin.TEXT=empty/*'], 'empty corpus: .* matches 1 file of 0 bytes'),
        (['--gin.TEXT=texts'], 'it matches a directory; write texts/'),
        (['--gin.TEXT=[1]'], r'--gin.TEXT=\[1\]: TextFiles: pattern is'),
        (
            ['--gin.TEXT=texts/*', '--gin.TextFiles.holdout_percent=100'],
            'holdout_percent=100: all 3 files .* are held out',
        ),
    ],
)
def test_data_that_cannot_be_read_or_trained_on(corpus, arguments, words):
    path = corpus(3)
    (path / 'empty').mkdir()
    (path / 'empty/a').touch()
    with pytest.raises(ConfigError, match=words):
        check(*arguments)


def test_what_is_not_plain_is_left_to_the_run(corpus):
    corpus(35)
    check('--gin.TEXT=s3://bucket/*.md')
    check('--gin.TEXT=texts/*.md', '--gin.TrainConfig.task=@RandomTokens()')
    check(*NOTHING_EVALUATED, '--gin.MODEL_DIR=gs://bucket/run')


@pytest.mark.parametrize('value', ['/proc/a/run', '/dev/null/run'])
def test_a_folder_that_cannot_be_written(corpus, value):
    corpus(35)
    with pytest.raises(ConfigError, match=rf"^(--gin.MODEL_DIR='{value}': )?MODEL_DIR {value}"):
        check('--gin.TEXT=texts/*.md', f'--gin.MODEL_DIR={value}')


def test_a_folder_in_use(corpus, monkeypatch):
    path = corpus(3)
    monkeypatch.setattr(handling, 'command', 'meshwright train pretrain')
    arguments = [
        '--gin.TEXT=texts/*.md',
        '--gin.MODEL_DIR=my runs/ü',
        '--gin.TrainConfig.evaluators={}',
    ]
    check(*arguments)
    with hold_folder('MODEL_DIR', path / 'my runs/ü', print):
        with pytest.raises(ConfigError, match=r'in use by process .*\(meshwright train pretrain\)'):
            check(*arguments)
        # The other processes of the same run may not take it for another one.
        check(*arguments, '--process_count=2')
    check(*arguments)
    assert not (path / 'my runs').exists()


def test_jax_is_not_imported_for_them(corpus):
    corpus(3)
    code = (
        'import sys; from train.cli import main; '
        "code = main(['train', 'pretrain', '--gin.TEXT=none/*.txt']); "
        "print(code, 'jax' in sys.modules)"
    )
    environment = os.environ | {'PYTHONPATH': str(Path(__file__).parents[2])}
    ran = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, env=environment
    )
    assert ran.stdout.split() == ['2', 'False'], ran.stderr
    assert ran.stderr.startswith("error: --gin.TEXT='none/*.txt': ") and ran.stderr.count('\n') == 1


@pytest.mark.parametrize('command', ['forecast', 'fits'])
def test_an_odd_topology_proposes_one_that_exists(command, capsys):
    from train.cli import main

    run = 'pretrain' if command == 'forecast' else 'config.json'
    assert main([command, run, '--topology=2xv5e:5x5']) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: --topology=2xv5e:5x5: ') and 'v5e:6x6' in error
    assert 'chips_per_host_bounds' not in error and error.count('\n') == 1
