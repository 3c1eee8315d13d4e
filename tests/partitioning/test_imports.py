"""Which module may import which, and what `import partitioning` loads."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import partitioning

pytestmark = [pytest.mark.core, pytest.mark.smoke]

PACKAGE = Path(partitioning.__file__).parent
MODULES = sorted(PACKAGE.rglob('*.py'))

# A room imports from floors below its own, and on its own floor only what BESIDE allows.
FLOORS = {
    'rules': 0,
    'hardware': 0,
    'amounts': 0,
    'untrusted_text': 0,
    'layout': 1,
    'constraints': 1,
    'mesh': 1,
    'products': 2,
    'state': 2,
    'plan': 3,
    'programs': 3,
    'partitioner': 4,
    'pictures': 4,
    'suggestion': 4,
    'aot': 5,
    'compat': 5,
    '__init__': 6,
}
BESIDE = {'hardware': {'rules'}}  # both are on the ground; rules import no other room
NEVER = {'train', 'gin', 'grain', 'orbax', 'tensorboardX'}


def imported(path):
    """The dotted names of all modules that a file imports, at whatever place in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path.name}: imports are absolute here'
            if node.module == 'partitioning':  # `from partitioning import rules`
                names |= {f'partitioning.{alias.name}' for alias in node.names}
            else:
                names |= {node.module}
    return names


def room(path):
    """The part of the package that a file belongs to: its module or its subpackage."""
    return path.relative_to(PACKAGE).with_suffix('').parts[0]


def own(names):
    return {name.split('.')[1] for name in names if name.startswith('partitioning.')}


def test_every_module_stands_on_a_floor():
    rooms = {room(path) for path in MODULES}
    assert {'rules', 'layout', 'partitioner'} <= rooms
    assert rooms <= FLOORS.keys(), 'a new module needs a floor in FLOORS'


# Programs (`python -m partitioning.mesh`) stand above every room: nothing imports them.
LIBRARY = [path for path in MODULES if path.stem != '__main__']


@pytest.mark.parametrize('path', LIBRARY, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    names, here = imported(path), room(path)
    assert not {name.split('.')[0] for name in names} & NEVER
    allowed = {name for name, floor in FLOORS.items() if floor < FLOORS[here]}
    assert own(names) <= allowed | BESIDE.get(here, set()) | {here}
    if here != 'compat':
        assert 'compat' not in own(names), 'the core never imports compat'
    assert 'partitioning' not in names
    assert not any(name.endswith('__main__') for name in names)


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def test_no_file_imports_itself_through_others():
    """A package's __init__ and its modules count as one another only where they import names."""
    files = {module_name(path): path for path in LIBRARY if path.name != '__init__.py'}
    imports = {name: imported(path) & files.keys() for name, path in files.items()}
    open_names, done = [], set()

    def visit(name):
        assert name not in open_names, f'circle: {open_names[open_names.index(name) :]}'
        if name not in done:
            open_names.append(name)
            for other in sorted(imports[name]):
                visit(other)
            open_names.pop()
            done.add(name)

    for name in files:
        visit(name)
    assert done == files.keys()


def test_no_module_and_function_share_a_name():
    functions = {
        node.name: str(path.relative_to(PACKAGE))
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    modules = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix('').parts}
    shared = {name: functions[name] for name in functions.keys() & modules}
    assert not shared
    assert {'check_spec', 'lay_out'} <= functions.keys() and {'rules', 'plan'} <= modules


def test_no_two_files_share_a_name():
    names = [p.name for p in LIBRARY if p.name != '__init__.py']
    assert sorted(names) == sorted(set(names))


def test_the_parser_sees_imports_inside_functions():
    assert 'partitioning.rules' in imported(PACKAGE / 'layout/ownership.py')
    assert any(name.startswith('flax') for name in imported(PACKAGE / 'constraints.py'))


def test_every_public_name_can_be_imported():
    stub = ast.parse((PACKAGE / '__init__.pyi').read_text())
    listed = [a.name for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names]
    assert len(listed) == len(set(listed)) > 60
    assert set(partitioning.__all__) <= set(listed)
    for name in listed:
        assert getattr(partitioning, name) is not None
    assert 30 <= len(partitioning.__all__) <= 40
    with pytest.raises(AttributeError, match='no_such_name'):
        partitioning.no_such_name  # noqa: B018


def test_import_is_light():
    code = (
        'import json, sys; from partitioning import PjitPartitioner;'
        'print(json.dumps(sorted(sys.modules)))'
    )
    out = subprocess.run(
        [sys.executable, '-c', code],
        cwd=PACKAGE.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    loaded = set(json.loads(out.stdout))
    assert {'jax', 'partitioning.partitioner'} <= loaded
    assert 'partitioning.pictures' not in loaded
    heavy = {'flax', 'optax', 'gin', 'grain', 'orbax', 'rich', 'train', 'tensorflow', 'torch'}
    assert not heavy & loaded
