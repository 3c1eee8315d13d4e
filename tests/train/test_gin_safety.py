"""gin files may import and name only what is on the list, and nothing else is run."""

import sys

import gin
import pytest
from gin_fixtures import load_config

from train.errors import ConfigError
from train.gin.checks import check_listed
from train.gin.configurables import BY_MODULE, register_all
from train.gin.parsing import read_statements
from train.t5x.modules import ALIASES

register_all()
pytestmark = [pytest.mark.core, pytest.mark.smoke]

DYNAMIC = 'from __gin__ import dynamic_registration\n'

# Lines that would run code, load code, or touch files. A '|' separates lines.

HOSTILE = """
# pickles
from jax._src import pickle_util | A = @pickle_util.loads()
from jax.experimental.colocated_python import serialization | A = @serialization._deserialize()
import jax.numpy | A = @jax.numpy.load() | jax.numpy.load.allow_pickle = True
import numpy | A = @numpy.load()
import pickle | A = @pickle.loads()
from flax import serialization | A = @serialization.msgpack_restore()
import jax.export | A = @jax.export.deserialize()
from jax._src.lib import xla_client | A = @xla_client.Client

# native libraries
from jax._src import xla_bridge | A = @xla_bridge.register_plugin()
import ctypes | A = @ctypes.CDLL()
import numpy | A = @numpy.ctypeslib.load_library()
import jax.ffi | A = @jax.ffi.register_ffi_target()

# files
import partitioning | A = @partitioning.Plan.save() | partitioning.Plan.save.path = '/etc/hosts'
from flax.training import checkpoints | A = @checkpoints.save_checkpoint()
import jax.profiler | A = @jax.profiler.start_trace()
import jax.numpy | A = @jax.numpy.save()
import pathlib | A = @pathlib.Path.write_text()
import tensorstore | A = @tensorstore.open()
from etils import epath | A = @epath.Path.unlink
import orbax.checkpoint | A = @orbax.checkpoint.Checkpointer.restore
import tensorboardX | A = @tensorboardX.SummaryWriter()
from train.data.text import files | A = @files.open_file
from train.reporting import writers | A = @writers.open_writers()
from train.data import record | A = @record.write_record()
from train.checkpoints import Checkpoints | A = @Checkpoints.save
from train import checkpoints | A = @checkpoints.Checkpoints()

# processes, signals, sockets
import os | A = @os.system()
import os as jax | A = @jax.system()
import subprocess | A = @subprocess.check_output()
import urllib.request | A = @urllib.request.urlopen()
from train import command | A = @command.run()
from train.cli import command | A = @command.configure()
import jax.distributed | A = @jax.distributed.initialize()
from train.processes import joining | A = @joining.join_processes()

# imports and evaluated text
import importlib | A = @importlib.import_module()
import builtins | A = @builtins.exec()
import operator | A = @operator.attrgetter()
from train.data.text import files | A = @files.needed() | files.needed.package = 'antigravity'
from train.gin import checks | A = @checks.import_modules()
from train.gin import load | A = @load.load_config()
from train.gin.configurables import importlib | A = @importlib.import_module()
from jax._src.debugger import cli_debugger | A = @cli_debugger.CliDebugger.evaluate
import jax.tools.jax_to_ir | A = @jax.tools.jax_to_ir.main()
import antigravity

# settings and hooks of this process
import jax | A = @jax.config.update()
import jax | jax.config.jax_compilation_cache_dir = '/tmp'
import jax.monitoring | A = @jax.monitoring.register_event_listener()
from absl import flags | A = @flags.FLAGS
import jax | A = @jax.pure_callback()
import jax.debug | A = @jax.debug.callback()

# gin itself
import gin | A = @gin.parse_config()
from gin import config | A = @config.external_configurable()
A = @gin.external_configurable() | gin.external_configurable.name_or_fn = @gin.parse_config
from train.gin import configurables | A = @configurables._register()
from __gin__ import unknown_feature

# chains of attributes that begin at a listed name
import optax | A = @optax.adamw.__globals__
import optax | A = @optax.adamw.__globals__.get() | optax.adamw.__globals__.get.key = 'os'
import optax | optax.adamw.__code__.replace.co_code = b'0'
import optax | A = @optax.adamw.__class__
from train import optimizers | A = @optimizers.Optimizer.__base__.__subclasses__()
from train import optimizers | A = @optimizers.inspect.os.system()
import partitioning | A = @partitioning.__loader__.get_data()
import jax.nn | A = @jax.nn.__spec__.loader.exec_module()
import flax.linen | A = @flax.linen.Dense.__init__.__globals__
import flax.linen | A = @flax.linen.Module.__getattr__
import jax.numpy | A = @jax.numpy.float32.__class__.__base__
import flax.traverse_util | flax.traverse_util.t_identity.get = 1
import flax | flax.traverse_util.t_identity.a.b.c = 1
from train import data | A = @data.record.write_record()
from train.t5x import datasets | A = @datasets.seqio.dataclasses.sys.exit()
from train.t5x import train_script | A = @train_script.inspect.os.system()

# without imports, and inside other values
A = @os.system()
A = @eval() | eval.source = '1'
A = [1, {'a': (@open(),)}]
A = @scope/subprocess.run() | scope/subprocess.run.args = 'true'
TrainConfig.hooks = [@os._exit]
Optimizer.transform = @jax.config.update
A/gin.macro.value = @exec()
one/gin.singleton.constructor = @os.getcwd | A = @one/gin.singleton()
"""
LINES = [line for line in HOSTILE.splitlines() if line and not line.startswith('#')]


@pytest.mark.parametrize('dynamic', ['', DYNAMIC], ids=['plain', 'dynamic'])
@pytest.mark.parametrize('line', LINES)
def test_a_hostile_line_is_refused_in_one_line_and_imports_nothing(
    refusal, tmp_path, line, dynamic
):
    text = dynamic + '\n'.join(part.strip() for part in line.split('|')) + '\n'
    loaded = set(sys.modules)
    message = refusal(text)
    assert message.startswith(('run.gin', '/')) and 'run.gin:' in message
    assert len(message.splitlines()) == 1 and len(message) < 400, message
    new = set(sys.modules) - loaded
    assert not [name for name in new if not name.startswith(tuple(BY_MODULE))], new
    assert gin.config_str().strip() == ''
    with pytest.raises(ConfigError):  # also by the list alone, before jax is imported
        check_listed(read_statements([str(tmp_path / 'run.gin')]), ALIASES)


@pytest.mark.parametrize('name', ['base_url', 'settings', 'config', 'dir', 'save_code', 'key'])
def test_the_account_of_weights_and_biases_and_files_are_not_for_gin(refusal, load, name):
    """Their package would send its key to a `base_url`, and upload the file of a `config`."""
    message = refusal(f"WeightsAndBiasesWriter.{name} = 'https://example.org'\n")
    assert f"'WeightsAndBiasesWriter' has no parameter '{name}'." in message
    load("WeightsAndBiasesWriter.project = 'mine'\nWeightsAndBiasesWriter.tags = ['a']\n")


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
    message = refusal(f'{dynamic}import train.optimizers\n{statement}\n')
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


# What --gin_allow allows.


def test_gin_allow_allows_a_package(load, intruder):
    load(f'{DYNAMIC}import intruder\nA = @intruder.make()\n', allow=['intruder'])
    assert intruder.read_text() == 'intruder'


def test_gin_allow_does_not_allow_packages_with_similar_names(refusal, intruder):
    refusal('import intruder2\n', allow=['intruder'])
    refusal('import intruder\n', allow=['intruder2', 'intrude'])
    assert not intruder.exists()


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('os.getcwd', 'not a function or class'),
        ('os', 'not a function or class'),
        ('make.__globals__', 'not a function or class'),
        ('make.__class__', 'not a function or class'),
        ('Sized.__subclasses__', 'builtins'),
        ('odd.any.thing', 'not a function or class'),
        ('odd', 'arbitrary attributes'),
        ('missing', 'not a function or class'),
    ],
)
def test_an_allowed_package_gives_only_its_own_functions_and_classes(
    refusal, intruder, name, expected
):
    message = refusal(f'{DYNAMIC}import intruder\nA = @intruder.{name}\n', allow=['intruder'])
    assert 'run.gin:3: ' in message and expected in message


@pytest.mark.parametrize('name', ['t_identity.get', 't_identity', 't_identity.a.b'])
def test_objects_with_all_attributes_do_not_stop_the_checks(refusal, name):
    # Each attribute of this object is an object like it, `__wrapped__` included.
    text = f'{DYNAMIC}import flax.traverse_util\nflax.traverse_util.{name}.x = 1\n'
    assert 'is refused' in refusal(text)
    assert 'run.gin:3: ' in refusal(text, allow=['flax'])


# What gin files may name, in every position.

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
    'A = @{0}()\nB = %A\ntrain.optimizers.Optimizer.transform = %B',
    'train.optimizers.Optimizer.transform = @{0}()',
    'scope/train.optimizers.Optimizer.transform = @{0}()',
    'train.optimizers.Optimizer:\n  clip_norm = 1\n  transform = @{0}()',
    'A = @one/gin.singleton()\none/gin.singleton.constructor = @{0}',
    'A/gin.macro.value = @{0}()',
    'gin.macro.value = @{0}()',
]
TARGETS = ['{0}.x = 1', 'scope/{0}.x = 1', '{0}:\n  x = 1']


@pytest.mark.parametrize('form', VALUES + TARGETS)
def test_names_that_are_not_listed_are_refused_in_every_position(refusal, form):
    name = 'train.optimizers.inspect.os.getcwd'
    message = refusal(f'{DYNAMIC}import train.optimizers\n{form.format(name)}\n')
    assert f'{name} is not on the list' in message


def test_included_files_and_macros_are_checked(refusal, tmp_path):
    (tmp_path / 'b.gin').write_text('A = 1\nA = @os.getcwd()\n')
    assert 'b.gin:2: ' in refusal("include 'b.gin'\n", search_paths=[str(tmp_path)])
    for macro in ('os.environ', 'gin.REQUIRED.__class__', 'optax.adamw', 'scope/os.sep'):
        assert f'%{macro} has no value' in refusal(f'A = %{macro}\n')


@pytest.mark.parametrize('form', [form for form in VALUES + TARGETS if '\n' not in form])
def test_flags_are_checked_like_files(refusal, form):
    text = f'{DYNAMIC}import train.optimizers\n'
    message = refusal(text, form.format('train.optimizers.inspect.os.getcwd').replace(' = ', '='))
    assert message.startswith('--gin.')


@pytest.mark.parametrize(
    'statements',
    [
        'from train.optimizers import inspect\nA = @inspect.getmodule()',
        'from train.optimizers import inspect as jax\nA = @jax.getmodule()',
        'import train.optimizers.inspect as i\nA = @i.getmodule()',
        'import train.optimizers as t\nA = @t.inspect.getmodule()',
        'from train import optimizers as macro\nA = @macro.inspect.getmodule()',
        'from train import optimizers as optax\nA = @optax.adamw',
        'import train.optimizers as gin\nA = @gin.Optimizer',
    ],
)
def test_aliases_do_not_hide_a_module(refusal, statements):
    assert len(refusal(DYNAMIC + statements + '\n').splitlines()) == 1


def test_a_name_cannot_stand_for_two_modules(refusal):
    text = f'{DYNAMIC}import optax as m\nA = @m.scale()\nimport jax.nn as m\n'
    assert "'m' already stands for optax" in refusal(text)


# The file that was checked is the file that is run.


def test_a_package_on_the_python_path_does_not_replace_a_checked_file(
    tmp_path, monkeypatch, intruder
):
    # gin also looks for `recipes/run.gin` inside a Python package `recipes`.
    package, folder = tmp_path / 'site' / 'recipes', tmp_path / 'search' / 'recipes'
    package.mkdir(parents=True)
    folder.mkdir(parents=True)
    (package / '__init__.py').write_text('')
    (package / 'run.gin').write_text('import intruder\nTrainConfig.seed = 1\n')
    (folder / 'run.gin').write_text('TrainConfig.seed = 2\n')
    monkeypatch.syspath_prepend(str(package.parent))
    load_config(['recipes/run.gin'], search_paths=[str(folder.parent)])
    assert not intruder.exists()
    assert gin.get_bindings('TrainConfig')['seed'] == 2
