"""What a gin file of a stranger cannot do: show other files, take memory, or never return."""

import os
import subprocess
import sys
import textwrap

import pytest

from train.errors import ConfigError
from train.gin.parsing import read_statements

pytestmark = pytest.mark.core

SECRET = 'root:x:0:0:top-secret'
LEVELS = range(10)
BOMB = ''.join(f'M{n} = [{", ".join([f"%M{n + 1}"] * 10)}]\n' for n in LEVELS) + 'M10 = 1\n'
HOSTILE = {
    'a file of passwords': ("include '{folder}/passwords'", 'is not below the folder'),
    'a file of passwords by its relative path': ("include '../passwords'", 'is not below'),
    'a link to it': ("include 'link.gin'", 'is not below the folder'),
    'a link to its folder': ("include 'linked/passwords'", 'is not below the folder'),
    'a file that is no gin file': ("include 'notes.txt'", 'notes.txt:1: syntax error'),
    'an absolute path': ("include '/etc/passwd'", 'is not below the folder'),
    'a device': ("include '/dev/zero'", 'is not below the folder'),
    'a link to a device': ("include 'zero.gin'", 'is not below the folder'),
    'a pipe': ("include 'pipe.gin'", 'is not a regular file'),
    'a socket': ("include 'socket.gin'", 'cannot read|not a regular file'),
    'a folder': ("include 'folder.gin'", 'no such gin file'),
    'a file of the system': ("include '/proc/self/environ'", 'is not below the folder'),
    'a large file': ("include 'large.gin'", 'more than 1,048,576 bytes'),
    'bytes that are no text': ("include 'bytes.gin'", 'is not text in UTF-8'),
    'a null byte': ("include 'null.gin'", 'contains a null byte'),
    'a long name of a file': (f"include '{'x' * 5000}'", 'no such gin file'),
    'a null byte in a name of a file': (r"include 'a\0b'", 'no such gin file|null byte'),
    'a URL': ("include 'https://example.org/a.gin'", 'https://'),
    'a file that includes itself': ("include 'run.gin'", 'includes itself'),
    'includes that double': ("include 'd0.gin'", 'more than 200 gin files'),
    'a macro bomb': (BOMB, 'more than 1,000,000 values'),
    'a macro bomb of dictionaries': (
        BOMB.replace('[', "{{'a': [").replace(']', ']}}'),
        'more than 1,000,000 values',
    ),
    'a macro that is itself': ('A = %A', '%A needs %A'),
    'macros in a circle': ('A = %B\nB = %A', 'needs'),
    'macros in a long circle': (
        ''.join(f'A{n} = %A{(n + 1) % 500}\n' for n in range(500)),
        'needs',
    ),
    'a macro in a list of itself': ('A = [%A, %A]', '%A needs %A'),
    'a hexadecimal number': (
        f'A = 0x{"f" * 900_000}',
        'run.gin:1: the line has 900,006 characters',
    ),
    'a shorter one': (f'A = 0x{"f" * 40_000}', r'A is an integer of 48,1\d\d digits'),
    'a decimal number': (f'A = {"9" * 40_000}', 'syntax error|digits'),
    'a number of 65 bits': (f'A = {2**64}', 'A is an integer of 20 digits'),
    'a negative number': (f'A = -{2**64}', 'A is an integer of 20 digits'),
    'a number in a list': (f'A = [1, ({2**70},)]', 'A is an integer of 22 digits'),
    'a number in a key': (f'A = {{{{{2**70}: 1}}}}', 'A is an integer of 22 digits'),
    'an infinite number': ('A = 1e999', 'A is inf: write a finite number'),
    'a negative infinite number': ('A = -1e999', 'A is -inf: write a finite number'),
    'a null byte in a text': (r"A = 'a\0b'", 'A contains a null byte'),
    'a folder that XLA writes': ("A = {{'xla_dump_to': 'x'}}", 'option xla_dump_to.*in XLA_FLAGS'),
    'a folder whose programs XLA runs': (
        "A = 'xla_gpu_cuda_data_dir'\nB = {{%A: 'x'}}",
        'option xla_gpu_cuda_data_dir',
    ),
    'options of LLVM': (
        "A = {{'--xla_backend_extra_options': 'x'}}",
        '--xla_backend_extra_options',
    ),
    'a null byte in bytes': (r"A = b'a\x00b'", 'A contains a null byte'),
    'a nested list': (f'A = {"[" * 40_000}', 'syntax error|nested too deeply'),
    'nested and closed': (f'A = {"[" * 5000}{"]" * 5000}', 'syntax error|nested too deeply'),
    'nested parentheses': (f'A = {"(" * 5000}1{")" * 5000}', 'syntax error|nested too deeply'),
    'many signs': (f'A = {"-" * 40_000}1', 'syntax error|nested too deeply'),
    'many statements': ('A = 1\n' * 100_000, 'more than 5,000 statements'),
    'a long line': (f'A = {"x" * 40_000}', 'syntax error'),
    'a long name': (f'{"x" * 40_000} 1', 'syntax error'),
    'a long text without its end': (f"A = '{'x' * 40_000}", 'syntax error'),
    'a long value without a meaning': (f'A = @@{"x" * 40_000}', 'syntax error'),
    'escape codes': ("A = \x1b[2J\x1b]0;x\x07'", 'syntax error'),
    'a line separator': ('A = 1\u2028B = @', 'syntax error'),
}


@pytest.fixture
def folder(tmp_path):
    """A folder with run.gin, and what hostile files include."""
    import socket

    folder = tmp_path / 'run'
    folder.mkdir()
    (tmp_path / 'passwords').write_text(f'{SECRET}\n')
    (folder / 'link.gin').symlink_to(tmp_path / 'passwords')
    (folder / 'linked').symlink_to(tmp_path)
    (folder / 'zero.gin').symlink_to('/dev/zero')
    (folder / 'notes.txt').write_text(f'{SECRET}\n')
    os.mkfifo(folder / 'pipe.gin')
    with socket.socket(socket.AF_UNIX) as one:
        before = os.getcwd()
        os.chdir(folder)  # The path of a socket must be short.
        try:
            one.bind('socket.gin')
        finally:
            os.chdir(before)
    (folder / 'folder.gin').mkdir()
    (folder / 'large.gin').write_bytes(b'#' * (2**20 + 1))
    (folder / 'bytes.gin').write_bytes(b'A = 1\n\xff\xfe')
    (folder / 'null.gin').write_bytes(b'A = 1\n\0')
    for n in LEVELS:
        (folder / f'd{n}.gin').write_text(f"include 'd{n + 1}.gin'\n" * 2)
    (folder / 'd10.gin').write_text('A = 1\n')
    return folder


@pytest.mark.parametrize(('text', 'message'), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_in_one_short_line(folder, text, message):
    (folder / 'run.gin').write_text(text.format(folder=folder.parent) + '\n')
    with pytest.raises(ConfigError, match=message) as error:
        read_statements([str(folder / 'run.gin')], search_paths=[str(folder)])
    shown = str(error.value)
    assert len(shown.splitlines()) == 1 and len(shown) < 1200 + len(os.path.abspath('.'))
    assert SECRET not in shown and 'root:' not in shown


def test_a_file_that_the_user_names_is_not_shown_either(folder):
    with pytest.raises(ConfigError, match='syntax error') as error:
        read_statements([str(folder.parent / 'passwords')])
    assert SECRET not in str(error.value)


def test_files_below_the_folders_of_the_user_are_included(folder, tmp_path):
    (folder / 'parts').mkdir()
    (folder / 'parts' / 'seed.gin').write_text('A = 1\n')
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    (elsewhere / 'other.gin').write_text('B = 2\n')
    run = folder / 'run.gin'
    run.write_text(f"include '{folder}/parts/seed.gin'\ninclude '{elsewhere}/other.gin'\n")
    with pytest.raises(ConfigError, match=f'--gin_search_paths={elsewhere}$'):
        read_statements([str(run)])
    found = read_statements([str(run)], search_paths=[str(elsewhere)])
    assert [(one.macro, one.parsed.value) for one in found] == [('A', 1), ('B', 2)]


def test_a_flag_is_shown_in_part(folder):
    with pytest.raises(ConfigError, match='is not a gin value') as error:
        read_statements([], [f'A=[{"x" * 100_000}'])
    assert len(str(error.value)) < 1200
    with pytest.raises(ConfigError, match='integer of 20 digits'):
        read_statements([], [f'A={2**64}'])


def test_calls_that_multiply_are_counted(refusal):
    # Each of ten optimizers holds ten of the next.
    bomb = ''.join(
        f'L{n}/chain.transformations = [{", ".join([f"@L{n + 1}/chain()"] * 10)}]\n' for n in LEVELS
    )
    message = refusal(f'import train.optimizers\nTrainConfig.optimizer = @L0/chain()\n{bomb}')
    assert 'more than 1,000,000 values' in message


BEFORE_IMPORTS = {
    'BATCH_SIZE=100000000000': 'of tokens per process and batch, and this host has',
    'SEQUENCE_LENGTH=1000000000000': 'of tokens per process and batch, and this host has',
    'MODEL_DIR=/proc/self': 'is in /proc, which belongs to the system',
    'MODEL_DIR=a\N{RIGHT-TO-LEFT OVERRIDE}b': 'contains the character U+202E',
    "MODEL_DIR='a\\n\\x1bb'": 'contains the character U+000A',
    'MODEL_DIR=/etc/meshwright': 'is in /etc, which belongs to the system',
    'MODEL_DIR=/tmp/../usr/lib/x': 'is in /usr/lib, which belongs to the system',
    'MODEL_DIR=/': 'is the root of the file system',
    'LEARNING_RATE=@os.system()': "no configurable 'os.system'",
    'os.system.command=1': "no configurable 'os.system'",
    'LEARNING_RATE=%UNKNOWN': '%UNKNOWN has no value',
    'other/TrainConfig.batch_size=1': "scope 'other' is never used",
}


def test_what_is_absurd_or_not_listed_is_refused_before_jax_is_imported():
    code = f"""
        import sys
        from train.cli.command import CommandParser
        from train.cli.early import check_run
        from train.gin.parsing import find_config_root
        for binding in {list(BEFORE_IMPORTS)!r}:
            options = CommandParser('x', '', '').read([f'--gin.{{binding}}'])
            try:
                check_run(options, [str(find_config_root() / 'configs/runs/quickstart.gin')])
            except ValueError as error:
                print(error, 'jax' in sys.modules)
    """
    result = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True
    )
    lines = result.stdout.splitlines()
    for line, message in zip(lines, BEFORE_IMPORTS.values(), strict=True):
        assert message in line and line.endswith(' False'), line
