"""A row passes every room of the input once: text, rows, feeding. No arrow runs back."""

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


def test_the_rooms_are_seen():
    assert {path.parent.name for path in FILES} == set(BELOW)
    assert len(FILES) > 12
