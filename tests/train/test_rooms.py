"""Imports of the trainer point down: from feeding to rows to text, and from train/t5x to the rest.

A row of data passes through each of these rooms once.
"""

import ast
from pathlib import Path

import pytest

import train.data

pytestmark = pytest.mark.core

DATA = Path(train.data.__file__).parent
BELOW = {
    'text': ('train.data.text', 'train.errors'),
    'rows': ('train.data.rows', 'train.data.text', 'train.errors'),
    'data': ('train.data', 'train.errors'),
}
FILES = sorted(DATA.rglob('*.py'))


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(DATA)))
def test_imports_go_down(path):
    modules = {
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith('train')
    }
    for module in modules:
        assert module.startswith(BELOW[path.parent.name]), f'{path.name} imports {module}'


def test_every_package_of_the_input_is_checked():
    assert {path.parent.name for path in FILES} == set(BELOW)
    assert len(FILES) > 12


TRAIN = DATA.parent


@pytest.mark.parametrize(
    'path',
    [p for p in sorted(TRAIN.rglob('*.py')) if p.parent.name != 't5x'],
    ids=lambda p: str(p.relative_to(TRAIN)),
)
def test_nothing_else_imports_the_names_of_t5x(path):
    imported = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, 'module', None), *(alias.name for alias in node.names))
    ]
    assert not [name for name in imported if name and name.startswith(('train.t5x', 't5x'))]


def test_the_names_of_t5x_are_found():
    names = {path.stem for path in (TRAIN / 't5x').glob('*.py')}
    assert {'train_script', 'eval_script', 'configs', 'trainer', 'models', 'network'} < names
