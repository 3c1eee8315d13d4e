"""The entries of sharding plans, for every kind of model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from planned_models import (
    ENTRIES,
    KEY,
    MESH,
    MODELS,
    OF_MODELS,
    RULES,
    SHAPES,
    SHARDS,
    SPECS,
    ByData,
    NnxMlp,
    held,
    linen,
    resolve,
)

from partitioning import PjitPartitioner
from partitioning.compat.pytorch import ChunkShardingSpec, ShardingPlan, shard_module

pytestmark = pytest.mark.core


@OF_MODELS
def test_rows(model):
    module = MODELS[model]()
    resolved = resolve(ENTRIES, module)
    assert resolve({path.replace('/', '.'): x for path, x in ENTRIES.items()}, module) == resolved
    rows = {row.path: row for row in resolved.rows if row.role == 'parameters'}
    assert {path: row.spec for path, row in rows.items()} == SPECS
    assert {path: row.shape for path, row in rows.items()} == SHAPES
    assert {path: row.shard_shape for path, row in rows.items()} == SHARDS
    assert {row.dtype for row in rows.values()} == {'float32'}
    bytes_of_buffers = sum(row.bytes_total for row in resolved.rows if row.role == 'other')
    assert (
        resolved.bytes_per_device == 4 * sum(np.prod(s) for s in SHARDS.values()) + bytes_of_buffers
    )
    assert resolved.bytes_total == 4 * sum(np.prod(s) for s in SHAPES.values()) + bytes_of_buffers
    assert [d.reason for d in resolved['fc1/kernel'].dimensions] == ['the plan says so'] * 2
    assert 'not in the plan' in resolved['fc1/bias'].dimensions[0].reason


@OF_MODELS
def test_shard_module(model):
    module = MODELS[model]()
    before = {path: np.asarray(jax.tree.leaves(x)[0]) for path, x in held(module).items()}
    after = held(shard_module(module, ShardingPlan(ENTRIES), MESH))
    assert {path: x.sharding for path, x in after.items()} == {
        path: NamedSharding(MESH, spec) for path, spec in SPECS.items()
    }
    assert {path: x.addressable_shards[0].data.shape for path, x in after.items()} == SHARDS
    for path, x in after.items():
        np.testing.assert_array_equal(x, before[path])


@pytest.mark.parametrize('names', [False, True])
def test_abstract_models(names):
    module = linen(names)
    abstract = jax.eval_shape(lambda: module)
    for plan in ENTRIES, {'fc1': ByData(), 'fc2/kernel': P('model')}:
        assert resolve(plan, abstract) == resolve(plan, module)
        abstract_nnx = nnx.eval_shape(lambda: NnxMlp(nnx.Rngs(0)))
        assert resolve(plan, abstract_nnx) == resolve(plan, NnxMlp(nnx.Rngs(0)))


def test_paths_of_linen_variables_may_begin_with_params():
    assert resolve({'params/fc1/kernel': P('data')}, linen())['fc1/kernel'].spec == P('data', None)
    deep = {'params': {'params': {'w': jnp.zeros(8)}, 'w': jnp.zeros(4)}}
    assert resolve({'params/w': P('data')}, deep)['params/w'].spec == P('data')


def test_keys_that_contain_separators():
    tree = {'fc1.weight': jnp.zeros(8), 'a.b': {'c': jnp.zeros(8)}, 'a': {'b': {'c': jnp.zeros(8)}}}
    resolved = resolve({'fc1.weight': P('data'), 'a.b/c': P('model'), 'a.b.c': P('data')}, tree)
    assert resolved['fc1.weight'].spec == P('data')
    assert resolved['a.b/c'].spec == P('model')
    assert resolved['a/b/c'].spec == P('data')


def test_lists_and_numbers_as_keys():
    tree = {'layers': [{'w': jnp.zeros(8)}, (jnp.zeros(8),) * 2], 'by_number': {3: jnp.zeros(8)}}
    plan = {'layers.0.w': P('data'), 'layers/1': ByData(), 'by_number/3': P('model')}
    resolved = resolve(plan, tree)
    specs = {row.path: row.spec for row in resolved.rows}
    by_data = dict.fromkeys(['layers/0/w', 'layers/1/0', 'layers/1/1'], P('data'))
    assert specs == {'by_number/3': P('model'), **by_data}


@pytest.mark.parametrize(
    'entry',
    [
        P('data', None),
        P('data'),
        P(('data',), None),
        NamedSharding(MESH, P('data')),
        NamedSharding(MESH.abstract_mesh, P('data')),
        ('rows', None),
        ['rows', 'columns'],
        (('data',), None),
        ('data', None),
        ChunkShardingSpec(0, range(4)),
    ],
)
def test_equivalent_entries(entry):
    rules = [('rows', 'data'), ('columns', None)]
    assert resolve({'fc1/kernel': entry}, rules=rules)['fc1/kernel'].spec == P('data', None)


def test_random_keys_are_arrays():
    tree = {'keys': jax.random.split(KEY, 8), 'w': jnp.ones(8)}
    resolved = resolve({'keys': P('data')}, tree)
    assert resolved['keys'].dtype == str(KEY.dtype)
    assert resolved['keys'].bytes_total == 8 * KEY.dtype.itemsize
    placed = shard_module(tree, resolved, MESH)['keys']
    assert placed.sharding.is_equivalent_to(NamedSharding(MESH, P('data')), 1)
    np.testing.assert_array_equal(jax.random.key_data(placed), jax.random.key_data(tree['keys']))


@pytest.mark.parametrize('number', [4096, 4097])
def test_large_arrays_are_not_replicated_silently(number):
    """At most 16 KiB are replicated without an entry, unless the plan is empty."""
    tree = {name: jax.ShapeDtypeStruct((number,), 'float32') for name in ('v', 'w')}
    assert resolve({}, tree)['w'].spec == P(None)
    assert 'empty' in resolve({}, tree)['w'].reason
    if number == 4096:
        assert resolve({'v': P()}, tree)['w'].spec == P(None)
        return
    with pytest.raises(
        ValueError, match=r"w of .*not in the plan.* 16,388 bytes.*Add 'w': P"
    ) as error:
        resolve({'v': P()}, tree)
    assert '8 devices (data 4 x model 2)' in str(error.value)
    both = {'v': P(), 'w': P()}
    for replicated in resolve(both, tree), resolve({'v': P()}, tree, on_unmatched='replicate'):
        assert replicated['w'].spec == P(None)


def test_names_of_boxes():
    """The rules lay out the parameters that the plan does not name."""
    resolved = resolve({'fc2/kernel': P('model')}, linen(names=True), rules=RULES)
    row = resolved['fc1/kernel']
    assert row.spec == P('data', 'model') and row.logical_axes == ('embed', 'mlp')
    assert [d.reason for d in row.dimensions] == ['a rule shards it'] * 2
    assert resolved['fc2/kernel'].spec == P('model', None)
    assert resolved['fc2/kernel'].logical_axes == (None, None)


def test_the_rules_of_a_box_come_first():
    """A partitioner gives the same answer."""
    box = nn.LogicallyPartitioned(jnp.ones((8, 8)), ('a', 'b'), rules=(('a', 'model'), ('b', None)))
    rules = [('a', 'data'), ('b', 'data')]
    by_rules = PjitPartitioner(mesh=MESH, logical_axis_rules=rules).get_mesh_axes(
        {'params': {'w': box}}
    )
    assert by_rules['params']['w'] == P('model', None)
    assert resolve({}, {'w': box}, rules=rules)['w'].spec == P('model', None)
