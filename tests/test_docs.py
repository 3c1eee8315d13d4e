"""The documentation: its Python blocks run, its commands and gin files are valid, and its messages
are in the code."""

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import sys
import tomllib

import gin
import jax
import numpy as np
import pytest
from gin_fixtures import load_config
from jax.sharding import PartitionSpec as P

import partitioning
import train
from partitioning.plan import by_rules
from tests.code_blocks import ROOT, read_blocks, run_block, run_blocks
from train.cli import command, launch, main, training
from train.cli.commands import COMMANDS
from train.machine import devices as machine
from train.processes import joining

HAS_LIBTPU = importlib.util.find_spec('libtpu') is not None
PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob('docs/**/*.md'))
DOCUMENTS = ['README.md', 'CONTRIBUTING.md', *PAGES]
# Other tests run them, and look at the results.
OWN_TESTS = ('docs/from_pmap.md', 'docs/how-to/', 'docs/tutorials/partition.md', 'docs/coming_from')
WITH_PYTHON = [
    page for page in DOCUMENTS if not page.startswith(OWN_TESTS) and read_blocks(page, 'python')
]
# Runs and files that the pages write, and what is read in their place.
AS_IF = {'runs/quickstart': 'quickstart', 'mine.gin': 'quickstart'}
MESSAGES = re.findall(r'^### `(.+)`$', (ROOT / 'docs/troubleshooting.md').read_text(), re.M)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with some texts, in which the blocks of a page run."""
    for document in ('README.md', 'CONTRIBUTING.md'):
        (tmp_path / document).write_text((ROOT / document).read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize('page', WITH_PYTHON)
def test_the_python_blocks_run_and_print_what_is_shown(page, folder):
    if 'topology=' in (ROOT / page).read_text() and not HAS_LIBTPU:
        pytest.skip('libtpu, which describes TPUs, is not installed')
    run_blocks(page)


def test_partitioning_your_own_program(folder, monkeypatch):
    """The parts of `setup` trace the model once and walk the state once. The rest is right, too."""
    walks, traces, names = [], [], {'note': lambda: traces.append(1)}
    walk = by_rules.walk
    monkeypatch.setattr(by_rules, 'walk', lambda *a, **k: walks.append(1) or walk(*a, **k))
    for block in read_blocks('docs/tutorials/partition.md', 'python'):
        before = len(walks), len(traces)
        code = block.code.replace('def init(key):\n', 'def init(key):\n    note()\n')
        run_block(block._replace(code=code), names)
        if 'plan = partitioner.plan(init, key)' in block.code:
            assert (len(walks) - before[0], len(traces) - before[1]) == (1, 1)
            plan, loss = names['plan'], float(names['metrics']['loss'])
    params = plan.init(jax.random.key(0)).params
    assert params['fc1']['kernel'].addressable_shards[0].data.shape == (64, 128)  # model 2
    outputs = names['model'].apply({'params': jax.tree.map(np.asarray, params)}, np.ones((256, 64)))
    assert loss == pytest.approx(np.mean((np.asarray(outputs) - 1) ** 2), rel=1e-5)
    np.testing.assert_array_equal(names['batch'], names['examples'][:256])
    assert names['batch'].sharding.spec == P('data')
    assert {a.shape for a in names['tokens'].values()} == {(16, 128)}


def test_coming_from_other_systems(folder):
    names = run_blocks('docs/coming_from.md')
    assert names['params']['fc1']['kernel'].sharding.spec == P(None, 'model')
    np.testing.assert_array_equal(names['t'], np.full((8, 4), 2))
    assert names['plan'].rows


@pytest.mark.parametrize('page', [p for p in DOCUMENTS if read_blocks(p, 'gin')])
def test_the_gin_files_are_valid(page, tmp_path):
    for number, block in enumerate(read_blocks(page, 'gin')):
        file = tmp_path / f'{number}.gin'
        file.write_text(block.code)
        if 'QuantizedProducts' in block.code:
            pytest.importorskip('qwix', reason="pip install 'meshwright[quantization]'")
        gin.clear_config()
        load_config([str(file)])


def commands():
    """Yields (place, words) for every command in a shell block."""
    for document in DOCUMENTS:
        for block in read_blocks(document, 'sh'):
            for line in block.code.replace('\\\n', ' ').splitlines():
                if words := shlex.split(line, comments=True):
                    yield pytest.param(words, id=f'{document}: {" ".join(words)}')


@pytest.mark.parametrize('words', [*commands()])
def test_the_commands_are_valid(words, monkeypatch):
    """The names of commands, runs and settings exist, and every flag is in the help."""
    monkeypatch.setattr(machine, 'use_virtual_devices', lambda count: None)
    monkeypatch.setattr(joining, 'find_address', lambda *flags: None)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    program, *rest = words
    if program == 'make':
        targets = re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.M)
        assert {word for word in rest if '=' not in word} <= {*targets}
    elif program == 'pip':
        extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project'][
            'optional-dependencies'
        ]
        [ours] = [word for word in rest if word.startswith('.')]
        assert {*re.findall(r'\w[\w-]*', ours)} <= {*extras}
    elif program == 'meshwright' or words[:3] == ['python', '-m', 'train']:
        check_meshwright(*(rest if program == 'meshwright' else ['train', *words[3:]]))
    else:
        assert program in ('.ci/run', 'python'), words
        assert program != 'python' or importlib.util.find_spec(words[2])


def help_text(*command):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        assert main([*command, '--help']) == 0
    return text.getvalue()


def flags_in_help(*command):
    return {flag for flag in re.findall(r'--\w+', help_text(*command)) if flag != '--gin'}


def test_the_reference_shows_the_help_of_every_command():
    page = (ROOT / 'docs/reference/command_line.md').read_text()
    shown = re.findall('^<!-- help of: (.+) -->$', page, re.M)
    assert {words.split()[0] for words in shown} == {*COMMANDS}
    for words in shown:
        assert '--help' in help_text(*words.split())


def check_meshwright(*words):
    """Checks the flags by the help of the command, and the settings of a run by reading them."""
    if words[0] == 'launch':
        words, run = words[: words.index('--')], words[words.index('--') + 1 :]
        check_meshwright(*(run if run[0] in launch.COMMANDS else ['train', *run]))
    if words[0] == 'dry':  # behind the dashes is the user's command
        words = words[: words.index('--')]
    names, rest = [word for word in words if not word.startswith('-')], words[1:]
    flags = {word.split('=')[0] for word in words if word.startswith('--')} - {'--help'}
    known = flags_in_help(*names[: 2 if names[0] in ('plan', 'checkpoint') else 1])
    settings = {flag for flag in flags if flag.startswith('--gin.')}
    assert flags - settings <= known, f'the help lists {sorted(known)}'
    files = [word.removeprefix('--gin_file=') for word in rest if word.endswith('.gin')]
    theirs = [file for file in files if file.startswith('t5x/')]  # of a T5X checkout
    assert all((ROOT / file).exists() for file in files if file not in [*AS_IF, *theirs])
    if names[0] == 'train' and not theirs:
        parser = command.CommandParser('', '', '')
        parser.add_argument('runs', nargs='*')
        own = ('--profile_steps', '--expect_plan')
        options = parser.read(word for word in rest if not word.startswith(own))
        files = [training.find_gin_file(AS_IF.get(run, run)) for run in options.runs]
        command.configure(options, files)


@pytest.fixture(scope='module')
def texts_of_the_code():
    """All strings of the packages, without the values that are filled in."""
    texts = set()
    packages = ('partitioning', 'meshwright', 'train')
    for path in [path for name in packages for path in ROOT.glob(f'{name}/**/*.py')]:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            constants = [part.value for part in parts if isinstance(part, ast.Constant)]
            texts.add('...'.join(text for text in constants if isinstance(text, str)))
    return texts


@pytest.mark.parametrize('message', MESSAGES)
def test_every_message_is_one_of_the_code(message, texts_of_the_code):
    """`...` stands for anything, in the page, and for the values that the code fills in."""
    parts = [part.strip() for part in message.split('...')]
    pattern = re.compile('.*'.join(map(re.escape, parts)), re.S)
    longest = max(parts, key=len)
    assert any(longest in text and pattern.search(text) for text in texts_of_the_code)


def test_the_reference_has_every_public_name():
    pages = ''.join((ROOT / page).read_text() for page in PAGES)
    shown = {name.rpartition('.')[2] for name in re.findall(r'^::: (\S+)$', pages, re.M)}
    assert {*partitioning.__all__, *train.__all__} <= shown
