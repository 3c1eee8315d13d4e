"""gin files may import and name only allowed modules, and nothing else is run."""

import importlib
import math
import os
import pickle
import tempfile
import textwrap

import gin
import jax.numpy as jnp
import numpy as np
import pytest

from train import schedules
from train.config import load_config
from train.optimizers import Optimizer

pytestmark = [
    pytest.mark.core,
    pytest.mark.smoke,
    pytest.mark.usefixtures('own_registry'),
]

DYNAMIC = 'from __gin__ import dynamic_registration\n'


# What gin files may import.


@pytest.mark.parametrize(
    'statement',
    [
        'import intruder',
        'import intruder as jax',
        'from intruder import make',
        'from intruder import make as train',
        'import train_intruder',
        'import os',
        'import gin',
        'import jaxlib',
        'import numpy',
        'import __gin__.dynamic_registration',
        'from __gin__ import something_else',
    ],
)
@pytest.mark.parametrize('dynamic', ['', DYNAMIC], ids=['plain', 'dynamic'])
def test_an_import_from_outside_is_refused_and_not_run(refusal, intruder, statement, dynamic):
    message = refusal(f'{dynamic}import train.schedules\n{statement}\n')
    line = 3 if dynamic else 2
    assert f'run.gin:{line}: import of' in message
    assert 'is refused' in message
    assert f'--gin_allow={statement.split()[1].split(".")[0]}' in message
    assert not intruder.exists()


def test_an_import_in_an_included_file_is_refused(refusal, intruder, tmp_path):
    (tmp_path / 'a.gin').write_text("# a\ninclude 'b.gin'\n")
    (tmp_path / 'b.gin').write_text('\n\nimport intruder\n')
    message = refusal("include 'a.gin'\n", search_paths=[str(tmp_path)])
    assert 'b.gin:3: import of' in message
    assert not intruder.exists()


def test_an_import_in_a_flag_is_refused(refusal, intruder):
    assert 'is refused' in refusal('', 'import intruder')
    assert 'is refused' in refusal('', 'A = 1\nimport intruder')
    assert not intruder.exists()


def test_nothing_is_imported_before_every_import_is_allowed(refusal, intruder):
    refusal('import intruder\nimport intruder2\n', allow=['intruder'])
    assert not intruder.exists()


def test_gin_allow_allows_a_package(load, intruder):
    load(f'{DYNAMIC}import intruder\nA = @intruder.make()\n', allow=['intruder'])
    assert intruder.read_text() == 'intruder'


def test_gin_allow_does_not_allow_packages_with_similar_names(refusal, intruder):
    refusal('import intruder2\n', allow=['intruder'])
    refusal('import intruder\n', allow=['intruder2', 'intrude'])
    assert not intruder.exists()


# What gin files may name.


@pytest.fixture
def borrowed(monkeypatch):
    """Makes `train.schedules` import modules from outside, as most modules do."""
    for module in (os, tempfile, np):
        monkeypatch.setattr(schedules, module.__name__, module, raising=False)


VALUES = [
    'A = @{0}',
    'A = @{0}()',
    'A = @scope/{0}()',
    'A = @sco.pe/deeper/{0}()',
    'A = (@{0})',
    'A = [1, (2, @{0}())]',
    "A = {{'a': {{'b': @{0}}}}}",
    'A = {{@{0}: 1}}',
    "A = {{'a': @{0}(), 'a': 1}}",
    'A = \\\n  @{0}()',
    'A = [\n  1,  # one\n  @{0}(),\n]',
    'A = @{0}()\nB = %A\ntrain.schedules.create_learning_rate_scheduler.factors = %B',
    'train.schedules.create_learning_rate_scheduler.factors = @{0}()',
    'scope/train.schedules.create_learning_rate_scheduler.factors = @{0}()',
    'train.schedules.create_learning_rate_scheduler:\n  warmup_steps = 1\n  factors = @{0}()',
    'A = @one/gin.singleton()\none/gin.singleton.constructor = @{0}',
    'A/gin.macro.value = @{0}()',
    'gin.macro.value = @{0}()',
]
TARGETS = ['{0}.x = 1', 'scope/{0}.x = 1', '{0}:\n  x = 1']


@pytest.mark.parametrize('form', VALUES + TARGETS)
def test_imports_of_allowed_modules_are_refused_in_every_position(refusal, borrowed, form):
    message = refusal(
        f'{DYNAMIC}import train.schedules\n{form.format("train.schedules.os.getcwd")}\n',
    )
    assert 'is refused' in message
    assert 'posix' in message


@pytest.mark.parametrize(
    ('module', 'path', 'origin'),
    [
        ('train.schedules', 'os.system', 'posix'),
        ('train.schedules', 'os', 'builtins'),
        ('train.schedules', 'tempfile.TemporaryFile', 'tempfile'),
        ('train.schedules', 'tempfile._os.remove', 'posix'),
        ('train.schedules', 'numpy.save', 'numpy'),
        ('train.schedules', 'gin.parse_config', 'gin.config'),
        ('train.data.baselines', 'zlib.compress', 'zlib'),
        ('train.optimizers', 'dataclasses.dataclass', 'dataclasses'),
        ('train.optimizers', 'Optimizer.__base__', 'builtins'),
        ('train.optimizers', 'Optimizer.__subclasses__', 'builtins'),
        ('train.schedules', 'nearest.__class__', 'builtins'),
        ('train.schedules', 'nearest.__code__.replace', 'builtins'),
        ('train.schedules', 'nearest.__globals__', 'builtins'),
        ('train.schedules', 'nearest.__globals__.get', 'builtins'),
        ('train.schedules', '__builtins__', 'builtins'),
        ('train.schedules', '__dict__.get', 'builtins'),
        ('train.schedules', '__loader__.get_data', '_frozen_importlib_external'),
        ('train.schedules', '__spec__.loader.exec_module', '_frozen_importlib_external'),
        ('partitioning.rules.resolve', 'dataclasses.sys.exit', 'sys'),
        ('jax._src.xla_bridge', 'os.system', 'posix'),
        ('flax.io', 'shutil.rmtree', 'shutil'),
    ],
)
def test_attributes_outside_the_allowed_packages_are_refused(
    refusal, borrowed, module, path, origin
):
    message = refusal(f'{DYNAMIC}import {module}\nA = @{module}.{path}\n')
    assert f"run.gin:3: '{module}.{path}', which belongs to '{origin}', is refused" in message


@pytest.mark.parametrize(
    'statements',
    [
        'from train.schedules import os\nA = @os.getcwd()',
        'from train.schedules import os as jax\nA = @jax.getcwd()',
        'import train.schedules.os as o\nA = @o.getcwd()',
        'import train.schedules as t\nA = @t.os.getcwd()',
        'from train import schedules as macro\nA = @macro.os.getcwd()',
        'import train.schedules as gin\nA = @gin.os.getcwd()',
    ],
)
def test_aliases_to_outside_modules_are_refused(refusal, borrowed, statements):
    message = refusal(DYNAMIC + statements + '\n')
    assert 'is refused' in message or 'cannot import' in message


def test_a_name_cannot_stand_for_two_modules(refusal):
    # jax._src.shard_map imports math.prod, and jax.numpy defines its own prod.
    assert importlib.import_module('jax._src.shard_map').prod is math.prod
    message = refusal(
        f"""
        {DYNAMIC}
        import jax._src.shard_map as m
        A = @m.prod
        import jax.numpy as m
        """
    )
    assert 'm.prod' in message or "'m'" in message


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


DANGEROUS = {
    'unpickle bytes of the file': """
        import jax.experimental.serialize_executable as escape1
        escape1.deserialize_and_load.serialized = {pickled}
        escape1.deserialize_and_load.in_tree = None
        escape1.deserialize_and_load.out_tree = None
        train.train.train.seed = @escape1.deserialize_and_load()
        """,
    'unpickle another file': """
        import jax.numpy as escape2
        escape2.load.file = '{file}'
        escape2.load.allow_pickle = True
        train.train.train.seed = @escape2.load()
        """,
    'evaluate text': """
        import jax._src.debugger.core as escape3
        import jax._src.debugger.cli_debugger as escape4
        escape3.DebuggerFrame.filename = ''
        escape3.DebuggerFrame.locals = {{}}
        escape3.DebuggerFrame.globals = {{}}
        escape3.DebuggerFrame.code_context = ''
        escape3.DebuggerFrame.source = []
        escape3.DebuggerFrame.lineno = 1
        escape3.DebuggerFrame.offset = 1
        escape4.CliDebugger.frames = [@escape3.DebuggerFrame()]
        escape4.CliDebugger.thread_id = 0
        escape4.CliDebugger.evaluate.self = @escape4.CliDebugger()
        escape4.CliDebugger.evaluate.expr = "open('{trace}', 'w')"
        train.train.train.seed = @escape4.CliDebugger.evaluate()
        """,
    'use the checks to import a refused module': """
        import train.config.check as escape6
        import train.config.parse as escape7
        escape7.read_bindings.bindings = ['import wave']
        escape6.import_modules.statements = @escape7.read_bindings()
        train.train.train.seed = @escape6.import_modules()
        """,
    'delete a folder': """
        import flax.io as escape5
        escape5.rmtree.path = '{folder}'
        train.train.train.seed = @escape5.rmtree()
        """,
}


@pytest.mark.parametrize('how', DANGEROUS)
def test_functions_of_allowed_packages_that_run_code_are_refused(tmp_path, refusal, how):
    trace, file, folder = tmp_path / 'trace', tmp_path / 'payload.npy', tmp_path / 'folder'
    folder.mkdir()
    np.save(file, np.array([Payload(trace)], object), allow_pickle=True)
    statements = textwrap.dedent(DANGEROUS[how]).format(
        pickled=pickle.dumps(Payload(trace)), trace=trace, file=file, folder=folder
    )
    refusal(f'{DYNAMIC}import train.train\n{statements}')
    assert not trace.exists()
    assert folder.exists()


@pytest.mark.parametrize(
    'statements',
    [
        'import optax\nA = @optax.adamw\noptax.adamw.b1 = 0.5',
        'import optax\nA = @scope/optax.lion()\nscope/optax.lion.b2 = 0.9',
        'from optax import contrib\nA = @contrib.muon',
        'import optax as o\nA = [@o.sgd, {"a": @o.clip}]',
        'import train.schedules\nA = @train.schedules.create_learning_rate_scheduler()',
        'import train.schedules as s\ns.create_learning_rate_scheduler:\n  warmup_steps = 3',
        'import partitioning\nA = @partitioning.PjitPartitioner()',
        'import flax.linen\nA = @flax.linen.initializers.lecun_normal()',
        'import jax.nn\nA = @jax.nn.gelu',
        'import train.optimizers\nA = @one/gin.singleton()\n'
        'one/gin.singleton.constructor = @train.optimizers.Optimizer',
    ],
)
def test_dynamic_registration_allows_any_member_of_the_allowed_packages(load, statements):
    load(f'{DYNAMIC}{statements}\n')


def test_bindings_with_dynamic_registration_have_an_effect(load):
    load(
        f"""
        {DYNAMIC}
        import optax
        import train.optimizers
        train.optimizers.Optimizer.transform = @optax.sgd
        train.optimizers.Optimizer.learning_rate = 0.5
        train.optimizers.Optimizer.clip_norm = None
        optax.sgd.nesterov = True
        optax.sgd.momentum = 0.0
        """
    )
    updates, _ = (
        Optimizer().build().update({'w': jnp.ones(2)}, Optimizer().build().init({'w': jnp.ones(2)}))
    )
    np.testing.assert_allclose(updates['w'], -0.5)


# The file that was checked is the file that is run.


def test_a_package_on_the_python_path_does_not_replace_a_checked_file(
    tmp_path, monkeypatch, intruder
):
    # gin also looks for `recipes/run.gin` inside a Python package `recipes`.
    package, folder = tmp_path / 'site' / 'recipes', tmp_path / 'search' / 'recipes'
    package.mkdir(parents=True)
    folder.mkdir(parents=True)
    (package / '__init__.py').write_text('')
    (package / 'run.gin').write_text('import intruder\ntrain.seed = 1\n')
    (folder / 'run.gin').write_text('train.seed = 2\n')
    monkeypatch.syspath_prepend(str(package.parent))
    load_config(['recipes/run.gin'], search_paths=[str(folder.parent)])
    assert not intruder.exists()
    assert gin.get_bindings('train.train')['seed'] == 2
