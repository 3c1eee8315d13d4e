"""Imports of the trainer point down: a room imports only the rooms on the floors below it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import train

pytestmark = [pytest.mark.core, pytest.mark.smoke]

TRAIN = Path(train.__file__).parent
FILES = sorted(TRAIN.rglob('*.py'))

# From the ground up. Rooms on the same floor do not import each other.
FLOORS = [
    {'errors', 'gin_config.names', 't5x.modules'},
    {'attention', 'decoding', 'output_layer'},
    {'adafactor', 'health', 'paths', 'models', 'objectives', 'optimizers'},
    {'processes'},
    {'launching'},
    {'runtime', 'steps', 'data.text'},
    {'checkpoints.arrays'},
    {'checkpoints.steps'},
    {'checkpoints.orbax'},
    {'checkpoints.formats'},
    {'checkpoints.huggingface'},
    {'checkpoints', 'data.rows'},
    {'data', 'exporting', 'checkpoints.offline'},
    {'evaluators', 'stopping'},
    {'config'},
    {'run'},
    {'agreements'},
    {'start', 'evaluation'},
    {'programs'},
    {'loop'},
    {'forecasting'},
    {'train', 'precompiling'},
    {'__init__'},
    {'configurables'},
    {'gin_config'},
    {'searching'},
    {'fitting'},
    {'cli', 't5x'},
    {'__main__', 't5x.__main__'},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The core of the trainer works without gin, and without what is above it.
CORE = FLOOR['__init__']


def room(parts):
    """The room of a module, given the parts of its name below `train`."""
    below = '.'.join(parts[:2])
    return below if below in FLOOR else parts[0] if parts else '__init__'


def room_of(path):
    return room(path.relative_to(TRAIN).with_suffix('').parts)


def imported(path):
    """The names of all modules that a file imports when it runs, at whatever place in it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, 'id', None) == 'TYPE_CHECKING':
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages = {alias.name for alias in node.names if (TRAIN / alias.name).is_dir()}
            modules = {a.name for a in node.names if (TRAIN / f'{a.name}.py').is_file()}
            of_root = packages | modules if node.module == 'train' else set()
            names |= {f'train.{name}' for name in of_root} or {node.module}
    return names


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(TRAIN)))
def test_imports_go_down(path):
    here, names = room_of(path), imported(path)
    rooms = {room(name.split('.')[1:]) for name in names if name.split('.')[0] == 'train'}
    allowed = {other for other in FLOOR if FLOOR[other] < FLOOR[here]} | {here}
    assert rooms <= allowed, f'{here} imports {sorted(rooms - allowed)}'
    if FLOOR[here] <= CORE and path.name != 'gin_text.py':
        assert 'gin' not in {name.split('.')[0] for name in names}


def test_every_file_is_in_a_room_and_every_room_has_a_file():
    assert {room_of(path) for path in FILES} == FLOOR.keys()


def test_the_parser_sees_imports_inside_functions_but_not_those_of_types():
    assert 'train.objectives.nnx_model' in imported(TRAIN / 'objectives/model.py')
    assert 'train.run' not in imported(TRAIN / 'runtime/meter.py')
    assert 'if TYPE_CHECKING:\n    from train.run' in (TRAIN / 'runtime/meter.py').read_text()
    assert 'train.checkpoints' in imported(TRAIN / 't5x/checkpoints.py'), 'from train import ...'


def test_the_trainer_runs_without_gin():
    code = 'import sys; from train import TrainConfig, train; print("gin" in sys.modules)'
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == 'False'
