"""`meshwright checkpoint`: what it prints, its exit statuses, and its errors in one line."""

import json
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

W = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def command(meshwright):
    return lambda *arguments: meshwright('checkpoint', *arguments)


def save(path, **arrays):
    save_file(arrays, path)
    return path


def flip_a_bit(step):
    """Damages the largest array of a step, and returns the path of the file below the step."""
    file = max(step.glob('state/params*/*'), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return str(file.relative_to(step))


# inspect


def test_a_step_is_shown(command, finished):
    status, out, _ = command('inspect', finished.directory / 'checkpoints/4')
    facts = dict(line.split('  ', 1) for line in out.split('\n\n')[0].splitlines())
    facts = {name: value.strip() for name, value in facts.items()}
    assert status == 0
    assert (facts['format'], facts['step'], facts['status']) == ('meshwright', '4', 'good')
    # Two matrices of 264 x 16 and two vectors; Adam keeps two moments of each.
    assert facts['parameters'] == f'{2 * 264 * 16 + 32:,}'
    assert '16 arrays: parameters 33.9 kB, optimizer 67.8 kB' in facts['arrays']
    assert re.search(r'jax \d+\.\d+', facts['saved with'])
    rows = [line.split() for line in out.split('\n\n')[1].splitlines()]
    assert rows[0] == ['name', 'arrays', 'shape', 'dtype', 'size']
    assert ['params/Embed_0/embedding', '1', '264x16', 'float32', '16.9', 'kB'] in rows
    assert ['opt_state/1/0/mu/*', '4', 'various', 'float32', '33.9', 'kB'] in rows
    assert out == '\n'.join(line.rstrip() for line in out.splitlines()) + '\n'


def test_the_steps_of_a_run_are_shown(command, finished, tmp_path):
    run = finished.copy(tmp_path / 'run')
    (run / 'checkpoints/4/manifest.json').unlink()
    (run / 'checkpoints/6/state/_METADATA').unlink()
    status, out, _ = command('inspect', run)
    rows = [line.split() for line in out.splitlines()]
    assert (status, rows[0][:2]) == (0, ['3', 'steps'])
    assert [row[:2] for row in rows[2:]] == [['2', 'good'], ['4', 'unfinished'], ['6', 'damaged']]
    assert rows[4][-3:] == ['state/_METADATA', 'is', 'missing']
    steps = json.loads(command('inspect', run, '--json')[1])
    assert [step['status'] for step in steps] == ['good', 'unfinished', 'damaged']


def test_exact_numbers_are_json(command, tmp_path):
    file = save(tmp_path / 'a.safetensors', w=W, b=np.zeros(4, ml_dtypes.bfloat16))
    summary = json.loads(command('inspect', file, '--json')[1])
    assert summary['bytes_by_dtype'] == {'float32': 24, 'bfloat16': 8}
    assert (summary['num_parameters'], summary['step']) == (10, None)
    assert summary['status'] == 'without a manifest'
    [array] = json.loads(command('inspect', file, '--json', '--arrays=^w')[1])['arrays']
    assert (array['name'], array['shape'], array['nbytes']) == ('w', [2, 3], 24)


def test_names_in_files_cannot_change_the_terminal(command, tmp_path):
    file = save(tmp_path / 'a.safetensors', **{'w\x1b[31m[bold]': W})
    out = command('inspect', file)[1]
    assert '\x1b' not in out and '[31m[bold]' in out


READING = """
import sys
from train.cli import main
run = sys.argv[1]
for words in (['inspect', run], ['inspect', run, '--step=4'], ['verify', run], ['diff', run, run]):
    assert main(['checkpoint', *words]) == 0
import jax
assert not jax._src.xla_bridge._backends, 'jax has looked for devices'
"""


def test_no_device_is_looked_for(finished):
    command = [sys.executable, '-c', READING, str(finished.directory)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# diff


def test_values_are_compared(command, tmp_path):
    other = W.copy()
    other[0, 1], other[1, 2] = 1.5, np.nan
    a = save(tmp_path / 'a.safetensors', w=W, x=W, n=np.array([np.nan, 1], np.float32), only=W)
    b = save(tmp_path / 'b.safetensors', w=other, x=W[:1], n=np.array([np.nan, 1], np.float32))
    status, out, _ = command('diff', a, b)
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert status == 1
    assert rows['w'] == ['w', '2x3', 'float32', '2x3', 'float32', '2', 'nan', 'nan']
    assert rows['x'] == ['x', '2x3', 'float32', '1x3', 'float32']
    assert rows['only'] == ['only', '2x3', 'float32', 'absent']
    assert 'n' not in rows and '1 of 4 arrays are equal' in out
    other[1, 2] = 5
    b = save(tmp_path / 'c.safetensors', w=other, x=W, n=np.array([np.nan, 1], np.float32), only=W)
    out = command('diff', a, b)[1]
    assert ['w', '2x3', 'float32', '1', '0.5', '0.333'] in [
        line.split() for line in out.splitlines()
    ]
    status, out, _ = command('diff', '--names', a, b)
    assert (status, out) == (0, '4 of 4 arrays are equal in name, shape and dtype\n')


def test_equal_checkpoints_of_two_formats_are_equal(command, finished, tmp_path):
    run = finished.directory
    assert command('convert', run, tmp_path / 'plain', '--to=orbax')[0] == 0
    status, out, _ = command('diff', run, tmp_path / 'plain')
    assert (status, out) == (0, '16 of 16 arrays are equal\n')
    assert command('diff', run / 'checkpoints/4', run / 'checkpoints/6')[0] == 1


# verify


def test_every_damaged_file_is_named(command, finished, tmp_path):
    run = finished.copy(tmp_path / 'run')
    assert command('verify', run)[0] == 0
    flipped = flip_a_bit(run / 'checkpoints/6')
    (run / 'checkpoints/6/run/step.json').write_text('{}')
    (run / 'checkpoints/8').mkdir()
    status, out, _ = command('verify', run)
    lines = [line.strip() for line in out.splitlines()]
    assert status == 1
    assert re.match(r'step 2: good \(\d+ files, .*\)', lines[0])
    start = lines.index('step 6: damaged')
    assert lines[start + 1].startswith('run/step.json has 2 bytes instead of ')
    assert lines[start + 2] == f'{flipped} does not have the content that was written'
    assert lines[start + 3] == 'step 8: not a checkpoint'
    assert re.fullmatch(r'read .* in .* \([\d,]+ MB/s\)', lines[-1])
    assert command('verify', run, '--step=4')[0] == 0


def test_without_a_manifest_nothing_can_be_verified(command, tmp_path):
    status, out, _ = command('verify', save(tmp_path / 'a.safetensors', w=W))
    assert status == 1
    assert 'without a manifest' in out and 'checkpoint convert' in out


# convert


def test_a_conversion_says_what_it_wrote_and_what_it_did_not(command, finished, tmp_path):
    arguments = (finished.directory, tmp_path / 'out', '--to=safetensors', '--step=4')
    status, out, _ = command('convert', *arguments, '--renames=opt_state/.*=', '--dtype=bfloat16')
    assert status == 0
    assert f'{tmp_path}/out: 7 arrays, ' in out
    assert (
        'not carried over: 9 arrays that --renames leaves out, such as opt_state/1/0/count' in out
    )
    assert 'not carried over: run/plan.json' in out
    written = load_file(tmp_path / 'out/model.safetensors')
    assert written['params/Embed_0/embedding'].dtype == ml_dtypes.bfloat16
    assert written['step'] == 4
    status, _, err = command('convert', *arguments)
    assert status == 2 and 'out exists already' in err


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['inspect', 'nowhere'], 'nowhere does not exist'),
        (['inspect', 'text.txt'], 'text.txt is a file, but neither safetensors nor'),
        (['inspect', 'text.safetensors'], 'text.safetensors is not a safetensors file'),
        (['inspect', 'empty'], 'empty is an empty folder. Write the path of a step'),
        (['inspect', 'texts'], 'texts has no checkpoint, only a.txt, b.txt'),
        (['inspect', 'run', '--step=5'], 'run has no readable step 5: its steps are 2 (good), '),
        (['inspect', 'run/checkpoints/2', '--step=4'], 'is one checkpoint: remove --step=4'),
        (['inspect', 'run', '--step=2', '--arrays=('], "--arrays='(' is not a regular expression"),
        (['inspect', 'run', '--step=2', '--arrays=zz'], 'none of 16 names contains it'),
        (['verify', 'empty'], 'empty is an empty folder'),
        (['diff', 'run'], 'the following arguments are required: B'),
        (['diff', 'run', 'nowhere'], 'nowhere does not exist'),
        (['convert', 'run', 'out'], 'the following arguments are required: --to'),
        (['convert', 'run', 'out', '--to=tf'], "argument --to: invalid choice: 'tf'"),
        (['convert', 'run', 'run', '--to=meshwright'], 'run/checkpoints/6 exists already'),
        (['convert', 'run', 'text.txt', '--to=orbax'], 'text.txt is a file, not a folder'),
        (['convert', 'run', 'text.txt/a', '--to=orbax'], 'text.txt is a file, not a folder'),
        (['convert', 'run', 'out', '--to=orbax', '--renames=x'], "--renames='x' has no '='"),
        (['convert', 'run', 'out', '--to=orbax', '--renames=(=x'], '--renames[0]'),
    ],
)
def test_errors_are_one_line(command, finished, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run').symlink_to(finished.directory)
    for folder in ('empty', 'texts'):
        (tmp_path / folder).mkdir()
    for name in ('text.txt', 'text.safetensors', 'texts/a.txt', 'texts/b.txt'):
        (tmp_path / name).write_text('some text')
    status, out, err = command(*arguments)
    assert (status, out) == (2, '')
    assert err.startswith('error: ') and err.count('\n') == 1
    assert words in err
    assert not (tmp_path / 'out').exists()


FILES_OF_4_KB = """
import resource, sys
from train.cli import main
source, folder = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for format in ('orbax', 'meshwright', 'safetensors'):
    assert main(['checkpoint', 'convert', source, f'{folder}/{format}', f'--to={format}']) == 2
"""


@pytest.mark.long
def test_a_disk_that_takes_no_more_is_one_line(tmp_path):
    """The limit is one of the system on the size of a file, which acts as a full disk does."""
    file = save(tmp_path / 'a.safetensors', w=np.ones((128, 128), np.float32), x=W)
    # Without -B, the bytecode of modules would be cut off as well, and read by later tests.
    command = [sys.executable, '-B', '-c', FILES_OF_4_KB, str(file), str(tmp_path / 'out')]
    run = subprocess.run(command, capture_output=True, text=True)
    lines = run.stderr.splitlines()
    assert run.returncode == 0 and len(lines) == 3, run.stderr
    assert all(re.match(r'error: \S+ cannot be written: ', line) for line in lines)
    assert not [path for path in (tmp_path / 'out').rglob('*') if path.is_file()]
