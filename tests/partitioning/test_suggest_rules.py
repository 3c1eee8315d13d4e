"""suggest_rules names the parameters of models of many libraries, from their shapes and paths."""

import ast
import math
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from boxed_states import by_path
from flax import nnx
from flax.training import train_state
from jax.sharding import NamedSharding
from unnamed_models import MODELS, array, big_vision, gpt2, tree

from partitioning import (
    AxisRules,
    PjitPartitioner,
    TrainState,
    fsdp_logical_axis_rules,
    standard_logical_axis_rules,
    suggest_rules,
)

pytestmark = pytest.mark.core

FSDP = fsdp_logical_axis_rules(standard_logical_axis_rules())
BOTH = ('data', 'model')


def partitioner_of(rules, model=2):
    """A partitioner for 8 devices, of which `model` are on the model axis."""
    return PjitPartitioner(model, AxisRules(FSDP, names=rules))


def arrays_of(state):
    """A state without leaves that are not arrays, such as the functions in Equinox's modules."""
    return jax.tree.map(lambda x: x if hasattr(x, 'dtype') else None, state)


def with_adam(parameters):
    parameters = arrays_of(parameters)
    return {'params': parameters, 'opt_state': jax.eval_shape(optax.adam(1e-3).init, parameters)}


# The bytes of each device, for every model and mesh. JAX computes the shapes of the shards.

REPLICATED = {  # arrays of more than 16 KiB of which 8 divides no dimension
    'bert': [(30522,)],
    'unknown': [(97, 89, 3)],
}


@pytest.mark.parametrize('model', [2, 8])
@pytest.mark.parametrize('name', MODELS)
def test_devices_hold_an_even_share(name, model):
    parameters = MODELS[name]()
    rules = suggest_rules(parameters)
    assert rules.matches.is_complete
    state, partitioner = with_adam(parameters), partitioner_of(rules, model)
    specs = by_path(partitioner.get_mesh_axes(state))  # every rule is used, and sizes divide
    total = held = 0
    replicated = []
    for path, x in by_path(state).items():
        shard = NamedSharding(partitioner.mesh, specs[path]).shard_shape(x.shape)
        total += x.size * 4
        held += math.prod(shard) * 4
        if path.startswith('params') and shard == x.shape and 4 * x.size > 16 * 1024:
            replicated.append(x.shape)
    # The matrices of a mixer that mix tokens have no 'embed', and are sharded over 'model' only.
    assert held <= (1.2 if name == 'mixer' else 1.1) * total / 8
    assert replicated == REPLICATED.get(name, [])


@pytest.mark.parametrize('name', MODELS)
def test_rules_are_few_and_the_same_for_states(name):
    parameters = MODELS[name]()
    rules = suggest_rules(parameters)
    assert len(rules) <= 14
    state = with_adam(parameters)
    same = by_path(partitioner_of(rules).get_logical_axes(state))
    assert same == by_path(partitioner_of(suggest_rules(state)).get_logical_axes(state))


# The names, which the authors of these models would give to their arrays.

NAMES = {
    'gpt2': {
        'transformer/h/3/attn/c_attn/kernel': ('heads', 'embed'),  # (outputs, inputs)
        'transformer/h/3/attn/c_proj/kernel': ('embed', 'heads'),
        'transformer/h/0/mlp/c_fc/kernel': ('mlp', 'embed'),
        'transformer/h/0/mlp/c_proj/kernel': ('embed', 'mlp'),
        'transformer/wte/embedding': (None, BOTH),  # nothing divides 50257
        'transformer/ln_f/bias': (None,),
    },
    'bert': {
        'bert/encoder/layer/0/attention/self/key/kernel': ('embed', 'heads'),
        'bert/encoder/layer/0/attention/output/dense/kernel': ('heads', 'embed'),
        'bert/encoder/layer/0/intermediate/dense/kernel': ('embed', 'mlp'),
        'bert/encoder/layer/0/output/dense/kernel': ('mlp', 'embed'),
        'bert/embeddings/token_type_embeddings/embedding': (None, None),
    },
    'llama': {
        'model/embed_tokens/embedding': ('vocab', 'embed'),
        'model/layers/1/self_attn/q_proj/kernel': ('embed', 'heads'),
        'model/layers/1/self_attn/o_proj/kernel': ('heads', 'embed'),
        'model/layers/1/mlp/gate_proj/kernel': ('embed', 'mlp'),
        'model/layers/1/mlp/down_proj/kernel': ('mlp', 'embed'),
        'lm_head/kernel': ('embed', 'vocab'),
    },
    't5': {
        'shared/embedding': ('vocab', 'embed'),
        'decoder/block/1/layer/0/EncDecAttention/q/kernel': ('embed', 'heads'),
        'decoder/block/1/layer/0/EncDecAttention/o/kernel': ('heads', 'embed'),
        'encoder/block/1/layer/1/DenseReluDense/wi_1/kernel': ('embed', 'mlp'),
        'encoder/block/1/layer/1/DenseReluDense/wo/kernel': ('mlp', 'embed'),
    },
    'big_vision, scan': {  # 8 does not divide 12 heads
        'Transformer/encoderblock/MlpBlock_0/Dense_0/kernel': ('layers', 'embed', 'mlp'),
        'Transformer/encoderblock/MlpBlock_0/Dense_0/bias': ('layers', BOTH),
        'Transformer/encoderblock/LayerNorm_0/scale': ('layers', None),
        'Transformer/encoderblock/MultiHeadDotProductAttention_0/out/kernel': (
            *('layers', None, None),
            BOTH,
        ),
        'Transformer/encoder_norm/scale': (None,),
        'head/kernel': ('embed', 'vocab'),
        'pos_embedding': (None, None, BOTH),
    },
    'haiku': {
        'transformer/~/h2_attn/query/w': ('embed', 'heads'),
        'transformer/~/h2_attn/linear/w': ('heads', 'embed'),
        'transformer/~/h2_mlp/~/linear/w': ('embed', 'mlp'),
        'transformer/~/h2_mlp/~/linear_1/w': ('mlp', 'embed'),
        'transformer/~/embed/embeddings': ('vocab', 'embed'),
    },
    'equinox': {  # (outputs, inputs)
        'blocks/2/attention/query_proj/weight': ('heads', 'embed'),
        'blocks/2/attention/output_proj/weight': ('embed', 'heads'),
        'blocks/2/mlp/layers/0/weight': ('mlp', 'embed'),
        'blocks/2/mlp/layers/1/weight': ('embed', 'mlp'),
        'blocks/2/norm1/weight': (None,),
    },
    'equinox, stacked': {'blocks/attention/value_proj/weight': ('layers', 'heads', 'embed')},
    'gemma': {
        'layers/0/attn/q_einsum/w': ('heads', 'embed', 'kv'),
        'layers/0/attn/kv_einsum/w': (None, None, BOTH, None),  # one head
        'layers/0/attn/attn_vec_einsum/w': ('heads', 'kv', 'embed'),
        'embedder/input_embedding': ('vocab', 'embed'),
    },
    'resnet': {
        'conv_init/kernel': (None, None, None, BOTH),  # 3 channels
        'BottleneckResNetBlock_5/Conv_1/kernel': (None, None, 'embed', 'mlp'),
        'Dense_0/kernel': (BOTH, None),  # 10 classes
    },
    't5x, scan': {  # layers are the second dimension
        'decoder/layers/mlp/wo/kernel': ('mlp', 'layers', 'embed'),
        'decoder/layers/pre_mlp_norm/scale': (None, 'layers'),
    },
}


@pytest.mark.parametrize('name', NAMES)
def test_names(name):
    taken = {}
    for pattern, names, arrays, _ in suggest_rules(MODELS[name]()).matches.rules:
        for path in arrays:
            assert re.fullmatch(pattern, path)
            taken[path] = names
    assert {path: taken[path] for path in NAMES[name]} == NAMES[name]


def test_a_pattern_takes_the_arrays_of_all_layers():
    rules = dict(suggest_rules(gpt2(number=12)))
    assert rules['.*/attn/c_proj/kernel'] == ('embed', 'heads')
    assert rules['.*/(bias|scale)'] == (None,)
    assert len(rules) == 6


# The mesh.


def test_the_mesh_decides_which_sizes_divide():
    taken = dict(suggest_rules(big_vision(), {'data': 4, 'model': 2}))
    assert taken['.*/(key|query|value)/kernel'] == ('embed', 'heads', 'kv')  # 2 divides 12 heads
    whole = dict(suggest_rules(gpt2(), {'data': 8, 'model': 1}))
    assert whole['.*/wte/embedding'] == ('vocab', ('data',))  # 50257 is not sharded


def test_a_mesh_that_is_none_is_refused():
    with pytest.raises(ValueError, match='mesh=8 must be a mesh'):
        suggest_rules(gpt2(), 8)


# States.


def small():
    return {'mlp': {'up': {'kernel': jnp.zeros((64, 256)), 'bias': jnp.zeros(256)}}}


STATES = {
    'parameters': lambda p, tx: p,
    'variables': lambda p, tx: {'params': p, 'batch_stats': {'norm': {'mean': jnp.zeros(64)}}},
    'ours': lambda p, tx: TrainState.create({'params': p}, tx),
    'flax': lambda p, tx: train_state.TrainState.create(apply_fn=None, params=p, tx=tx),
    'dict': lambda p, tx: {'params': p, 'opt': tx.init(p), 'rng': jax.random.key(0)},
}


@pytest.mark.parametrize('kind', STATES)
@pytest.mark.parametrize('tx', [optax.adam(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=8)])
def test_states_of_any_kind(kind, tx):
    state = STATES[kind](small(), tx)
    rules = suggest_rules(state)
    assert {names for _, names in rules} == {(BOTH,), ('embed', 'mlp')}
    plan = partitioner_of(rules).plan(state)
    kernels = [row for row in plan.rows if row.path.endswith('mlp/up/kernel')]
    assert [row.shard_shape for row in kernels if row.shape == (64, 256)] == [
        (16, 128) for row in kernels if row.shape == (64, 256)
    ]


def test_nnx_states():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(8, 64, 64, rngs=rngs, decode=False)
            self.layers = nnx.List([nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)])
            self.norm = nnx.BatchNorm(64, rngs=rngs)

    def init():
        net = Net(nnx.Rngs(0))
        return nnx.state((net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)))

    state = jax.eval_shape(init)
    rules = suggest_rules(state)
    assert dict(rules)['.*/(key|query|value)/kernel'] == ('embed', 'heads', 'kv')
    assert dict(rules)['.*/layers/1/kernel'] == ('mlp', 'embed')
    assert partitioner_of(rules).plan(state).audit().balance == 1


def test_arrays_with_names_keep_them():
    boxed = nn.LogicallyPartitioned(array(64, 256), ('embed', 'mlp'))
    model = {'a': {'kernel': boxed}, 'b': {'kernel': array(256, 64)}}
    rules = suggest_rules({'params': model})
    assert list(rules) == [('b/kernel', ('mlp', 'embed'))]
    model['b']['kernel'] = boxed
    assert list(suggest_rules({'params': model})) == []
    assert 'No array needs a rule' in str(suggest_rules({'params': model}))


def test_two_models_in_one_state():
    """The paths below 'params' are the same, but the shapes differ."""
    one, other = ({'dense': {'kernel': array(*shape)}} for shape in ((64, 256), (256, 64)))
    state = {'one': {'params': one}, 'other': {'params': other}, 'wide': {'params': one}}
    axes = partitioner_of(suggest_rules(state)).get_logical_axes(state)
    assert axes['one']['params']['dense']['kernel'] == ('embed', 'mlp')
    assert axes['other']['params']['dense']['kernel'] == ('mlp', 'embed')


def test_patterns_may_match_longer_paths():
    """'params/bias' ends with '/bias', as the arrays of modules do."""
    model = {f'{key}_layer': {'bias': array(64), 'kernel': array(64, 256)} for key in 'abcdefg'}
    state = {'params': {'bias': array(50_000), **model}}
    axes = partitioner_of(suggest_rules(state)).get_logical_axes(state)['params']
    assert axes['bias'] == (BOTH,)
    assert axes['a_layer'] == {'bias': (None,), 'kernel': ('embed', 'mlp')}


@pytest.mark.parametrize('key, sizes', [('kernel', (256, 9)), ('w', (7, 9))])
def test_matrices_with_the_same_first_size_are_not_layers(key, sizes):
    model = {'up': {key: array(64, 256)}, 'gate': {key: array(64, 256)}, key: array(64, *sizes)}
    names = [names for _, names in suggest_rules(model)]
    assert names and not any('layers' in one for one in names)


def test_large_arrays_that_are_not_parameters_are_named():
    state = {'params': small(), 'cache': {'keys': array(8, 128, 64)}, 'seen': array(8)}
    rules = suggest_rules(state)
    assert partitioner_of(rules).plan(state)['cache/keys'].shard_shape != (8, 128, 64)
    assert not any(re.fullmatch(pattern, 'seen') for pattern, _ in rules)


# What people read.


def test_print_is_code_to_paste():
    for name in ('haiku', 'big_vision', 'unknown'):
        rules = suggest_rules(MODELS[name]())
        text = str(rules)
        assert max(map(len, text.splitlines())) <= 100
        assert ast.literal_eval(text.partition('=')[2].strip()) == list(rules)


def test_the_print_gives_counts_and_examples():
    text = str(suggest_rules(gpt2(number=12)))
    assert '12 arrays: transformer/h/0/mlp/c_fc/kernel (3072, 768)' in text
    assert "('data', 'model')" in text


@pytest.mark.parametrize(
    'name, words',
    [
        ('gpt2', ['transformer/wte/embedding', '50,257 is not divisible by 8']),
        ('bert', ['cls/predictions/bias (30522,) is replicated']),
        ('big_vision', ['15 others', '12 is not divisible by 8']),
        ('unknown', ['s0/aleph and 5 others', 'no word of the path is known']),
        ('unknown', ['zayin (97, 89, 3) is replicated', '8 divides none']),
        ('llama', ['No mesh was given', 'suggest_rules(state, mesh)']),
    ],
)
def test_notes(name, words):
    notes = suggest_rules(MODELS[name]()).notes
    assert any(all(word in note for word in words) for note in notes), notes


def test_rules_can_be_pickled():
    rules = suggest_rules(gpt2())
    again = pickle.loads(pickle.dumps(rules))
    assert again == rules and str(again) == str(rules)


def test_keys_with_special_characters():
    rules = suggest_rules(tree({'a.b(c)+/kernel': (64, 256), 'axb/kernel': (256, 64)}))
    assert dict(rules) == {r'a\.b\(c\)\+/kernel': ('embed', 'mlp'), 'axb/kernel': ('mlp', 'embed')}
