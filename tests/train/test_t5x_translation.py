"""The translation of T5X's settings: rules, optimizers, and paths to restore."""

import functools

import gin
import optax
import pytest

from partitioning import PjitPartitioner
from train.data import ByteTokenizer
from train.t5x import gin_utils, models, network, optimizers
from train.t5x.checkpoint_configs import RestoreCheckpointConfig

pytestmark = pytest.mark.core


class _Named(PjitPartitioner):
    """A user's partitioner with an attribute and a property that depends on the rules."""

    name = 'none'

    @functools.cached_property
    def names(self):
        return [name for name, _ in self.logical_axis_rules]


def test_with_rules_changes_only_the_rules():
    """The class, attributes, mesh and policies remain the same."""
    given = _Named(num_partitions=2, logical_axis_rules=[('heads', 'model'), ('batch', 'data')])
    given.name, given.params_on_devices = 'mine', False
    assert given.names == ['heads', 'batch'] and given.data_mesh_size == 4
    other = given.with_rules([('batch', ('data', 'model')), ('kv', None)])
    assert type(other) is _Named and other.name == 'mine' and not other.params_on_devices
    assert other.mesh is given.mesh
    assert other.names == ['batch', 'kv'] and other.data_mesh_size == 8
    assert [name for name, _ in other.logical_axis_rules] == ['batch', 'kv']
    assert given.names == ['heads', 'batch'] and given.data_mesh_size == 4
    with pytest.raises(ValueError, match=r"\('a', 'b', 'c'\)"):
        given.with_rules([('a', 'b', 'c')])


def test_a_chain_of_optax_keeps_its_own_learning_rate():
    module = network.DecoderWrapper(config=network.TransformerConfig(vocab_size=300))
    tx = optimizers.chain([optax.clip(1.0), optax.adamw(0.1)])
    model = models.DecoderOnlyModel(module=module, vocabulary=ByteTokenizer(), optimizer_def=tx)
    assert model.optimizer(lambda step: 0.5) is tx


def test_a_path_may_be_a_list_of_one_path():
    for path in ('/one/path', ['/one/path'], ('/one/path',)):
        restore = RestoreCheckpointConfig(path=path).translated()
        assert restore.path == '/one/path'
        assert restore.setting == 'utils.RestoreCheckpointConfig.path'
    for none in (None, '', [], ['']):
        assert RestoreCheckpointConfig(path=none).translated() is None


def test_a_function_summarizes_the_configuration_once(load, tmp_path):
    """It is called when a run opens its writers, also if it is not T5X's own."""
    calls = []

    def summarize(model_dir, writer, step):
        calls.append((model_dir, step))
        writer.write_texts(step, {'note': 'some text'})
        writer.write_scalars(step, {'answer': 42.0})

    *_, create = gin_utils.writers_with('summarize_config_fn', summarize)
    create(tmp_path / 'run', 7).close()
    assert calls == [(str(tmp_path / 'run'), 7)]
    [events] = (tmp_path / 'run/tensorboard').iterdir()
    assert events.suffix == '.summary', 'another name than the metrics have'
    assert b'some text' in events.read_bytes() and b'answer' in events.read_bytes()

    load('train.optimizers.share_of.total = 11\n')
    assert gin.get_configurable('train.optimizers.share_of')(share=0.5) == 5
    gin_utils.summarize_gin_config(str(tmp_path), None, 3)
    writer = gin_utils.SummaryWriter(tmp_path / 'text')
    gin_utils.summarize_gin_config(str(tmp_path), writer, 3)
    writer.close()
    [events] = (tmp_path / 'text').iterdir()
    assert b'gin_config' in events.read_bytes() and b'share_of.total = 11' in events.read_bytes()
