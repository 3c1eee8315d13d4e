"""The files of configs/t5x. MESHWRIGHT_T5X_RUNS=1 executes the command of each of them."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout

import gin
import pytest
from gin_fixtures import load_config

from train.cli.command import CommandParser
from train.gin.load import find_entry
from train.gin.parsing import find_config_root

FOLDER = find_config_root() / 'configs/t5x'
FRAGMENTS = {  # files that are not a whole run -> the files that complete them
    'larger': 'larger pretrain text',
    'scalable': 'scalable pretrain text',
    'decoder_only': 'prefix_lm',
    'adamw': 'tiny pretrain text adamw',
}
ENTRIES = {'eval': 'evaluate', 'infer': 'infer', 'export': 'save'}
# Each of these commands needs the checkpoint of an earlier one.
ORDER = ['pretrain', 'finetune', 'eval', 'infer', 'export', 'prefix_lm', 'experts', *FRAGMENTS]


def command(name):
    """The arguments of `python -m train` at the top of a file, or of a fragment."""
    if name in FRAGMENTS:
        files = [f'configs/t5x/{file}.gin' for file in FRAGMENTS[name].split()]
        return [*files, '--gin.TRAIN_STEPS=20', f"--gin.MODEL_DIR='runs/{name}'"]
    comment = re.match(r'(?:#.*\n)+', (FOLDER / f'{name}.gin').read_text())[0]
    lines = re.findall(r'^#   (.*?)\\?$', comment, re.M)
    words = shlex.split(' '.join(lines))
    assert words[:3] == ['python', '-m', 'train']
    return words[3:]


@pytest.mark.core
@pytest.mark.parametrize('name', ORDER)
def test_each_file_is_a_valid_run(name):
    parser = CommandParser('', '', '')
    parser.add_argument('files', nargs='*')
    options = parser.read(command(name))
    with redirect_stdout(io.StringIO()):
        load_config(options.files, options.gin_bindings)
    assert find_entry().__name__ == ENTRIES.get(name, 'train')
    if 'TRAIN_STEPS' in str(options.gin_bindings):
        assert gin.query_parameter('TRAIN_STEPS/gin.macro.value') == 20 * (1 + (name == 'finetune'))


def test_every_file_is_tested():
    named = {word for files in FRAGMENTS.values() for word in files.split()}
    assert {file.stem for file in FOLDER.glob('*.gin')} == named | {*ORDER, 'tiny', 'text', 'pairs'}


@pytest.mark.skipif('MESHWRIGHT_T5X_RUNS' not in os.environ, reason='MESHWRIGHT_T5X_RUNS=1 runs it')
def test_each_file_does_its_job(tmp_path):
    """Losses fall in 20 steps, and the other commands write their results."""
    environment = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'programs')}
    for name in ORDER:
        done = subprocess.run(
            [sys.executable, '-m', 'train', *command(name)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f'{name}: {done.stderr[-2000:]}'
        folder = re.search(r"(?:MODEL_DIR|OUTPUT_DIR)='(.*?)'", ' '.join(command(name)))[1]
        if name in ENTRIES:
            print(
                name, sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / folder).rglob('*'))
            )
            continue
        lines = (tmp_path / folder / 'metrics.jsonl').read_text().splitlines()
        losses = [r['train/loss'] for r in map(json.loads, lines) if 'train/loss' in r]
        print(name, losses)
        assert losses[-1] < losses[0]
