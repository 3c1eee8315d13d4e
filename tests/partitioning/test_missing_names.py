"""Messages about missing names contain path rules; with these, the program runs."""

import ast
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxed_states import KEY
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P

from partitioning import AxisRules, PjitPartitioner, TrainState

pytestmark = pytest.mark.core

RULES = [('embed', 'data'), ('mlp', 'model'), ('heads', 'model'), ('kv', None), ('batch', 'data')]
X = np.ones((8, 8), np.float32)


def boxed(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


def rules_in(message):
    """The path rules that a message says to write, as its reader would copy them."""
    (text,) = re.findall(r"names=(?:\[|...\) )(\('.*?\))(?:\]\))?, with names in place", message)
    assert '\n' not in message
    return ast.literal_eval(f'[{text}]')


def partitioner_of(path_rules=()):
    return PjitPartitioner(2, AxisRules(RULES, names=path_rules))


def flax_state(variables, tx):
    return train_state.TrainState.create(apply_fn=None, params=variables['params'], tx=tx)


STATES = pytest.mark.parametrize('make', [TrainState.create, flax_state], ids=['ours', 'flax'])


class Layers(nn.Module):
    """Layers with names, and norms and a bias without."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(8, kernel_init=boxed('embed', 'mlp'), name=f'dense_{i}')(x)
            x = nn.LayerNorm(name=f'norm_{i}')(x)
        return nn.Dense(8, use_bias=False, kernel_init=boxed('embed', 'mlp'), name='dense.out')(x)


@STATES
def test_layers_without_names_next_to_layers_with_names(make):
    model, tx = Layers(), optax.MultiSteps(optax.adamw(1e-2), 2)

    def init(key):
        return make(model.init(key, X), tx)

    with pytest.raises(ValueError, match=r'params/dense_0/bias.*\(8,\) and 5 more') as error:
        partitioner_of().plan(init, KEY)
    assert "layout='fsdp'" in str(error.value)
    PjitPartitioner(2, layout='fsdp').plan(init, KEY)
    path_rules = rules_in(str(error.value))
    assert len(path_rules) == 2  # not one for each of the six arrays
    partitioner = partitioner_of(path_rules)
    plan = partitioner.plan(init, KEY)
    for row in plan.rows:
        if row.shape:
            kernel = row.path.endswith('kernel')
            assert row.spec == (P('data', 'model') if kernel else P(None)), row.path


def test_path_rules_never_rename_an_array_that_has_names():
    """A rule for all layers would also match one that has names, so each array gets a rule."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(3):
                one = nn.initializers.ones
                scale = one if i else nn.with_logical_partitioning(one, ('mlp',))
                x = nn.LayerNorm(use_bias=False, scale_init=scale, name=f'norm_{i}')(x)
            return x

    def init(key):
        return Model().init(key, X)

    with pytest.raises(ValueError, match='norm_1/scale') as error:
        partitioner_of().plan(init, KEY)
    path_rules = rules_in(str(error.value))
    assert path_rules == [(f'params/norm_{i}/scale', (None,)) for i in (1, 2)]
    plan = partitioner_of(path_rules).plan(init, KEY)
    assert [row.spec for row in plan.rows] == [P('model'), P(None), P(None)]


def test_nnx_layers_without_names():
    def init(key):
        rngs = nnx.Rngs(key)
        model = nnx.Sequential(
            nnx.Linear(8, 8, rngs=rngs, kernel_metadata={'out_sharding': ('embed', 'mlp')}),
            nnx.LayerNorm(8, rngs=rngs),
        )
        return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)))

    with pytest.raises(ValueError, match='Missing axis names') as error:
        partitioner_of().plan(init, KEY)
    plan = partitioner_of(rules_in(str(error.value))).plan(init, KEY)
    specs = [row.spec for row in plan.rows if row.shape == (8,)]
    assert specs == [P(None)] * 9  # three vectors, and two copies of each in the optimizer


@STATES
@pytest.mark.parametrize('names', [('embed', 'heads'), ('embed', 'heads', 'kv', 'more')])
def test_a_path_rule_replaces_wrong_names_also_in_the_optimizer(make, names):
    """The optimizer's copies of a box have the wrong names too."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.DenseGeneral((2, 4), use_bias=False, kernel_init=boxed(*names))(x)

    def init(key):
        return make(Model().init(key, X), optax.MultiSteps(optax.adamw(1e-2), 2))

    rule = ('DenseGeneral_0/kernel', ('mlp', None, 'embed'))
    rows = partitioner_of([rule]).plan(init, KEY).rows
    assert [row.spec for row in rows if row.shape == (8, 2, 4)] == [P('model', None, 'data')] * 4


class Decoding(nn.Module):
    """Two layers of attention with a cache that is too large to be replicated silently."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.MultiHeadDotProductAttention(
                2,
                use_bias=False,
                kernel_init=boxed('embed', 'heads', 'kv'),
                out_kernel_init=boxed('heads', 'kv', 'embed'),
                decode=True,
                deterministic=True,
            )(x, x)
        return x


def test_large_caches_without_names():
    model = Decoding()

    def init(key):
        return model.init(key, jnp.ones((8, 128, 8)))

    with pytest.raises(ValueError, match=r'32,768 bytes.*3 more') as error:
        partitioner_of().plan(init, KEY)
    ((pattern, nothing),) = rules_in(str(error.value))
    assert nothing == (None,) * 4
    partitioner = partitioner_of([(pattern, ('batch', None, 'heads', 'kv'))])
    plan = partitioner.plan(init, KEY)
    assert [row.spec for row in plan.rows if 'cached' in row.path] == (
        [P('data', None, 'model', None)] * 4
    )

    def decode(variables, x):
        y, cache = model.apply(variables, x, mutable=['cache'])
        return y, {**variables, **cache}

    step = partitioner.partition(decode, (plan.specs, P('data')), (P('data'), plan.specs))
    y, variables = step(plan.init(KEY), jnp.ones((8, 1, 8)))
    assert y.shape == (8, 1, 8)
    assert int(variables['cache']['MultiHeadDotProductAttention_0']['cache_index']) == 1


def test_layers_of_nnx_vmap_without_a_name():
    """nnx keeps the names of an array to which it adds a dimension."""

    def init(key, **metadata):
        def make(key):
            metadata = {'out_sharding': ('embed', 'mlp')}
            rngs = nnx.Rngs(key)
            return nnx.Linear(8, 8, use_bias=False, rngs=rngs, kernel_metadata=metadata)

        return nnx.state(nnx.vmap(make, **metadata)(jax.random.split(key, 2)))

    with pytest.raises(ValueError, match=r"'embed'.*size 2.*first 2 of 3 dim") as error:
        partitioner_of().plan(init, KEY)
    (written,) = re.findall(r'transform_metadata=\{.*?\}', str(error.value))
    metadata = eval(f'dict({written})', {'nnx': nnx})
    plan = partitioner_of().plan(lambda key: init(key, **metadata), KEY)
    assert plan['kernel'].spec == P(None, 'data', 'model')
