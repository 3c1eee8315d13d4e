"""PjitPartitioner(layout='fsdp') and (layout='data_parallel') lay out models without names."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from small_models import batches, plain_losses, program

from partitioning import AxisRules, MeshConfig, PjitPartitioner, constrain

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
WORDS = ('fsdp', 'data_parallel')


def shapes(**arrays):
    """Abstract float32 arrays, from their shapes."""
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in arrays.items()}


def specs_of(state, **settings):
    """The spec of each array under 'fsdp', without Nones at its end."""
    plan = PjitPartitioner(layout='fsdp', **settings).plan(state)
    return {row.path: P(*row.spec) if any(row.spec) else P() for row in plan.rows}


# Which dimension is sharded. The tables are written by hand, for 8 devices.

ONE_AXIS = {
    'last_is_largest': ((64, 256), P(None, 'data')),
    'first_is_largest': ((256, 64), P('data', None)),
    'tie': ((64, 64), P('data', None)),
    'largest_does_not_divide': ((100, 36, 24), P(None, None, 'data')),
    'kernel_of_a_convolution': ((3, 3, 32, 64), P(None, None, None, 'data')),
    'vector': ((128,), P('data')),
    'small_vector': ((120,), P()),
    'small_matrix': ((8, 8), P()),
    'scalar': ((), P()),
    'nothing_divides': ((101, 99), P()),
}
TWO_AXES = {  # data 4 x model 2
    'all': ((64, 256), P(None, ('data', 'model'))),
    'one_dimension_each': ((12, 22), P('data', 'model')),
    'only_four': ((36, 33), P('data', None)),
    'only_two': ((33, 34), P(None, 'model')),
    'none': ((33, 35), P()),
}


@pytest.mark.parametrize('table, model', [(ONE_AXIS, 1), (TWO_AXES, 2)])
def test_the_largest_dimension_that_divides_is_sharded(table, model):
    found = specs_of(
        shapes(**{name: shape for name, (shape, _) in table.items()}), num_partitions=model
    )
    assert found == {name: spec for name, (_, spec) in table.items()}


def test_a_lookup_table_is_sharded_by_its_vocabulary():
    def spec(shape, *path):
        state = jax.ShapeDtypeStruct(shape, jnp.float32)
        for key in reversed(path):
            state = {key: state}
        return next(iter(specs_of(state).values()))

    assert spec((64, 512), 'embedder', 'weight') == P('data', None)
    assert spec((64, 512), 'wte', 'kernel') == P('data', None)
    assert spec((64, 512), 'mlp', 'kernel') == P(None, 'data')
    assert spec((65, 512), 'embed', 'embedding') == P(None, 'data')  # 65 rows cannot be divided
    assert spec((3, 3, 8, 64), 'patch_embedding', 'kernel') == P(None, None, None, 'data')


def test_stacked_layers_are_sharded_within_each_layer():
    # All arrays begin with the 64 layers. A scan would gather a stack that is sharded there.
    layers = shapes(kernel=(64, 16, 40), bias=(64, 40), odd=(64, 9, 15))
    assert specs_of({'params': {'layers': layers, 'head': shapes(kernel=(40, 64))}}) == {
        'params/layers/kernel': P(None, None, 'data'),
        'params/layers/bias': P(None, 'data'),
        'params/layers/odd': P('data', None, None),  # no other dimension can be sharded
        'params/head/kernel': P(None, 'data'),
    }


def test_a_large_array_that_stays_whole_is_reported_with_the_sizes_that_divide():
    state = shapes(odd=(1001, 999), table_embed=(1001, 64), small=(9, 9))
    partitioner = PjitPartitioner(layout='fsdp')
    found = {finding.where: finding.message for finding in partitioner.lint(state)}
    assert set(found) == {'odd', 'table_embed'}
    assert '1001' in found['odd'] and '8' in found['odd']
    costs = partitioner.audit(state).policies
    assert {c.row.path: c.bytes_per_device for c in costs} == {
        'odd': 1001 * 999 * 4 - -(-1001 * 999 * 4 // 8),
        'table_embed': 0,
    }
    assert '1000 or 1008' in costs[0].reason
    assert partitioner.plan(state)['odd'].spec == P(None, None)


def test_arrays_are_replicated_over_slices():
    # Gathers over the data centre network in every layer would be too slow.
    state = shapes(kernel=(64, 256))
    for mesh in (
        MeshConfig(axes={'replica': 2, 'data': 4}),
        MeshConfig(axes={'slices': 2, 'data': 4}, slice_axis='slices'),
    ):
        partitioner = PjitPartitioner(layout='fsdp', mesh=mesh)
        assert partitioner.plan(state)['kernel'].spec == P(None, 'data')
        assert partitioner.data_partition_spec == P((next(iter(mesh.axes)), 'data'))


@pytest.mark.parametrize('word', WORDS)
def test_all_devices_shard_the_batch(word):
    assert PjitPartitioner(layout=word).data_mesh_size == 8
    assert PjitPartitioner(layout=word).data_partition_spec == P('data')
    assert PjitPartitioner(2, layout=word).data_partition_spec == P(('data', 'model'))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ('x', 'y', 'z'))
    partitioner = PjitPartitioner(mesh=mesh, layout=word)
    assert partitioner.data_partition_spec == P(('x', 'y', 'z'))
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('data', 'model'))
    alone = PjitPartitioner(mesh=one, layout=word)
    assert alone.data_partition_spec == P('data')
    assert not alone.lint(shapes(kernel=(64, 256)))


# Whole states.


def test_data_parallel_replicates_on_purpose():
    state = {'params': shapes(kernel=(512, 256))}
    partitioner = PjitPartitioner(layout='data_parallel')
    assert partitioner.plan(state)['params/kernel'].spec == P(None, None)
    assert not partitioner.lint(state)
    assert 'data_parallel' in partitioner.audit(state).replicated[0].reason


# Training. The reference is a plain loop on one device.

ADAMW = optax.adamw(0.1)
PROGRAMS = [
    ('data_parallel', 2, 't5x', 'flax'),
    ('fsdp', 2, 'nnx', 'nnx'),
]


@pytest.fixture(scope='module')
def reference():
    data = batches(5)
    return data, plain_losses(ADAMW, data)


@pytest.mark.parametrize('word, partitions, front_end, kind', PROGRAMS)
def test_five_steps_have_the_losses_of_the_plain_program(
    reference, word, partitions, front_end, kind
):
    data, expected = reference
    init, step = program(front_end, kind, ADAMW)
    partitioner = PjitPartitioner(partitions, layout=word)
    plan = partitioner.plan(init, KEY)
    state = plan.init(KEY)
    table = next(row for row in plan.rows if row.path.endswith('embed/embedding'))
    assert table.shard_shape == ((2, 8) if word == 'fsdp' else (16, 8))
    spec = partitioner.data_partition_spec
    step = partitioner.partition(step, (plan.specs, spec), (plan.specs, None), donate_argnums=0)
    losses = []
    for batch in data:
        state, loss = step(state, partitioner.to_global(batch))
        losses.append(float(loss))
    plan.check(state)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


# Activations.


@pytest.mark.parametrize('word', WORDS)
@pytest.mark.parametrize('constrained', [constrain, nn.with_logical_constraint])
def test_only_the_batch_of_an_activation_is_sharded(word, constrained):
    partitioner = PjitPartitioner(2, layout=word)
    step = partitioner.partition(
        lambda x: constrained(x, ('batch', 'no_rule_for_this')) * 2, None, None
    )
    program = step.lower(jax.ShapeDtypeStruct((8, 4), jnp.float32)).as_text()
    # The constraint: one dimension over both mesh axes, the other replicated.
    assert '[{"data", "model"}, {}]' in program


# Settings.


@pytest.mark.parametrize(
    'setting, value',
    [
        ('logical_axis_rules', [('batch', 'data')]),
    ],
)
def test_a_word_excludes_the_settings_that_it_replaces(setting, value):
    with pytest.raises(ValueError, match=f"layout='fsdp'.*remove {setting} or layout"):
        PjitPartitioner(layout='fsdp', **{setting: value})


def test_arrays_that_fsdp_keeps_whole_are_logged_once(caplog):
    state = {'params': {'a': np.ones((5003, 3)), 'b': np.ones((999, 777)), 'c': np.ones((7, 3))}}
    partitioner = PjitPartitioner(layout='fsdp')
    partitioner.plan(state)
    partitioner.audit(state)
    [text] = [record.getMessage() for record in caplog.records]
    first, second = (999 * 777 * 8, 999 * 777 * 8 + 5003 * 3 * 8)
    assert f'params/b, shape (999, 777), {first:,} bytes, is whole on each device' in text
    assert f'1 more, {second:,} bytes in all: size 999 is not divisible by 8' in text


def test_a_word_excludes_other_rules():
    with pytest.raises(ValueError, match='fsdp'):
        PjitPartitioner(layout='fsdp').with_rules([('batch', 'data')])


def test_a_misspelt_word():
    with pytest.raises(ValueError, match=r"'fspd'.*Did you mean 'fsdp'"):
        PjitPartitioner(layout='fspd')


# Models without names, and no layout.


def test_a_model_without_names_is_told_about_layout():
    state = {'params': shapes(kernel=(64, 256), bias=(256,))}
    with pytest.raises(ValueError, match=r"^Missing axis names.*layout='fsdp'"):
        PjitPartitioner(1).plan(state)
    with pytest.raises(ValueError, match=r"\(None,\).*one entry for each.*layout='data_parallel'"):
        PjitPartitioner(1, AxisRules(names=[('.*', (None,))])).plan(state)


@pytest.mark.parametrize('some_names', [False, True])
def test_arrays_without_names_are_replicated_if_the_policy_says_so(some_names):
    state = {'params': shapes(kernel=(64, 256), bias=(256,))}
    if some_names:
        box = nn.LogicallyPartitioned(jax.ShapeDtypeStruct((8, 16), jnp.float32), ('batch', None))
        state['params']['named'] = box
    partitioner = PjitPartitioner(1, AxisRules(on_unmatched='replicate'))
    plan = partitioner.plan(state)
    assert plan['params/kernel'].spec == P(None, None)
    assert 'no names' in plan['params/kernel'].reason
    found = {finding.where for finding in plan.lint() if finding.severity == 'warning'}
    assert {where for where in found if where.startswith('params')} == {
        'params/kernel',
        'params/bias',
    }
    if some_names:
        assert plan['params/named'].spec == P('data', None)
