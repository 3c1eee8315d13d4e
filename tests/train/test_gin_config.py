"""gin configuration: which setting wins, and the operative configuration."""

import re

import gin
import jax.numpy as jnp
import pytest
from gin_fixtures import load_config

from train.data.text.sources import TextFiles
from train.gin.text import operative_text
from train.models.transformer import Transformer
from train.optimizers import Optimizer

pytestmark = pytest.mark.core


def seed():
    return gin.get_bindings('TrainConfig')['seed']


# Which setting wins.


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three directories, the first of which is the current directory."""
    made = [tmp_path / name for name in ('current', 'first', 'second')]
    for folder in made:
        folder.mkdir()
    monkeypatch.chdir(made[0])
    return made


def test_the_current_directory_comes_before_the_search_paths(folders):
    paths = [str(folders[1]), str(folders[2])]
    for number, folder in reversed(list(enumerate(folders))):
        (folder / 'order.gin').write_text(f'TrainConfig.seed = {number}\n')
        load_config(['order.gin'], search_paths=paths)
        assert seed() == number
        gin.clear_config()


def test_the_shipped_configs_are_found_from_anywhere(folders):
    load_config(
        ['configs/runs/pretrain.gin'], ["MODEL_DIR='a'", "TEXT='b'"], search_paths=['nowhere']
    )
    assert gin.get_bindings('TrainConfig')['model_dir'] == 'a'


def test_later_files_override_earlier_ones_and_bindings_override_files(tmp_path):
    files = []
    for number in (1, 2):
        files.append(tmp_path / f'{number}.gin')
        files[-1].write_text(
            f'SEED = {number}\nTrainConfig.seed = %SEED\nTrainConfig.log_every = {number}\n'
        )
    paths = [str(f) for f in files]

    def loaded(files, *bindings):
        load_config(files, bindings)
        values = gin.get_bindings('TrainConfig')
        gin.clear_config()
        return values['seed'], values['log_every']

    assert loaded(paths) == (2, 2)
    assert loaded(paths[::-1]) == (1, 1)
    assert loaded(paths, 'SEED=3') == (3, 2)
    assert loaded(paths, 'TrainConfig.log_every=4', 'TrainConfig.log_every=5') == (2, 5)


def test_a_statement_after_an_include_overrides_it(tmp_path, load):
    (tmp_path / 'base.gin').write_text(
        'TrainConfig.seed = 1\nLOG = 1\nTrainConfig.log_every = %LOG\n'
    )
    load("include 'base.gin'\nTrainConfig.seed = 2\nLOG = 7\n", search_paths=[str(tmp_path)])
    assert gin.get_bindings('TrainConfig') == {'seed': 2, 'log_every': 7}


def test_search_paths_of_an_earlier_call_are_forgotten(tmp_path):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / 'same.gin').write_text(f'TrainConfig.seed = {number}\n')
        load_config(['same.gin'], search_paths=[str(folder)])
        assert seed() == number
        gin.clear_config()


# The operative configuration.

PLAIN = """
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
    Optimizer.learning_rate = @warm/optax.warmup_constant_schedule()
    optax.warmup_constant_schedule.init_value = 0.0
    optax.warmup_constant_schedule.peak_value = 0.5
    warm/optax.warmup_constant_schedule.warmup_steps = 7
    optax.adamw.mask = @decay_matrices_only
    TextFiles.pattern = ['a', 'b']
    """
NAMED_BY_MODULE = """
    from __gin__ import dynamic_registration
    import optax
    import train.models.transformer as t
    from train import data
    from train import optimizers

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
    optimizers.Optimizer.learning_rate = @warm/optax.warmup_constant_schedule()
    optax.warmup_constant_schedule.init_value = 0.0
    optax.schedules.warmup_constant_schedule.peak_value = 0.5
    warm/optax.warmup_constant_schedule.warmup_steps = 7
    optax.contrib.muon.ns_steps = 3
    data.TextFiles.pattern = ['a', 'b']
    """


@pytest.mark.parametrize('text', [PLAIN, NAMED_BY_MODULE], ids=['plain', 'dynamic'])
def test_the_operative_configuration_reproduces_itself(load, tmp_path, text):
    def use():
        kinds = (Transformer, Optimizer, TextFiles)
        model, optimizer, corpus = (gin.get_configurable(kind)() for kind in kinds)
        rates = [float(optimizer.learning_rate(step)) for step in (1, 7, 100)]
        optimizer.build().init({'w': jnp.ones((2, 2)), 'scale': jnp.ones(2)})
        return model.config, corpus, rates

    load(text)
    first = use()
    assert first[0].embed_dim == 32
    saved = tmp_path / 'config.gin'
    saved.write_text(operative_text())

    gin.clear_config()
    load_config([str(saved)])
    assert use() == first
    again = tmp_path / 'again.gin'
    again.write_text(operative_text())
    assert again.read_text() == saved.read_text()
    assert not re.search(r'[.]_|import _', saved.read_text()), 'no private module is written'


def test_a_preset_after_a_saved_configuration_replaces_its_layout(tmp_path):
    saved = tmp_path / 'config.gin'
    load_config(['configs/runs/pretrain.gin'], ["MODEL_DIR='a'", "TEXT='b'"])
    assert gin.get_bindings('TrainConfig')['partitioner'].mesh.shape == {'data': 8, 'model': 1}
    saved.write_text(operative_text())

    gin.clear_config()
    load_config([str(saved), 'configs/partitioning/two_d.gin'])
    partitioner = gin.get_configurable('PjitPartitioner')()
    assert partitioner.mesh.shape == {'data': 4, 'model': 2}
    assert ('embed', 'data') in partitioner.logical_axis_rules


def test_scopes_that_set_something_stay_in_the_operative_configuration(load):
    load(
        'PjitPartitioner.num_partitions = 1\nA = @PjitPartitioner()\nTrainConfig.partitioner = %A\n'
        'A/PjitPartitioner.num_partitions = 2\n'
    )
    gin.get_bindings('TrainConfig')
    assert 'A/PjitPartitioner.num_partitions = 2' in operative_text()
