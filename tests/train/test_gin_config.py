"""gin files: what they may do, what is wrong with them and where, and which setting wins."""

import importlib
import math
import os
import pickle
import sys
import tempfile
import textwrap
from pathlib import Path

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import train.configurables  # noqa: F401  # registered once, before any test
from partitioning import TrainState, unbox
from train import schedules
from train.config import load_config
from train.config.load import REPOSITORY
from train.data.text.sources import TextFiles
from train.errors import ConfigError
from train.models.transformer import Transformer, TransformerConfig
from train.optimizers import Optimizer

pytestmark = pytest.mark.core

DYNAMIC = 'from __gin__ import dynamic_registration\n'


@pytest.fixture(autouse=True)
def _own_registry():
    """What one test registers with gin is not there for the next."""
    registry, inverse = gin.config._REGISTRY, gin.config._INVERSE_REGISTRY
    before = {selector for selector, _ in registry.items()}
    yield
    for selector, configurable in list(registry.items()):
        if selector not in before:
            registry.pop(selector)
            inverse.pop(configurable.wrapped, None)


@pytest.fixture
def load(tmp_path):
    """Writes a gin file, `run.gin`, and loads it with bindings."""

    def load(text, *bindings, **options):
        path = tmp_path / 'run.gin'
        path.write_text(textwrap.dedent(text))
        load_config([str(path)], bindings, **options)

    return load


@pytest.fixture
def refusal(load):
    """The message with which a gin file is refused."""

    def refusal(text, *bindings, **options):
        with pytest.raises(ConfigError) as error:
            load(text, *bindings, **options)
        return str(error.value)

    return refusal


@pytest.fixture
def intruder(tmp_path, monkeypatch):
    """A module outside the allowed packages; its import creates the file that this returns."""
    folder, trace = tmp_path / 'modules', tmp_path / 'trace'
    folder.mkdir()
    names = ('intruder', 'train_intruder', 'intruder2')
    for name in names:
        (folder / f'{name}.py').write_text(
            f'open({str(trace)!r}, "a").write({name!r})\ndef make(size=1):\n    return size\n'
        )
    monkeypatch.syspath_prepend(str(folder))
    yield trace
    for name in names:
        sys.modules.pop(name, None)


def seed():
    return gin.get_bindings('train.train')['seed']


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
def test_an_import_from_elsewhere_is_refused_and_not_run(refusal, intruder, statement, dynamic):
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


def test_an_import_by_a_flag_is_refused(refusal, intruder):
    assert 'is refused' in refusal('', 'import intruder')
    assert 'is refused' in refusal('', 'A = 1\nimport intruder')
    assert not intruder.exists()


def test_nothing_is_imported_before_every_import_is_allowed(refusal, intruder):
    refusal('import intruder\nimport intruder2\n', allow=['intruder'])
    assert not intruder.exists()


def test_gin_allow_lets_a_package_in(load, intruder):
    load(f'{DYNAMIC}import intruder\nA = @intruder.make()\n', allow=['intruder'])
    assert intruder.read_text() == 'intruder'


def test_gin_allow_lets_in_no_other_package_of_a_similar_name(refusal, intruder):
    refusal('import intruder2\n', allow=['intruder'])
    refusal('import intruder\n', allow=['intruder2', 'intrude'])
    assert not intruder.exists()


# What gin files may name.


@pytest.fixture
def borrowed(monkeypatch):
    """Makes `train.schedules` a module that imports more than it defines, as most modules do."""
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
def test_what_a_module_merely_imports_is_refused_in_every_position(refusal, borrowed, form):
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
        ('train.data.yardsticks', 'zlib.compress', 'zlib'),
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
def test_no_path_leads_out_of_the_allowed_packages(refusal, borrowed, module, path, origin):
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
def test_an_alias_leads_nowhere_else(refusal, borrowed, statements):
    message = refusal(DYNAMIC + statements + '\n')
    assert 'is refused' in message or 'cannot import' in message


def test_a_name_bound_twice_cannot_hide_what_it_named_first(refusal):
    # jax._src.shard_map imports math.prod; jax.numpy has a prod of its own.
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
    """Pickled, it creates a file when it is read again."""

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
    'import what is refused, by the checks themselves': """
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
def test_dynamic_registration_names_anything_of_the_allowed_packages(load, statements):
    load(f'{DYNAMIC}{statements}\n')


def test_bindings_of_dynamic_registration_are_used(load):
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
    assert seed() == 2


def test_search_paths_of_an_earlier_call_are_forgotten(tmp_path):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / 'same.gin').write_text(f'train.seed = {number}\n')
        load_config(['same.gin'], search_paths=[str(folder)])
        assert seed() == number
        gin.clear_config()


# What is wrong, and where.


@pytest.mark.parametrize(
    ('text', 'line', 'said'),
    [
        ('\ntrainn.seed = 1', 2, "no configurable 'trainn'. Did you mean 'train'?"),
        ('A = @optax.adamww', 1, "no configurable 'optax.adamww'. Did you mean 'optax.adamw'?"),
        ('A = [1,\n  @Transfomer()]', 1, "'Transfomer'. Did you mean 'Transformer'?"),
        ('TextFile:\n  pattern = 1', 1, "'TextFile'. Did you mean 'TextFiles'?"),
        ('train.seedd = 1', 1, "'train' has no parameter 'seedd'. Did you mean 'seed'?"),
        ('train:\n  seed = 1\n  log_perod = 2', 3, "'log_perod'. Did you mean 'log_period'?"),
        (
            'TransformerConfig.num_layer = 1',
            1,
            "'TransformerConfig' has no parameter 'num_layer'. Did you mean 'num_layers'?",
        ),
        ('CheckpointConfig.zzz = 1', 1, 'It has period, keep'),
        ('train.seed = %SEED', 1, '%SEED has no value. Add --gin.SEED=... or a line SEED = ...'),
        ('SEED = 1\ntrain.seed = [%SEDE]', 2, "%SEDE has no value. Did you mean 'SEED'?"),
        ('import train.shedules', 1, "cannot import 'train.shedules'"),
        ("# a\ninclude 'nowhere.gin'", 2, 'no such gin file: nowhere.gin'),
    ],
)
def test_a_name_that_does_not_exist(refusal, text, line, said):
    message = refusal(text + '\n')
    assert f'run.gin:{line}: ' in message
    assert said in message


def test_an_ambiguous_name_asks_for_more_of_it(refusal):
    def twin():
        pass

    gin.external_configurable(twin, name='twin', module='train.one')
    gin.external_configurable(lambda: None, name='twin', module='train.two')
    message = refusal('A = @twin\n')
    assert "'twin' may be any of train.one.twin, train.two.twin" in message


@pytest.mark.parametrize(
    ('text', 'lines', 'said'),
    [
        ('A = 1\nB = [1,\n  2\nC = 3\n', (2, 3, 4, 5), ''),
        ('A = 1\nB = (1, 2]\n', (2,), ''),
        ('A = 1]\n', (1,), ''),
        ("A = 1\nB = 'abc\nC = 3\n", (2,), ''),
        ("A = 1\nB = '''abc\nC = 3\n", (2,), 'quote'),
        ('A = 1\nB =\nC = 3\n', (2,), ''),
        ('A = 1\nB\n', (2,), ''),
        ('A = 1\ntrain.seed 3\n', (2,), ''),
        ('train:\nseed = 1\n', (2,), 'ndent'),
        ('train:\n  seed = 1\n    log_period = 2\n', (3,), ''),
        ('train:\n    seed = 1\n  log_period = 2\n', (3,), 'indent'),
        ('train:\n', (1, 2), 'ndent'),
        ('A = 1\n$B = 1\n', (2,), ''),
        ('A = 1 2\n', (1,), ''),
        ('include configs/a.gin\n', (1,), ''),
    ],
)
def test_a_syntax_error_tells_the_line(refusal, text, lines, said):
    message = refusal(text)
    assert any(f'run.gin:{line}: syntax error: ' in message for line in lines), message
    assert said in message
    assert '\n' not in message


def test_text_without_quotes_in_a_file_is_said_in_words(refusal):
    message = refusal('A = 1\nB = hello\n')
    assert 'run.gin:2' in message
    assert 'hello' in message
    assert ' at 0x' not in message, 'the address of a Python object says nothing to a user'


@pytest.mark.parametrize('value', ['/tmp/run', 'hello', 'gs://bucket/run', '', '[1,', 'a b'])
def test_a_flag_whose_text_has_no_quotes_shows_how_to_write_it(refusal, value):
    message = refusal('A = %MODEL_DIR\n', f'MODEL_DIR={value}')
    assert message.startswith(f'--gin.MODEL_DIR={value}: ')
    assert f'--gin.MODEL_DIR="\'{value}\'"' in message


def test_a_flag_for_a_macro_that_nobody_uses(refusal):
    message = refusal('MODEL_DIR = 1\nA = %MODEL_DIR\n', 'MODLE_DIR=2')
    assert message == (
        "--gin.MODLE_DIR=2: no gin file uses a macro 'MODLE_DIR'. Did you mean 'MODEL_DIR'?"
    )


@pytest.mark.parametrize(
    ('binding', 'said'),
    [
        ('trainn.seed=1', "no configurable 'trainn'. Did you mean 'train'?"),
        ('train.sed=1', "'train' has no parameter 'sed'. Did you mean 'seed'?"),
        ('train.seed=%NOWHERE', '%NOWHERE has no value'),
        ('train.seed=@nowhere', "no configurable 'nowhere'"),
    ],
)
def test_a_wrong_name_in_a_flag(refusal, binding, said):
    message = refusal('', binding)
    assert message.startswith(f'--gin.{binding}: ')
    assert said in message


def test_no_file_at_all():
    with pytest.raises(ConfigError, match='no gin file: add --gin_file='):
        load_config([])


def test_a_missing_file_lists_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config(['nowhere.gin'], search_paths=['some/folder'])
    message = str(error.value)
    assert 'no such gin file: nowhere.gin' in message
    assert '--gin_search_paths' in message
    for place in (tmp_path, tmp_path / 'some/folder', REPOSITORY):
        assert str(place) in message


def test_a_file_that_includes_itself(tmp_path):
    one, two = tmp_path / 'one.gin', tmp_path / 'two.gin'
    one.write_text(f"A = 1\ninclude '{two}'\n")
    two.write_text(f"include '{one}'\n")
    with pytest.raises(ConfigError, match=r'two\.gin:1: .*one\.gin includes itself'):
        load_config([str(one)])


def test_a_file_may_be_included_twice(tmp_path, load):
    (tmp_path / 'shared.gin').write_text('train.seed = 3\n')
    load("include 'shared.gin'\ninclude 'shared.gin'\n", search_paths=[str(tmp_path)])
    assert seed() == 3


def test_a_file_that_is_no_text(tmp_path):
    file = tmp_path / 'binary.gin'
    file.write_bytes(b'\xff\xfe\x00\x01')
    with pytest.raises(ConfigError, match=r'binary\.gin'):
        load_config([str(file)])


@pytest.mark.parametrize('statement', ['import optax.adamw', 'from train.schedules import nearest'])
def test_an_import_of_what_is_no_module(refusal, statement):
    message = refusal(f'{statement}\n')
    assert 'run.gin:1: ' in message


@pytest.mark.parametrize(
    'statement', ['train.seed = 1', 'A = @decay_matrices_only', 'TextFiles:\n  pattern = 1']
)
def test_dynamic_registration_asks_for_the_import_it_needs(refusal, statement):
    # A name that is registered is still unknown to a file with dynamic registration.
    message = refusal(f'{DYNAMIC}import optax\n{statement}\n')
    assert 'run.gin:3: ' in message
    assert 'import' in message


@pytest.mark.parametrize(
    'text', ['scope/A = 1\ntrain.seed = %A\n', 'A = 1\ntrain.seed = %scope/A\n']
)
def test_a_macro_of_another_scope_has_no_value(refusal, text):
    message = refusal(text)
    assert 'run.gin:2: ' in message
    assert 'has no value' in message


SCOPED = """
    a/b/TextFiles.pattern = 'x'
    a/CausalLM.source = @a/b/TextFiles()
    a/TextFiles.root = 'y'
    train.task = @a/CausalLM()
"""


def test_a_scope_that_a_reference_enters_takes_bindings_of_anything(load):
    load(SCOPED, "a/JsonLines.field='text'")
    with gin.config_scope('a/b'):
        source = gin.get_configurable(TextFiles)()
    assert (source.pattern, source.root) == ('x', 'y')


@pytest.mark.parametrize('scope', ['a/c', 'b', 'a/b/c'])
def test_a_scope_that_nothing_enters_is_refused(refusal, scope):
    message = refusal(SCOPED + f"    {scope}/TextFiles.exclude = 'z'\n")
    assert f'no reference enters the scope {scope!r}' in message
    assert ':6: ' in message


def test_modules_of_the_users_own_may_enter_scopes(load, refusal, intruder):
    text = 'import intruder\n' + textwrap.dedent(SCOPED)
    load(text + "entirely/TextFiles.exclude = 'z'\n", allow=['intruder'])
    assert "Did you mean 'a/b'" in refusal(
        text + "a/bb/TextFiles.exclude = 'z'\n", allow=['intruder']
    )


def test_a_macro_may_be_set_by_its_long_name(load):
    load('A/macro.value = 3\ntrain.seed = %A\n')
    assert seed() == 3


def test_a_refused_configuration_leaves_nothing_behind(refusal):
    refusal('train.seed = 1\ntrain.seedd = 2\n')
    assert gin.config_str().strip() == ''


# Which setting wins.


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three folders, the first of them the current one."""
    made = [tmp_path / name for name in ('current', 'first', 'second')]
    for folder in made:
        folder.mkdir()
    monkeypatch.chdir(made[0])
    return made


def test_the_current_folder_comes_before_search_paths_in_their_order(folders):
    paths = [str(folders[1]), str(folders[2])]
    for number, folder in reversed(list(enumerate(folders))):
        (folder / 'order.gin').write_text(f'train.seed = {number}\n')
        load_config(['order.gin'], search_paths=paths)
        assert seed() == number
        gin.clear_config()


def test_includes_are_found_by_search_paths(folders):
    (folders[0] / 'main.gin').write_text("include 'parts/seed.gin'\n")
    (folders[2] / 'parts').mkdir()
    (folders[2] / 'parts' / 'seed.gin').write_text('train.seed = 5\n')
    load_config(['main.gin'], search_paths=[str(f) for f in folders[1:]])
    assert seed() == 5


def test_the_repositorys_configs_are_found_from_anywhere(folders):
    load_config(
        ['configs/runs/pretrain.gin'], ["MODEL_DIR='a'", "TEXT='b'"], search_paths=['nowhere']
    )
    assert gin.get_bindings('train.train')['model_dir'] == 'a'


def test_later_files_override_earlier_ones_and_bindings_override_files(tmp_path):
    files = []
    for number in (1, 2):
        files.append(tmp_path / f'{number}.gin')
        files[-1].write_text(f'SEED = {number}\ntrain.seed = %SEED\ntrain.log_period = {number}\n')
    paths = [str(f) for f in files]

    def loaded(files, *bindings):
        load_config(files, bindings)
        values = gin.get_bindings('train.train')
        gin.clear_config()
        return values['seed'], values['log_period']

    assert loaded(paths) == (2, 2)
    assert loaded(paths[::-1]) == (1, 1)
    assert loaded(paths, 'SEED=3') == (3, 2)
    assert loaded(paths, 'train.log_period=4', 'train.log_period=5') == (2, 5)


def test_a_statement_after_an_include_overrides_it(tmp_path, load):
    (tmp_path / 'base.gin').write_text('train.seed = 1\nLOG = 1\ntrain.log_period = %LOG\n')
    load("include 'base.gin'\ntrain.seed = 2\nLOG = 7\n", search_paths=[str(tmp_path)])
    assert gin.get_bindings('train.train') == {'seed': 2, 'log_period': 7}


# The operative configuration.

PLAIN = """
    import train.schedules
    import train.optimizers
    import train.models.transformer

    WIDTH = 32
    TransformerConfig.vocab_size = 300
    TransformerConfig.num_layers = 1
    TransformerConfig.embed_dim = %WIDTH
    TransformerConfig.num_heads = 4
    TransformerConfig.num_kv_heads = 4
    TransformerConfig.head_dim = 8
    TransformerConfig.mlp_dim = %WIDTH
    Transformer.config = @TransformerConfig()
    Optimizer.transform = @optax.adamw
    Optimizer.learning_rate = @warm/create_learning_rate_scheduler()
    warm/create_learning_rate_scheduler.warmup_steps = 7
    optax.adamw.mask = @decay_matrices_only
    TextFiles.pattern = ['a', 'b']
    """
NAMED_BY_MODULE = """
    from __gin__ import dynamic_registration
    import optax
    import train.data.text.sources
    import train.models.transformer as t
    from train import optimizers
    from train import schedules

    WIDTH = 32
    t.TransformerConfig.vocab_size = 300
    t.TransformerConfig.num_layers = 1
    t.TransformerConfig.embed_dim = %WIDTH
    t.TransformerConfig.num_heads = 4
    t.TransformerConfig.num_kv_heads = 4
    t.TransformerConfig.head_dim = 8
    t.TransformerConfig.mlp_dim = %WIDTH
    t.Transformer.config = @t.TransformerConfig()
    optimizers.Optimizer.transform = @optax.contrib.muon
    optimizers.Optimizer.learning_rate = @warm/schedules.create_learning_rate_scheduler()
    warm/schedules.create_learning_rate_scheduler.warmup_steps = 7
    optax.contrib.muon.ns_steps = 3
    train.data.text.sources.TextFiles.pattern = ['a', 'b']
    """


@pytest.mark.parametrize('text', [PLAIN, NAMED_BY_MODULE], ids=['plain', 'dynamic'])
def test_the_operative_configuration_gives_the_same_again(load, tmp_path, text):
    def use():
        model, optimizer, corpus = Transformer(), Optimizer(), TextFiles()
        rates = [float(optimizer.learning_rate(step)) for step in (1, 7, 100)]
        optimizer.build().init({'w': jnp.ones((2, 2)), 'scale': jnp.ones(2)})
        return model.config, corpus, rates

    load(text)
    first = use()
    assert first[0].embed_dim == 32
    saved = tmp_path / 'config.gin'
    saved.write_text(gin.operative_config_str())

    gin.clear_config()
    load_config([str(saved)])
    assert use() == first
    again = tmp_path / 'again.gin'
    again.write_text(gin.operative_config_str())
    assert again.read_text() == saved.read_text()


# The configurations that come with the project.

MODELS = sorted(p.stem for p in (REPOSITORY / 'configs/models').glob('*.gin'))
PRESETS = sorted(p.stem for p in (REPOSITORY / 'configs/partitioning').glob('*.gin'))
RUN = ("MODEL_DIR='nowhere'", "TEXT='nowhere/*.txt'")

# Parameters, from and to. Those of Llama 3 are exact.
SIZES = {
    'tiny': (800_000, 1_000_000),
    '125m': (100e6, 140e6),
    '1b': (1.0e9, 1.4e9),
    '8b': (8_030_261_248, 8_030_261_248),
    '70b': (70_553_706_496, 70_553_706_496),
}

_states = {}


def pretrain(*files, bindings=()):
    """The settings of train() by pretrain.gin and files over it."""
    load_config(['configs/runs/pretrain.gin', *files], [*RUN, *bindings])
    return gin.get_bindings('train.train')


def named_state(model, settings):
    """The abstract state of a model as train() makes it, with names."""
    if model not in _states:
        tx = settings['optimizer'].build()
        tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
        _states[model] = jax.eval_shape(
            lambda key, tokens: TrainState.create(
                settings['model'].init(key, tokens)['params'], tx
            ),
            jax.random.key(0),
            tokens,
        )
    return _states[model]


@pytest.mark.parametrize('model', MODELS)
def test_a_model_has_the_size_it_is_named_for(model):
    settings = pretrain(f'configs/models/{model}.gin')
    params = unbox(named_state(model, settings).params)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    least, most = SIZES[model]
    assert least <= count <= most


@pytest.mark.parametrize('model', MODELS)
def test_a_model_file_decides_the_whole_model(model):
    # pretrain.gin already includes a model; nothing of it is left when another one is chosen.
    chosen = pretrain(f'configs/models/{model}.gin')['model'].config
    gin.clear_config()
    load_config([f'configs/models/{model}.gin'])
    assert chosen == TransformerConfig()


def partitions(model, preset, settings):
    """How many partitions to choose: tensor.gin says that it divides num_kv_heads."""
    if preset == 'three_d':
        return ['FSDP_PARTITIONS=4', 'NUM_PARTITIONS=2']
    if preset != 'tensor':
        return []
    return [f'NUM_PARTITIONS={math.gcd(8, settings["model"].config.num_kv_heads)}']


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize('model', MODELS)
def test_every_model_is_laid_out_by_every_preset(model, preset):
    files = [f'configs/models/{model}.gin', f'configs/partitioning/{preset}.gin']
    settings = pretrain(*files)
    if bindings := partitions(model, preset, settings):
        gin.clear_config()
        settings = pretrain(*files, bindings=bindings)
    partitioner = settings['partitioner']
    state = named_state(model, settings)
    specs = partitioner.get_mesh_axes(state)
    assert partitioner.mesh.size == 8

    arrays = jax.tree_util.tree_leaves_with_path(unbox(state))
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    replicated, per_device, total = {}, 0, 0
    for (path, array), spec in zip(arrays, leaves, strict=True):
        shard = NamedSharding(partitioner.mesh, spec).shard_shape(array.shape)
        size = math.prod(array.shape) * array.dtype.itemsize
        total += size
        per_device += math.prod(shard) * array.dtype.itemsize
        if shard == array.shape and size > 4096:
            replicated[jax.tree_util.keystr(path)] = size
    if preset == 'data_parallel':
        assert per_device == total
    elif preset == 'zero':
        parameters = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(unbox(state.params)))
        assert all(path.startswith('.params') for path in replicated)
        assert per_device == parameters + (total - parameters - 12) / 8 + 12  # three counts
    elif preset == 'tensor':
        # The scales of norms have nothing but 'embed' to be sharded by, which it keeps whole.
        assert all('scale' in path for path in replicated), replicated
        assert sum(replicated.values()) < total / 500
    else:
        assert not replicated
        assert per_device < total / 7


@pytest.mark.parametrize('model', MODELS)
def test_the_tensor_preset_fits_or_says_what_to_change(model):
    settings = pretrain(f'configs/models/{model}.gin', 'configs/partitioning/tensor.gin')
    state = named_state(model, settings)
    if settings['model'].config.num_kv_heads % 8 == 0:
        settings['partitioner'].get_mesh_axes(state)
    else:
        with pytest.raises(ValueError, match=r"'(kv_)?heads'.* does not divide by 8"):
            settings['partitioner'].get_mesh_axes(state)


def test_the_quickstart_loads():
    load_config(['configs/runs/quickstart.gin'], ["MODEL_DIR='nowhere'"])
    settings = gin.get_bindings('train.train')
    assert settings['total_steps'] > 0
    assert isinstance(settings['optimizer'].build(), optax.GradientTransformation)


@pytest.mark.parametrize('missing', ['MODEL_DIR', 'TEXT'])
def test_pretraining_asks_for_what_only_the_user_knows(missing):
    given = [binding for binding in RUN if not binding.startswith(missing)]
    with pytest.raises(ConfigError, match=f'%{missing} has no value. Add --gin.{missing}=...'):
        load_config(['configs/runs/pretrain.gin'], given)


def test_every_size_is_checked():
    assert set(SIZES) == set(MODELS)
    assert set(PRESETS) == {'data_parallel', 'fsdp', 'zero', 'tensor', 'two_d', 'three_d'}
    assert Path(REPOSITORY / 'configs/runs/pretrain.gin').is_file()
