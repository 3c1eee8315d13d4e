"""Any train state -> logical axes -> shardings, for the optimizers of optax."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import AxisNames, PjitPartitioner, standard_logical_axis_rules, unbox
from partitioning.state import get_logical_axes

pytestmark = pytest.mark.core

RULES = standard_logical_axis_rules(2, 2)
LAYERS, VOCAB, EMBED, MLP = 2, 32, 16, 64  # all different, so that a shape tells its dimensions


def named(*names):
    return nn.with_logical_partitioning(nn.initializers.normal(), names)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        up = self.param('up', named('embed', 'mlp'), (EMBED, MLP))
        bias = self.param('bias', named('mlp'), (MLP,))
        down = self.param('down', named('mlp', 'embed'), (MLP, EMBED))
        return x + nn.relu(x @ up + bias) @ down, None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = self.param('table', named('vocab', 'embed'), (VOCAB, EMBED))
        layers = nn.scan(
            Layer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )
        x, _ = layers(name='layers')(table[tokens], None)
        return x @ table.T


PARAMETERS = {  # path: (shape, names); nn.scan puts 'layers' in front
    ('table',): ((VOCAB, EMBED), ('vocab', 'embed')),
    ('layers', 'up'): ((LAYERS, EMBED, MLP), ('layers', 'embed', 'mlp')),
    ('layers', 'bias'): ((LAYERS, MLP), ('layers', 'mlp')),
    ('layers', 'down'): ((LAYERS, MLP, EMBED), ('layers', 'mlp', 'embed')),
}


def expected_spec(path):
    """linen's own answer for a parameter."""
    return nn.logical_to_mesh_axes(PARAMETERS[path][1], RULES)


def by_rank(params):
    return jax.tree.map(lambda p: 'matrix' if p.ndim > 2 else 'other', params)


FACTORED = {'min_dim_size_to_factor': 8}
OPTIMIZERS = {
    'adamw': lambda: optax.adamw(1e-3),
    'clip and adam': lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    'adafactor': lambda: optax.adafactor(1e-3, **FACTORED),
    'adafactor with momentum': lambda: optax.adafactor(1e-3, momentum=0.9, **FACTORED),
    'adafactor, nothing factored': lambda: optax.adafactor(1e-3),
    'masked': lambda: optax.masked(
        optax.adamw(1e-3), lambda params: jax.tree.map(lambda p: p.ndim > 2, params)
    ),
    'multi_transform': lambda: optax.multi_transform(
        {'matrix': optax.adam(1e-3), 'other': optax.sgd(1e-2, momentum=0.9)}, by_rank
    ),
    'MultiSteps': lambda: optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=2),
    'inject_hyperparams': lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    'novograd': lambda: optax.novograd(1e-3),
    'amsgrad': lambda: optax.amsgrad(1e-3),
    'adadelta': lambda: optax.adadelta(1e-3),
    'schedule_free': lambda: optax.contrib.schedule_free_adamw(1e-3),
    'prodigy': lambda: optax.contrib.prodigy(1e-3),
    'lbfgs': lambda: optax.scale_by_lbfgs(3),
}
BORN_SHARDED = [
    *('adamw', 'clip and adam', 'adafactor with momentum', 'masked'),
    *('multi_transform', 'MultiSteps', 'inject_hyperparams'),
]
NUM_COPIES = {'adamw': 2, 'adafactor with momentum': 1, 'MultiSteps': 3, 'amsgrad': 3}


def init_fn(tx):
    def init(key):
        params = Model().init(key, jnp.zeros((1, 4), jnp.int32))['params']
        return {'params': params, 'opt_state': tx.init(unbox(params)), 'step': jnp.int32(0)}

    return init


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
    return partitioner


@pytest.fixture(name='plain_params', scope='module')
def _plain_params():
    """The parameters as one device makes them."""
    init = init_fn(optax.identity())
    return jax.jit(lambda key: unbox(init(key)['params']))(jax.random.key(0))


def keys(path):
    return tuple(str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k)))) for k in path)


def leaves_of(tree):
    is_leaf = lambda x: isinstance(x, P)  # noqa: E731
    return {keys(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)}


def spec_by_shape(path, shape):
    """What a leaf of the optimizer's state must be laid out as, from its path and shape alone."""
    owners = [p for p in PARAMETERS if path[-len(p) :] == p]
    if not owners or not shape or shape == (1,):
        return P(*[None] * len(shape))
    full, _ = PARAMETERS[owners[0]]
    axes = dict(zip(full, expected_spec(owners[0]), strict=True))
    assert set(shape[-2:]) <= set(full), f'{path}: {shape} has sizes that {full} has not'
    lead = () if set(shape) <= set(full) else (None,)  # a history of the parameter
    return P(*lead, *(axes[size] for size in shape[len(lead) :]))


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_leaf_follows_its_parameter(partitioner, name):
    state = jax.eval_shape(init_fn(OPTIMIZERS[name]()), jax.random.key(0))
    axes = partitioner.get_mesh_axes(state)
    specs = leaves_of(axes)
    arrays = leaves_of(unbox(state))
    assert specs.keys() == arrays.keys()
    full_shapes = 0
    for path, array in arrays.items():
        if path[0] == 'params':
            assert array.shape == PARAMETERS[path[1:]][0]
            assert specs[path] == expected_spec(path[1:])
        elif array.shape == ():
            assert specs[path] == P()
        else:
            assert specs[path] == spec_by_shape(path, array.shape), path
            full_shapes += array.shape in [shape for shape, _ in PARAMETERS.values()]
    if name in NUM_COPIES:
        least = NUM_COPIES[name] * len(PARAMETERS)
        assert full_shapes >= least


def test_expected_specs_are_not_trivial():
    """What the other tests compare with does shard, over both axes."""
    assert expected_spec(('table',)) == P('model', 'data')
    assert expected_spec(('layers', 'up')) == P(None, 'data', 'model')
    assert expected_spec(('layers', 'bias')) == P(None, 'model')


@pytest.mark.parametrize(
    'statistic, path, expected',
    [
        ('v_row', ('table',), P('data')),
        ('v_col', ('table',), P('model')),
        ('v_row', ('layers', 'up'), P(None, 'data')),
        ('v_col', ('layers', 'up'), P(None, 'model')),
        ('v_row', ('layers', 'down'), P(None, 'data')),
        ('v_col', ('layers', 'down'), P(None, 'model')),
        ('v', ('layers', 'bias'), P(None, 'model')),
        ('v', ('table',), P(None)),
        ('v_row', ('layers', 'bias'), P(None)),
    ],
)
def test_adafactor(partitioner, statistic, path, expected):
    """Rows keep all but the largest dimension, columns all but the second largest."""
    init = init_fn(OPTIMIZERS['adafactor']())
    specs = leaves_of(partitioner.get_mesh_axes(jax.eval_shape(init, jax.random.key(0))))
    found = [spec for p, spec in specs.items() if p[-len(path) - 1 :] == (statistic, *path)]
    assert found == [expected]


def test_adafactor_of_a_square():
    """Shapes say nothing here; which statistic varies with the rows of the gradient does."""
    partitioner = PjitPartitioner(2, logical_axis_rules=[('embed', 'data'), ('mlp', 'model')])
    tx = optax.adafactor(1e-3, **FACTORED)
    params = {'w': nn.LogicallyPartitioned(jnp.ones((16, 16)), ('embed', 'mlp'))}
    gradient = {'w': jnp.broadcast_to(jnp.arange(1.0, 17.0)[:, None], (16, 16))}
    state = tx.init(unbox(params))
    _, updated = tx.update(gradient, state, unbox(params))
    specs = leaves_of(partitioner.get_mesh_axes({'params': params, 'opt_state': state}))
    checked = 0
    for path, statistic in leaves_of(updated).items():
        if statistic.shape == (16,):
            follows_rows = float(np.ptp(statistic)) > 0
            assert specs['opt_state', *path] == (P('data') if follows_rows else P('model'))
            checked += 1
    assert checked == 2


@pytest.mark.parametrize('name', BORN_SHARDED)
def test_states_are_born_sharded(partitioner, plain_params, name):
    tx = OPTIMIZERS[name]()
    init = init_fn(tx)
    key = jax.random.key(0)
    axes = partitioner.get_mesh_axes(jax.eval_shape(init, key))
    specs = leaves_of(axes)
    plain = leaves_of(
        {'params': plain_params, 'opt_state': tx.init(plain_params), 'step': jnp.int32(0)}
    )
    sharded = leaves_of(partitioner.partition(lambda k: unbox(init(k)), None, axes)(key))
    assert sharded.keys() == plain.keys()
    for path, array in sharded.items():
        sharding = NamedSharding(partitioner.mesh, specs[path])
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        ways = math.prod(
            partitioner.mesh.shape[a]
            for axes in specs[path]
            for a in (axes if isinstance(axes, tuple) else (axes,))
            if a
        )
        assert array.addressable_shards[0].data.size * ways == array.size
        np.testing.assert_allclose(array, plain[path], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_jit_takes_the_shardings(partitioner, name):
    """Of every state, with boxes in it or without."""
    init = init_fn(OPTIMIZERS[name]())
    shardings = partitioner.get_shardings(jax.eval_shape(init, jax.random.key(0)))
    lowered = jax.jit(init, out_shardings=shardings).lower(jax.random.key(0))
    assert lowered.out_info['step'].shape == ()
    assert all(isinstance(s, NamedSharding) for s in jax.tree.leaves(shardings))


# States that do not say enough.


def test_no_names_at_all(partitioner):
    state = {'params': {'w': jnp.zeros((8, 8))}}
    with pytest.raises(ValueError, match='Missing axis names'):
        partitioner.get_mesh_axes(state)


def test_a_parameter_without_names_among_others(partitioner):
    """It would be replicated without a word."""
    boxed = nn.LogicallyPartitioned(jnp.zeros((8, 8)), ('embed', 'mlp'))
    state = {'params': {'dense': {'kernel': boxed, 'other': jnp.zeros((8, 8))}}}
    with pytest.raises(ValueError, match='params/dense/other'):
        partitioner.get_mesh_axes(state)


@pytest.mark.parametrize('names', [('embed',), ('layers', 'embed', 'mlp'), ()])
def test_names_of_the_wrong_rank(partitioner, names):
    box = nn.LogicallyPartitioned(jnp.zeros((8, 8)), names)
    with pytest.raises(ValueError, match=rf'params/dense/kernel.*{len(names)} logical axes'):
        partitioner.get_mesh_axes({'params': {'dense': {'kernel': box}}})


@pytest.mark.parametrize(
    'names, shape, message',
    [
        (('embd', 'mlp'), (8, 8), "'embd'.*'embed'"),
        (('embed', 'embed'), (8, 8), 'two dimensions'),
        (('embed', 'mlp'), (8, 7), '7 does not divide by 2.*6 or 8'),
        (('layers', 'vocab'), (8, 7), '7 does not divide by 2'),
    ],
)
def test_names_that_do_not_map(partitioner, names, shape, message):
    box = nn.LogicallyPartitioned(jnp.zeros(shape), names)
    expected = rf'Failed to map logical axes for params/dense/kernel.*{message}'
    with pytest.raises(ValueError, match=expected):
        partitioner.get_mesh_axes({'params': {'dense': {'kernel': box}}})


def test_a_leaf_that_its_parameter_does_not_explain(partitioner):
    box = nn.LogicallyPartitioned(jnp.zeros((8, 16)), ('embed', 'mlp'))
    state = {'params': {'w': box}, 'opt_state': {'strange': {'w': jnp.zeros((5, 3))}}}
    with pytest.raises(ValueError, match=r'opt_state/strange/w.*\(5, 3\).*\(8, 16\)'):
        partitioner.get_mesh_axes(state)


def test_axis_that_the_mesh_lacks():
    partitioner = PjitPartitioner(2, logical_axis_rules=[('embed', 'expert')])
    box = nn.LogicallyPartitioned(jnp.zeros((8,)), ('embed',))
    with pytest.raises(ValueError, match=r"params/w.*'expert'.*data 4 x model 2"):
        partitioner.get_mesh_axes({'params': {'w': box}})


# Other kinds of states.


def test_boxes_of_linen_without_rules():
    state = {
        'a': nn.Partitioned(jnp.zeros((8, 4)), ('embed', None)),
        'b': nn.LogicallyPartitioned(jnp.zeros((4,)), ('mlp',)),
        'step': jnp.int32(3),
    }
    assert get_logical_axes(state) == {
        'a': AxisNames('embed', None),
        'b': AxisNames('mlp'),
        'step': AxisNames(),
    }


def test_unbox():
    array = jnp.zeros((8, 4))
    tree = {'a': nn.Partitioned(array, ('x', 'y')), 'b': [array, 'text', None, 1]}
    out = unbox(tree)
    assert out['a'] is array and out['b'][0] is array
    assert out['b'][1:] == ['text', None, 1]


class T5XState:
    """A state that names its axes itself, None where it has none."""

    def as_logical_axes(self):
        return {
            'step': None,
            'params': {
                'logits_dense': AxisNames('vocab', 'embed'),
                'mlp': {'wo': {'kernel': AxisNames('embed', 'mlp')}},
            },
        }


def test_states_that_name_their_axes():
    rules = [('batch', 'data'), ('embed', None), ('vocab', 'model'), ('mlp', 'model')]
    partitioner = PjitPartitioner(2, logical_axis_rules=rules)
    assert partitioner.get_mesh_axes(T5XState()) == {
        'step': None,
        'params': {
            'logits_dense': P('model', None),
            'mlp': {'wo': {'kernel': P(None, 'model')}},
        },
    }


def test_states_that_name_an_axis_without_a_rule():
    partitioner = PjitPartitioner(2, logical_axis_rules=[('vocab', 'model'), ('embed', None)])
    message = "Failed to map logical axes for params/mlp/wo/kernel.*'mlp'"
    with pytest.raises(ValueError, match=message):
        partitioner.get_mesh_axes(T5XState())
