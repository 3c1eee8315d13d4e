"""T5X's import lines and names, as its files write them."""

import inspect
from pathlib import Path

import gin
import pytest
from gin_fixtures import load_config

from partitioning.partitioner.t5x_settings import T5xSettings
from train.errors import ConfigError
from train.gin.checks import is_gone
from train.gin.configurables import listed_names, register, register_all
from train.t5x.modules import ALIASES

register_all()
pytestmark = pytest.mark.core

DYNAMIC = 'from __gin__ import dynamic_registration\n'


@pytest.fixture
def write(tmp_path):
    """Writes gin files by name, and returns a function that loads some of them with flags."""

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f'{name}.gin').write_text(text)
        return lambda *files, flags=(): load_config(
            [f'{name}.gin' for name in files], flags, [str(tmp_path)]
        )

    return write


MODEL = DYNAMIC + (
    'import seqio\nimport t5.data.mixtures\nfrom t5x.examples.t5 import network\n'
    'VOCABULARY = @seqio.ByteVocabulary()\n'
    'network.T5Config:\n  vocab_size = 384\n  emb_dim = 768\n'
)


def setting(name):
    return gin.query_parameter(name)


def test_a_file_without_imports_names_what_an_earlier_file_imports(write):
    load = write(model=MODEL, small='network.T5Config.emb_dim = 512\n')
    load('model', 'small')
    assert setting('train.t5x.network.T5Config.emb_dim') == 512
    gin.clear_config()
    with pytest.raises(ConfigError, match=r"small\.gin:1: no configurable 'network\.T5Config'"):
        load('small')


def test_imports_without_dynamic_registration(write):
    load = write(
        model=MODEL, small='from t5x.examples.t5 import network\nnetwork.T5Config.emb_dim = 1'
    )
    load('model', 'small')
    assert setting('train.t5x.network.T5Config.emb_dim') == 1


@pytest.mark.parametrize(
    'flag', ['network.T5Config.emb_dim=64', 'T5Config.emb_dim=64', 't5.network.T5Config.emb_dim=64']
)
def test_flags_name_what_the_files_import(write, flag):
    write(model=MODEL)('model', flags=[flag])
    assert setting('train.t5x.network.T5Config.emb_dim') == 64


def rules(module, dims):
    text = f'from {module} import partitioning\n'
    return f'{DYNAMIC}{text}partitioning.standard_logical_axis_rules.{RULES} = {dims}\n'


RULES = 'activation_partitioning_dims'


def test_an_alias_of_two_modules(write):
    """Each file means its own import. A name without an import is ambiguous, as in T5X."""
    load = write(dense=rules('t5x', 1), moe=rules('t5x.contrib.moe', 2))
    ours = f'partitioning.standard_logical_axis_rules.{RULES}'
    experts = f'partitioning.partitioner.moe.standard_logical_axis_rules.{RULES}'
    load('dense', 'moe')
    assert (setting(ours), setting(experts)) == (1, 2)
    gin.clear_config()
    with pytest.raises(ConfigError, match=r'ambiguous: write one of t5x\.contrib\.moe\.partit'):
        load('dense', 'moe', flags=[f'{ours}=3'])
    gin.clear_config()
    load('dense', 'moe', flags=[f'moe.{ours}=3'])
    assert (setting(ours), setting(experts)) == (1, 3)
    gin.clear_config()
    load('moe', flags=[f'{ours}=3'])
    assert setting(experts) == 3


def test_names_of_t5x_do_not_make_plain_names_ambiguous(write):
    """`CheckpointConfig`, `chain` and `train` are also names of T5X."""
    text = 'from t5x import utils\nfrom t5x import optimizers\nimport __main__ as train_script\n'
    text += 'utils.CheckpointConfig.save = None\noptimizers.chain.transformations = []\n'
    load = write(
        t5x=DYNAMIC + text + 'train_script.train.total_steps = 1\n',
        plain='CheckpointConfig.period = 3\nchain.transformations = []\ntrain.config = None\n',
    )
    load('t5x')
    gin.clear_config()
    load('plain')
    assert setting('train.checkpoints.CheckpointConfig.period') == 3
    assert setting('train.running.training.train.config') is None
    gin.clear_config()
    load('t5x', flags=['CheckpointConfig.restore=None'])
    assert setting('train.t5x.checkpoint_configs.CheckpointConfig.restore') is None


def test_the_script_is_what_its_function_is(write):
    load = write(
        run=DYNAMIC + 'import __main__ as script\nscript.evaluate.output_dir = "x"\n'
        'script.train.total_steps = 3\n'
    )
    load('run')
    assert setting('train.t5x.eval_script.evaluate.output_dir') == 'x'
    assert setting('train.t5x.train_script.train.total_steps') == 3


def test_modules_of_tasks_are_not_imported(write, intruder):
    text = 'import t5.data.mixtures\nimport t5x.contrib.gpu.scripts_gpu.seqio_tasks\n'
    write(run=DYNAMIC + text + 'import dummy_wikipedia_seqio\nA = 1\n')('run')
    assert setting('A/gin.macro.value') == 1
    load = write(run=DYNAMIC + text + 'A = @t5.data.mixtures.load()\n')
    with pytest.raises(ConfigError, match=r"run\.gin:4: 't5\.data\.mixtures\.load'.*no equivalent"):
        load('run')
    load = write(run=DYNAMIC + 'import intruder\nA = 1\n')
    with pytest.raises(ConfigError, match='gin_allow=intruder'):
        load('run')
    assert not intruder.exists()


def test_missing_values_are_reported_together(write):
    load = write(
        model=MODEL + 'STEPS = %gin.REQUIRED\nSIZE = %gin.REQUIRED\n'
        'network.T5Config:\n  mlp_dim = %SIZE\n  head_dim = %HEADS\n  num_heads = %STEPS\n'
    )
    with pytest.raises(ConfigError) as error:
        load('model')
    flags = 'add --gin.HEADS=... --gin.SIZE=... --gin.STEPS=...'
    assert '3 settings need values: ' in str(error.value)
    assert sorted(str(error.value).split()[-3:]) == sorted(flags.split()[1:])
    load('model', flags=['HEADS=1', 'SIZE=1', 'STEPS=2'])
    assert setting('STEPS/gin.macro.value') == 2


def test_settings_that_t5x_no_longer_has_are_reported(write, capsys):
    text = 'from t5x import utils\nutils.RestoreCheckpointConfig:\n  use_gda = False\n'
    write(run=DYNAMIC + text + "  mode = 'latest'\n")('run')
    line = 'run.gin:4: utils.RestoreCheckpointConfig.use_gda is gone: '
    assert line in capsys.readouterr().out
    assert setting('train.t5x.checkpoint_configs.RestoreCheckpointConfig.mode') == 'latest'
    gin.clear_config()
    load = write(run=DYNAMIC + text + '  use_gdo = False\n')
    with pytest.raises(ConfigError, match="no parameter 'use_gdo'"):
        load('run')


def test_values_that_are_refused_name_their_place(write):
    from train.gin.parsing import find_place

    text = "from t5x import utils\ntrain/utils.DatasetConfig:\n  split = %SPLIT\nSPLIT = 'x'\n"
    text += "train_eval/utils.DatasetConfig.split = 'y'\nA = [@train/utils.DatasetConfig(), "
    write(run=DYNAMIC + text + '@train_eval/utils.DatasetConfig()]\n')('run', flags=["SPLIT='z'"])
    for message, place in {
        "train/utils.DatasetConfig.split is 'z': no": "--gin.SPLIT='z'",
        "utils.DatasetConfig.split is 'y': no": 'run.gin:6',
        'utils.DatasetConfig.pack is True: no': None,
        'a sentence': None,
    }.items():
        found = find_place(message)
        assert found is place is None or found.endswith(place)


def test_a_submesh_decides_over_a_number_of_partitions(write, capsys):
    """T5X only logs that both are set, as a run and the files that include it often do."""
    text = 'from t5x import partitioning\nN = 1\npartitioning.PjitPartitioner:\n'
    text += '  num_partitions = %N\n  model_parallel_submesh = (1, 1, 1, 2)\n'
    write(run=DYNAMIC + text)('run')
    assert gin.get_configurable('partitioning.PjitPartitioner')().mesh.shape['model'] == 2
    assert 'num_partitions=1 has no effect' in capsys.readouterr().out


# Every name and parameter that T5X's gin files bind has a counterpart.


NAMES = [
    line.partition(' =')
    for line in (Path(__file__).parent / 't5x_data/gin_names.txt').read_text().splitlines()
    if line and not line.startswith('#')
]


@pytest.mark.parametrize('name, parameters', [(n, p.split()) for n, _, p in NAMES])
def test_every_name_that_t5x_files_bind_exists(name, parameters):
    ours = ALIASES.translate(name.replace(' ', '.'))
    assert ours in listed_names()
    found = register(ours)
    known = inspect.signature(found.wrapped).parameters.keys()
    if ours.endswith('PjitPartitioner'):
        known |= T5xSettings.__annotations__.keys()
    missing = [p for p in parameters if p not in known and not is_gone(found, p, ALIASES)]
    assert not missing
