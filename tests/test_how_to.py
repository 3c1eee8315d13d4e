"""The programs of the how-to guides run; those for the six wishes train alike on two meshes."""

import ast
import contextlib
import functools
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from contract import check_answers

from tests.code_blocks import ROOT, Block, read_blocks, run_block, run_blocks
from train.checkpoints import Checkpoints
from train.cli import main
from train.data.text import sources

# The guides to what users wish for most. Their programs must stay short.
WISHES = [
    'docs/how-to/own_model.md',
    'docs/how-to/image_classifier.md',
    'docs/how-to/own_metric.md',
    'docs/how-to/own_data.md',
]
PAGES = [*WISHES, 'docs/how-to/own_loss.md']
MESH, STEPS = r"'model': 1\b", r'\btotal_steps=\d+'  # what a test changes in a program
LINES = 15
find_files = functools.cache(sources.find_files)  # lists the standard library only once


class Ran(NamedTuple):
    """A program after it ran: its names, what it printed, and the loss of each step."""

    names: dict
    printed: str
    losses: list[float]


@pytest.fixture
def run_on(tmp_path, monkeypatch):
    """Returns a function (program, size of the model axis) -> Ran, with four steps."""
    loop = importlib.import_module('train.running.training')
    monkeypatch.setattr(sources, 'find_files', find_files)

    def run(block: Block, num_partitions: int) -> Ran:
        code, meshes = re.subn(MESH, f"'model': {num_partitions}", block.code)
        code, runs = re.subn(STEPS, 'total_steps=4, log_every=1', code)
        assert (meshes, runs) == (1, 1), f'{block.document}:{block.line}'
        folder = tmp_path / f'line {block.line}, model {num_partitions}'
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            if num_partitions > 1:  # Only the losses are compared.
                patch.setattr(loop, 'prepare_evaluators', lambda run: {})
                patch.setattr(Checkpoints, 'save', lambda self, step, state, **about: None)
            names = {'__name__': '__main__'}
            printed = run_block(block._replace(code=code), names)
        mesh = rf'data +{8 // num_partitions}\s+model +{num_partitions}\s'
        assert re.search(mesh, printed)
        [file] = folder.glob('runs/*/metrics.jsonl')
        records = map(json.loads, file.read_text().splitlines())
        return Ran(names, printed, [r['train/loss'] for r in records if 'train/loss' in r])

    return run


@pytest.mark.long
@pytest.mark.parametrize('page', PAGES)
def test_the_programs_run(page, run_on, tmp_path, monkeypatch, traces):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    wishes = 0
    for block in read_blocks(page, 'python'):
        if not re.search(MESH, block.code):
            run_block(block, names)
            continue
        ran = run_on(block, 1)
        names = ran.names
        check_shown(block, ran.printed)
        if page in WISHES:
            wishes += 1
            assert count_lines_beyond_the_model(block.code) <= LINES, f'{page}:{block.line}'
            assert len(ran.losses) == 4 and np.ptp(ran.losses) > 0
            np.testing.assert_allclose(run_on(block, 2).losses, ran.losses, rtol=1e-5)
    assert bool(wishes) == (page in WISHES)


@pytest.mark.parametrize(
    'guide',
    [
        'any_jax_program',
        'check_layouts',
        'export',
        'forecast',
        'layout_tests',
        'read_an_audit',
        'resume_and_restore',
    ],
)
def test_the_programs_of_a_guide_print_what_it_shows(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('CI', raising=False)  # golden forecasts that are missing are an error there
    run_blocks(f'docs/how-to/{guide}.md')


def test_products_in_8_bits():
    pytest.importorskip('qwix', reason="pip install 'meshwright[quantization]'")
    run_blocks('docs/how-to/eight_bits.md')


@pytest.mark.long
def test_the_weights_of_a_small_llama(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / 'tests/train/reference_models/llama3_1', 'models/llama')
    (tmp_path / 'corpus').mkdir()
    for number in range(120):
        (tmp_path / f'corpus/{number}.txt').write_text(f'This is text number {number}. ' * 20)
    run_blocks('docs/how-to/use_hugging_face_weights.md')


def test_a_program_chooses_a_machine(monkeypatch):
    """The command runs in this process. Chips that cost less make the larger machine cheaper."""
    program, described = read_blocks('docs/how-to/choose_a_machine.md', 'python')
    run_block(described, {})
    assert len(program.code.split('\n\n\n')[1].splitlines()) <= LINES
    done: dict = {}
    run_process = subprocess.run

    def run(command, **how):
        if command[0] == 'git':  # a forecast names its commit
            return run_process(command, **how)
        assert how == {'capture_output': True, 'text': True} and command[1:3] == ['-m', 'train.cli']
        if tuple(command) not in done:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(command[3:])
            texts = out.getvalue(), err.getvalue()
            done[tuple(command)] = subprocess.CompletedProcess(command, status, *texts)
        return done[tuple(command)]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, 'run', run)
    code = program.code.replace("{'v5e:4x4': 1.2, 'v5e:8x8': 1.2, 'v6e:4x4': 2.7}", 'prices')
    assert code != program.code
    small = program._replace(code=code)
    names: dict = {'prices': {'v5e:4x4': 1.2, 'v5e:8x8': 1.2}}
    assert run_block(small, names) == "('v5e:4x4', True)\n"
    assert run_block(small, {'prices': {'v5e:4x4': 9.0, 'v5e:8x8': 0.1}}) == "('v5e:8x8', True)\n"
    [answered] = done.values()
    check_answers(json.loads(answered.stdout))
    with pytest.raises(ValueError, match='error: no run'):
        names['choose'](sys.executable, '-m', 'train.cli', 'forecast')


@pytest.mark.long
def test_a_mixture_of_experts(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'find_files', find_files)
    monkeypatch.chdir(tmp_path)
    [program] = read_blocks('docs/how-to/experts.md', 'python')
    code = re.sub(STEPS, 'total_steps=2', program.code)
    printed = run_block(program._replace(code=code), {'__name__': '__main__'})
    assert re.search(r'data +2\s+expert +4\s+model +1\s', printed)
    check_shown(program, printed)
    assert count_lines_beyond_the_model(code) <= LINES
    lines = (tmp_path / 'runs/experts/metrics.jsonl').read_text().splitlines()
    metrics = {name for line in lines for name in json.loads(line)}
    page = (ROOT / program.document).read_text().split('What is reported')[1]
    reported = re.findall('`([a-z_]+)`', page.split('## What to change')[0])
    assert len(reported) == 8
    assert {f'{run}/experts/{name}' for run in ('train', 'eval') for name in reported} <= metrics


def check_shown(program: Block, printed: str) -> None:
    """Checks that the parameters in the next text block are those that the program has printed."""
    blocks = read_blocks(program.document)
    shown = next(b for b in blocks if b.line > program.line and b.language == 'text')
    rows = [' '.join(row.split()) for row in shown.code.splitlines() if re.search(r'\dx\d', row)]
    assert rows and {*rows} <= {' '.join(line.split()) for line in printed.splitlines()}


def count_lines_beyond_the_model(code: str) -> int:
    """Counts the lines of a program without its imports, its modules, comments and empty lines."""
    model = set()
    for node in ast.parse(code).body:
        bases = node.bases if isinstance(node, ast.ClassDef) else ()
        is_module = any(isinstance(b, ast.Attribute) and b.attr == 'Module' for b in bases)
        if is_module or isinstance(node, ast.Import | ast.ImportFrom):
            model |= {*range(node.lineno, node.end_lineno + 1)}
    return sum(
        bool(line.split('#')[0].strip()) and number not in model
        for number, line in enumerate(code.splitlines(), 1)
    )


MISTAKES = [  # the page, the change of its program, and what the message says
    ('own_model', ('264', '256'), 'vocab_size 256 is smaller than the 257 tokens'),
    (
        'own_model',
        ("'vocab'))(x)", "'vocab'))(x[0])"),
        r'shape \(64, 264\) for .* \(16, 64\)',
    ),
    ('own_model', ('=ConvLm()', '=ConvLm'), 'the model is the class ConvLm'),
    ('own_model', ("'losses'", "'loss'"), "'loss' .* grows .* losses into 'losses'"),
    ('image_classifier', ("targets='label'", "targets='y'"), "no array 'y'; it has label, pixels"),
    ('image_classifier', ("'label': labels", "'label': labels.astype(str)"), "'label' .* <U1"),
    (
        'image_classifier',
        ("held_out={'pixels'", "held_out={'x'"),
        r'have label int32 \(\), x .* pix',
    ),
    ('own_metric', ("return {'spearman'", "{'spearman'"), "'ranking' returns None: .* numbers"),
    ('own_data', ('=Darts()', '=Darts'), r'training is a class: write Darts\(\)'),
    (
        'own_data',
        ('return {', "return ({'i': i} if i % 2 else {}) | {"),
        r'have hit .* i .* and hit .* place',
    ),
    ('own_loss', (', key)\n\n', ", key)['params']\n\n"), r"returns \['Dense_0', .* key 'params'"),
    ('own_loss', ('return Loss', 'return {} and Loss'), 'returns a dict: .* return Loss'),
]


@pytest.mark.parametrize(('page', 'change', 'message'), MISTAKES)
def test_a_mistake_has_a_clear_message(page, change, message, run_on):
    programs = read_blocks(f'docs/how-to/{page}.md', 'python')
    program = next(program for program in programs if change[0] in program.code)
    with pytest.raises(ValueError, match=message):
        run_on(program._replace(code=program.code.replace(*change)), 1)
