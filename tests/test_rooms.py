"""Imports point one way: down the floors of each package, and never in a circle, inside rooms too.

A room is a folder of a package, or a file next to these folders.
"""

import ast
import collections
import functools
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.core, pytest.mark.smoke]

ROOT = Path(__file__).parents[1]

# From the ground up. Rooms on the same floor do not import each other.
FLOORS = {
    'partitioning': [
        {
            'amounts',
            'lazy_names',
            'library_files',
            'short_help',
            'spelling',
            'temporary',
            'untrusted_text',
            'values',
        },
        {'command_line', 'rules'},
        {'hardware', 'tracebacks'},
        {'constraints', 'layout', 'mesh'},
        {'products', 'state'},
        {'plan', 'programs'},
        {'partitioner', 'pictures', 'suggestion'},
        {'compat'},
    ],
    'meshwright': [
        {'jax_private', 'live_buffers', 'pytest_plugin', 'user_lines'},
        {'program'},
        {'calls', 'jaxpr'},
        {'causes', 'time'},
        {'advice'},
        {'report'},
        {'changes', 'describing', 'examining', 'findings', 'watching'},
        {'forecasting', 'linting', 'auditing'},
        {'dry', 'dumps', 'explaining', 'records', 'searching'},
        {'checking', 'checks'},
    ],
    'train': [
        {'errors'},
        {'attention', 'decoding', 'output_layer', 'paths'},
        {'gin', 'machine', 'models', 'objectives', 'optimizers', 'processes', 'setting_checks'},
        {'data', 'reporting'},
        {'checkpoints', 'evaluators'},
        {'config', 'exporting'},
        {'running'},
        {'planning'},
        {'t5x'},
        {'cli'},
    ],
}
# What a package may import of the packages below it; None allows everything.
GROUND = {'amounts', 'hardware', 'layout', 'lazy_names', 'library_files', 'mesh', 'plan'}
GROUND |= {'command_line', 'products', 'rules', 'tracebacks'}
BELOW = {
    'partitioning': {},
    'meshwright': {
        'partitioning': {*GROUND, 'pictures', 'state', 'temporary', 'untrusted_text', 'values'}
    },
    'train': {'partitioning': None, 'meshwright': None},
}
NOT_IN_CORE = {'gin', 'grain', 'orbax', 'tensorboardX'}


def is_library(path):
    """Programs such as `python -m partitioning.mesh` stand above all rooms."""
    return path.name not in ('__main__.py', 'conftest.py')


FILES = {
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path
    for package in FLOORS
    for path in sorted((ROOT / package).rglob('*.py'))
    if is_library(path)
}


@functools.cache
def imported(module):
    """The names of all modules that a module imports, at whatever place in it, types included."""
    names = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{module}: imports are absolute here'
            names |= {str(node.module), *(f'{node.module}.{alias.name}' for alias in node.names)}
    return frozenset(names)


def room(module):
    """The package and the room of a module; the package itself is the top of its house."""
    return tuple(module.split('.')[:2])


def own(module):
    """The modules of this repository that a module imports, without the packages around it."""
    return {
        name
        for name in imported(module)
        if name in FILES and name != module and not module.startswith(f'{name}.')
    }


ROOMS = sorted({room(module) for module in FILES if '.' in module})


@pytest.mark.parametrize('package', FLOORS)
def test_every_room_has_a_floor_and_every_listed_room_exists(package):
    folders = {path.parent for path in (ROOT / package).rglob('*.py')}
    assert all((folder / '__init__.py').exists() for folder in folders)
    listed = [name for floor in FLOORS[package] for name in floor]
    assert sorted(listed) == sorted(name for owner, name in ROOMS if owner == package)
    assert len(FLOORS[package]) <= 10


@pytest.mark.parametrize('here', ROOMS, ids='.'.join)
def test_imports_go_down(here):
    package, name = here
    floors = [floor for floor in FLOORS[package] if name in floor]
    below = set(itertools.chain(*FLOORS[package][: FLOORS[package].index(floors[0])]))
    for module in (m for m in FILES if room(m) == here):
        for other in map(room, own(module) - {'partitioning', 'meshwright', 'train'}):
            if other[0] == package:
                assert other == here or other[1] in below, f'{module} imports {".".join(other)}'
            else:
                allowed = BELOW[package].get(other[0], ())
                assert allowed is None or other[1] in allowed, f'{module} imports {other}'


def test_no_file_imports_itself_through_others():
    done, open_names = set(), []

    def visit(module):
        assert module not in open_names, f'circle: {open_names[open_names.index(module) :]}'
        if module not in done:
            open_names.append(module)
            for other in sorted(own(module)):
                visit(other)
            open_names.pop()
            done.add(module)

    for module in FILES:
        visit(module)
    assert done == FILES.keys()


def test_a_file_does_not_import_from_the_package_around_it():
    """Only `import` statements of names that modules inside of the package have made count."""
    for module in FILES:
        around = {'.'.join(module.split('.')[:n]) for n in range(1, module.count('.') + 1)}
        for node in ast.walk(ast.parse(FILES[module].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in around:
                modules = {f'{node.module}.{alias.name}' for alias in node.names}
                assert modules <= FILES.keys(), f'{module} imports names from {node.module}'


@pytest.mark.parametrize('package', ['partitioning', 'meshwright'])
def test_the_core_needs_no_package_of_the_trainer(package):
    for module in (m for m in FILES if m.split('.')[0] == package):
        roots = {name.split('.')[0] for name in imported(module)}
        assert not roots & {*NOT_IN_CORE, 'train'}, module


def test_of_the_trainer_only_planning_and_the_command_forecast():
    users = {room(m) for m in FILES if any(n.startswith('meshwright') for n in imported(m))}
    assert {other for other in users if other[0] == 'train'} <= {
        ('train', 'planning'),
        ('train', 'cli'),
    }


def test_only_its_own_rooms_know_gin():
    users = {room(m)[1] for m in FILES if 'gin' in {n.split('.')[0] for n in imported(m)}}
    assert users <= {'gin', 't5x', 'cli'}


@pytest.mark.parametrize('package', FLOORS)
def test_modules_and_functions_do_not_share_a_name(package):
    functions = {
        node.name: module
        for module, path in FILES.items()
        if module.split('.')[0] == package
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    modules = {part for m in FILES if m.split('.')[0] == package for part in m.split('.')[1:]}
    assert not {name: functions[name] for name in functions.keys() & modules}


def loaded_by(*statements):
    """The names of the modules that are loaded after each statement of a new process."""
    show = 'print("loaded", *sys.modules)'
    code = '\n'.join(['import sys', *(f'{one}\n{show}' for one in statements)])
    out = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    lines = [line.split() for line in out.stdout.splitlines() if line.startswith('loaded ')]
    return [set(names) for _, *names in lines]


def test_import_partitioning_is_light():
    [loaded] = loaded_by('from partitioning import PjitPartitioner')
    assert {'jax', 'partitioning.partitioner'} <= loaded
    heavy = {'flax', 'optax', 'meshwright', 'rich', 'train', 'tensorflow', 'torch', *NOT_IN_CORE}
    assert not (heavy | {'partitioning.pictures'}) & loaded


def test_import_meshwright_is_light():
    of_jax, loaded = loaded_by('import jax', 'import meshwright; from meshwright import forecast')
    assert {'jax', 'meshwright.forecasting'} <= loaded
    heavy = {'flax', 'optax', 'absl', 'rich', 'train', *NOT_IN_CORE}
    assert not heavy & (loaded - of_jax)
    assert not {'partitioning.partitioner', 'partitioning.programs'} & loaded


ONE_STEP = """
import flax.linen, numpy, optax
from partitioning import PjitPartitioner
from train import Supervised
from train.checkpoints import CheckpointConfig
from train.data import Examples

programs = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: event.endswith('backend_compile_duration') and programs.append(event)
)
rows = numpy.ones((8, 4), numpy.float32)
loss = lambda outputs, batch: outputs[:, 0] ** 2
train(TrainConfig(
    model_dir={folder!r}, total_steps=1, batch_size=8, seed=0, writers=(), evaluators={{}},
    objective=Supervised(model=flax.linen.Dense(1), inputs='x', row_loss=loss),
    partitioner=PjitPartitioner(layout='data_parallel'), optimizer=optax.adam(1e-2),
    task=Examples(training={{'x': rows}}), checkpoints=CheckpointConfig(period=0),
))
assert len(programs) == 3, programs  # the random key, the state and the step
"""


def test_a_training_run_loads_what_it_uses(tmp_path):
    """Without a save, Orbax is loaded only because Grain imports it."""
    of_jax, imported, stepped, configured = loaded_by(
        'import jax',
        'from train import TrainConfig, train',
        ONE_STEP.format(folder=str(tmp_path)),
        "from train.gin.load import load_config; load_config(['configs/runs/quickstart.gin'])",
    )

    def counts(loaded):
        by_package = collections.Counter(name.split('.')[0] for name in loaded - of_jax)
        own = sum(by_package.pop(package, 0) for package in FLOORS)
        return own, sum(n for p, n in by_package.items() if p not in sys.stdlib_module_names)

    assert 'train.running.training' in imported
    for loaded, most in ((imported, (179, 760)), (stepped, (183, 775)), (configured, (219, 785))):
        own, foreign = counts(loaded)
        assert own <= most[0] and foreign <= most[1], (own, foreign)
        assert not {'meshwright', 'flax.nnx', 'tensorboardX'} & loaded
    assert 'gin' not in stepped


@pytest.mark.parametrize('package', FLOORS)
def test_every_public_name_can_be_imported(package):
    stub = ast.parse((ROOT / package / '__init__.pyi').read_text())
    listed = [a.name for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names]
    assert len(listed) == len(set(listed)) > 10
    made = __import__(package)
    assert set(made.__all__) <= set(listed)
    assert all(getattr(made, name) is not None for name in listed)
    with pytest.raises(AttributeError, match='no_such_name'):
        made.no_such_name  # noqa: B018
