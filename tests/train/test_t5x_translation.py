"""The translation of T5X's settings: rules for `kv_heads`, and paths to restore."""

import functools

import jax
import numpy as np
import optax
import pytest

from partitioning import PjitPartitioner, fsdp_logical_axis_rules, standard_logical_axis_rules
from train.data import ByteTokenizer
from train.t5x import configs, models, network, optimizers

pytestmark = pytest.mark.core


def test_kv_heads_follow_heads():
    for rules in (standard_logical_axis_rules(2, 2), [('heads', ('data', 'model'))]):
        given = PjitPartitioner(
            num_partitions=2,
            logical_axis_rules=rules,
            optimizer_axis_rules=fsdp_logical_axis_rules([('heads', 'model'), ('embed', None)]),
            on_unmatched='replicate',
        )
        made = network.with_kv_heads(given)
        axes = dict(rules)['heads']
        assert tuple(made.logical_axis_rules) == (*rules, ('kv_heads', axes))
        assert made.logical_axis_rules.on_unmatched == 'replicate'
        assert made.mesh is given.mesh
        assert made.rule_set.optimizer_rules == given.rule_set.optimizer_rules
        assert made.data_partition_spec == given.data_partition_spec
        assert network.with_kv_heads(made) is made


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
    assert [name for name, _ in other.rule_set.rules] == ['batch', 'kv']
    assert given.names == ['heads', 'batch'] and given.data_mesh_size == 4
    with pytest.raises(ValueError, match=r"\('a', 'b', 'c'\)"):
        given.with_rules([('a', 'b', 'c')])


def test_rules_for_kv_heads_keep_the_plan():
    params = {'w': jax.ShapeDtypeStruct((8, 8), np.float32)}
    rules = [('heads', 'model'), ('batch', 'data')]
    named = PjitPartitioner(
        num_partitions=2,
        logical_axis_rules=rules,
        params_axes_names_override=[('w', ('heads', 'batch'))],
    )
    plan = named.resolve(params)
    other = [('heads', None), ('batch', 'data')]
    made = network.with_kv_heads(
        PjitPartitioner(mesh=named.mesh, logical_axis_rules=other, plan=plan)
    )
    assert ('kv_heads', None) in tuple(made.logical_axis_rules)
    assert made.get_mesh_axes(params)['w'] == jax.sharding.PartitionSpec('model', 'data')


def test_a_chain_of_optax_keeps_its_own_learning_rate():
    module = network.DecoderWrapper(config=network.TransformerConfig(vocab_size=300))
    tx = optimizers.chain([optax.clip(1.0), optax.adamw(0.1)])
    model = models.DecoderOnlyModel(module=module, vocabulary=ByteTokenizer(), optimizer_def=tx)
    assert model.optimizer(lambda step: 0.5) is tx


def test_a_path_may_be_a_list_of_one_path():
    for path in ('/one/path', ['/one/path'], ('/one/path',)):
        restore = configs.RestoreCheckpointConfig(path=path).translated()
        assert restore.path == '/one/path'
        assert restore.setting == 'utils.RestoreCheckpointConfig.path'
    for none in (None, '', [], ['']):
        assert configs.RestoreCheckpointConfig(path=none).translated() is None
