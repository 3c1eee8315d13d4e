"""States of any structure: parameters, optimizers and statistics in their shards."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from boxed_states import by_path

from partitioning import PjitPartitioner, unbox

pytestmark = pytest.mark.core

box = nn.LogicallyPartitioned
ADAM = optax.adam(1e-3)


def adam(params):
    return ADAM.init(unbox(params))


def with_adam(params):
    return {'params': params, 'opt_state': adam(params), 'step': jnp.int32(0)}


AXES = [('embed', 'data'), ('mlp', 'model')]


def wide():
    return box(jnp.zeros((16, 40)), ('embed', 'mlp'))


def tall():
    return box(jnp.zeros((40, 16)), ('mlp', 'embed'))


def narrow():
    return box(jnp.zeros((16, 24)), ('embed', None))


def square(names=('embed', 'mlp')):
    return box(jnp.zeros((16, 16)), names)


def turned():
    return square(('mlp', 'embed'))


WIDE, TALL, NARROW, SQUARE, TURNED = (4, 20), (20, 4), (4, 24), (4, 8), (8, 4)  # their shards


def of_squares():
    return adam({'w': square()})


def gan(of_gen, of_disc, **optimizers):
    return {'gen': {'params': {'w': of_gen}}, 'disc': {'params': {'w': of_disc}}, **optimizers}


def tuned(body, head):
    """An optimizer for the head alone."""
    return {'params': {'body': body, 'head': head}, 'opt_state': adam(head)}


STRUCTURES = {  # an init function; by a key of its path, the shard of each array
    'a bare array': (
        lambda: {'params': wide(), 'opt_state': adam(wide())},
        {'params': WIDE, 'opt_state': WIDE},
    ),
    'a tuple': (
        lambda: ({'w': wide(), 'u': tall()}, adam({'w': wide(), 'u': tall()}), jnp.int32(0)),
        {'w': WIDE, 'u': TALL},
    ),
    'a tuple with a bare array': (
        lambda: (jnp.int32(0), tall(), adam(tall())),
        {'1': TALL, '2': TALL},
    ),
    'one level deeper': (
        lambda: {'train': with_adam({'w': wide(), 'u': tall()}), 'step': jnp.int32(0)},
        {'w': WIDE, 'u': TALL},
    ),
    'a GAN with an optimizer in each part': (
        lambda: {'gen': with_adam({'w': square()}), 'disc': with_adam({'w': turned()})},
        {'gen': SQUARE, 'disc': TURNED},
    ),
    'a GAN with a tree of optimizers': (
        lambda: gan(square(), turned(), opt_state=dict.fromkeys(('gen', 'disc'), of_squares())),
        {'gen': SQUARE, 'disc': TURNED},
    ),
    'a GAN with trees of parameters and optimizers': (
        lambda: {
            'params': {'gen': {'w': square()}, 'disc': {'w': turned()}},
            'opt_state': {'gen': of_squares(), 'disc': of_squares()},
        },
        {'gen': SQUARE, 'disc': TURNED},
    ),
    'a GAN whose optimizers are matched by shapes': (
        lambda: gan(wide(), narrow(), one=adam({'w': wide()}), two=adam({'w': narrow()})),
        {'gen': WIDE, 'one': WIDE, 'disc': NARROW, 'two': NARROW},
    ),
    'averages of the parameters': (
        lambda: {**with_adam({'w': wide(), 'u': tall()}), 'ema': unbox({'w': wide(), 'u': tall()})},
        {'w': WIDE, 'u': TALL},
    ),
    'averages in boxes in a separate tree': (
        lambda: {'params': {'w': wide(), 'u': tall()}, 'ema': {'params': {'w': wide()}}},
        {'w': WIDE, 'u': TALL},
    ),
    'an optimizer of some parameters': (
        lambda: tuned({'u': tall()}, {'w': wide()}),
        {'u': TALL, 'w': WIDE},
    ),
    'an optimizer of parameters with the names of others': (
        lambda: tuned({'w': tall()}, {'w': wide()}),
        {'body': TALL, 'head': WIDE, 'opt_state': WIDE},
    ),
    'an optimizer of one of two equal trees': (
        lambda: tuned({'w': wide()}, {'w': wide()}),
        {'body': WIDE, 'head': WIDE, 'opt_state': WIDE},
    ),
}


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=AXES)


@pytest.mark.parametrize('structure', STRUCTURES)
def test_structures(partitioner, structure):
    """The test of meshes shows that what is planned is born."""
    init, expected = STRUCTURES[structure]
    plan = partitioner.plan(init)
    shardings, arrays = plan.shardings, unbox(jax.eval_shape(init))
    assert jax.tree.structure(shardings) == jax.tree.structure(arrays)
    for path, sharding in by_path(shardings).items():
        if shape := by_path(arrays)[path].shape:
            assert sharding.shard_shape(shape) == expected[key_in(path, expected)], path


def key_in(path, keys):
    (key,) = {*path.split('/')} & {*keys}
    return key


def test_the_parameter_of_large_statistics_is_not_guessed(partitioner):
    """Both trees have 'w' of one shape but with different layouts, so neither would be right."""

    def init():
        shape = (128, 64)
        body, head = (box(jnp.zeros(shape), names) for names in (('embed', 'mlp'), ('mlp', None)))
        return tuned({'w': body}, {'w': head})

    with pytest.raises(ValueError, match=r'opt_state/0/mu/w.*\(128, 64\).*32,768 bytes'):
        partitioner.plan(init)


# Statistics next to the parameters.


MEAN = 'batch_stats/norm/mean'


def normalized(mean):
    """A state with the statistics of a normalization, which usually have no names."""
    params = {
        'dense': {'kernel': wide(), 'bias': box(jnp.zeros(40), ('mlp',))},
        'norm': {'scale': box(jnp.ones(40), ('mlp',))},
    }
    return {'params': params, 'batch_stats': {'norm': {'mean': mean, 'var': jnp.ones(40)}}}


def test_small_statistics_are_replicated_and_listed(partitioner):
    plan = partitioner.plan(lambda: normalized(jnp.zeros(40)))
    state = plan.init()
    expected = {'kernel': WIDE, 'bias': (20,), 'scale': (20,), 'mean': (40,), 'var': (40,)}
    shards = {path: x.addressable_shards[0].data.shape for path, x in by_path(state).items()}
    assert {path.split('/')[-1]: shape for path, shape in shards.items()} == expected
    audit = plan.audit(state)
    replicated = {cost.row.path.split('/')[-1]: cost for cost in audit.replicated}
    # An even share of 160 bytes over 8 devices is 20; a device holds 80 if an array is in 2 shards.
    extra = {name: cost.bytes_per_device for name, cost in replicated.items()}
    assert extra == {'mean': 140, 'var': 140, 'bias': 60, 'scale': 60}
    assert 'follows no parameter' in replicated['mean'].reason
    assert audit.by_role['other'] == 2 * 160
    assert MEAN in str(audit)


def test_large_statistics_need_names(partitioner):
    limit = 16 * 1024 // 4
    plan = partitioner.plan(lambda: normalized(jnp.zeros(limit)))
    assert plan[MEAN].shard_shape == (limit,)
    with pytest.raises(ValueError, match=rf'{MEAN}.*\(4097,\).*16,388 bytes'):
        partitioner.plan(lambda: normalized(jnp.zeros(limit + 1)))
