"""No suggested name contradicts the layer in which it stands, in models of many libraries.

The names on the right are written by hand: 'embed' for the width of the model, 'mlp' or 'heads' for
what is inside a layer, 'vocab' for the rows of a table, and None for anything else.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from unnamed_models import MODELS, array, dense, layers, norm, tree

from partitioning import AxisRules, MeshConfig, PjitPartitioner, create_mesh, suggest_rules

eqx = pytest.importorskip('equinox', reason='the extra clients has equinox')
hk = pytest.importorskip('haiku', reason='the extra clients has haiku')

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
MESH = {'data': 4, 'model': 2}
TABLE, INTO, OUT_OF = ('vocab', 'embed'), ('embed', 'mlp'), ('mlp', 'embed')
QKV = ('query', 'key', 'value', 'output')
QUERY, BACK = ('embed', 'heads'), ('heads', 'embed')


# linen.


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=8)(y, y)
        # Python creates the outer module first, so Dense_0 is the second layer.
        return x + nn.Dense(64)(nn.relu(nn.Dense(128)(nn.LayerNorm()(x))))


class LinenLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(128, 64)(tokens)  # as large as an inner size
        for _ in range(2):
            x = LinenBlock()(x)
        return nn.Dense(128)(nn.LayerNorm()(x))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for size in (256, 256, 8):
            x = nn.relu(nn.Dense(size)(x))
        return x


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        scores = nn.softmax(nn.Dense(8, use_bias=False, name='router')(x))
        up, down = self.param('wi', init, (8, 64, 128)), self.param('wo', init, (8, 128, 64))
        return jnp.einsum('bld,edh,ehf,ble->blf', x, up, down, scores)


class LinenMoE(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 64, name='tok_embed')(tokens)
        for i in range(2):
            x = x + Experts(name=f'moe_{i}')(nn.RMSNorm(name=f'norm_{i}')(x))
        return nn.Dense(64, name='logits')(x)


# nnx.


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 64, 64, rngs=rngs, decode=False)
        self.in_proj, self.out_proj = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)


class NnxLM(nnx.Module):
    def __init__(self, rngs):
        self.embedder = nnx.Embed(256, 64, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs)])
        self.lm_head = nnx.Linear(64, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.lm_head(self.embedder(tokens))


# Equinox, whose weights are (outputs, inputs), with functions among the leaves.


class EquinoxLM(eqx.Module):
    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.embedding = eqx.nn.Embedding(128, 64, key=key)
        self.attention = eqx.nn.MultiheadAttention(8, 64, key=key)
        self.norm = eqx.nn.LayerNorm(64)
        self.mlp = eqx.nn.MLP(64, 64, 128, 1, jax.nn.gelu, key=key)

    def __call__(self, x):
        return self.mlp(self.norm(x))


# haiku.


@hk.transform
def haiku_lm(tokens):
    x = hk.Embed(128, 64)(tokens)
    y = hk.LayerNorm(-1, True, True)(x)
    x = x + hk.MultiHeadAttention(4, 16, model_size=64, w_init=jnp.ones)(y, y, y)
    return hk.Linear(128, name='head')(x + hk.nets.MLP([128, 64])(x))


@hk.transform
def haiku_critic(observations):
    return hk.nets.MLP([256, 256, 1])(observations)


# Paths and shapes as others have them.


def mamba(vocab):
    layer = norm('layers_{}/norm', 64) | {
        'layers_{}/mixer/in_proj/kernel': (64, 256),
        'layers_{}/mixer/conv1d/kernel': (4, 1, 128),
        'layers_{}/mixer/x_proj/kernel': (128, 36),
        'layers_{}/mixer/dt_proj/kernel': (4, 128),
        'layers_{}/mixer/A_log': (128, 16),
        'layers_{}/mixer/out_proj/kernel': (128, 64),
    }
    return tree({'embedding/embedding': (vocab, 64), **layers(3, layer)})


def dit(width=64, patch=16):
    """A diffusion transformer with the paths of the public ports."""
    block = dense('blocks_{}/attn/qkv', width, 3 * width) | dense(
        'blocks_{}/attn/proj', width, width
    )
    block |= dense('blocks_{}/mlp/Dense_0', width, 4 * width)
    block |= dense('blocks_{}/mlp/Dense_1', 4 * width, width)
    block |= dense('blocks_{}/adaLN_modulation', width, 6 * width)
    rest = {'x_embedder/kernel': (2, 2, patch, width), 'x_embedder/bias': (width,)}
    rest |= dense('t_embedder/Dense_0', 256, width) | dense('t_embedder/Dense_1', width, width)
    rest |= {'y_embedder/embedding_table/embedding': (1001, width)} | dense(
        'final/linear', width, 32
    )
    return tree(rest | layers(2, block))


def mixer(tokens=32, width=64):
    block = norm('MixerBlock_{}/LayerNorm_0', width)
    for path, n, m in (('token_mixing', tokens, 128), ('channel_mixing', width, 256)):
        block |= dense(f'MixerBlock_{{}}/{path}/Dense_0', n, m)
        block |= dense(f'MixerBlock_{{}}/{path}/Dense_1', m, n)
    return tree(layers(2, block) | dense('head', width, 16))


def mixtral(width=64):
    """Square matrices of eight experts, and a router that is called a gate."""
    layer = {'layers/{}/block_sparse_moe/gate/kernel': (width, 8)}
    layer |= {
        f'layers/{{}}/block_sparse_moe/experts/{n}/w{i}/kernel': (width, width)
        for n in range(8)
        for i in (1, 2, 3)
    }
    layer |= {'layers/{}/input_layernorm/weight': (width,)}
    return tree({'embed_tokens/embedding': (128, width), **layers(2, layer)})


def recurrent(width=64):
    """An LSTM whose matrices are all square, and nothing says what the width is."""
    gates = {f'lstm/{gate}/kernel': (width, width) for gate in ('hi', 'hf', 'ii', 'if')}
    return tree({**gates, 'projection/kernel': (width, 32)})


def two_lstms(width=64, letters=128):
    """The gates of two layers of haiku, of which only the first reads letters, and a norm."""
    gates = {'lstm/linear/w': (letters + width, 4 * width)}
    gates |= {'lstm_1/linear/w': (2 * width, 4 * width), 'linear/w': (width, letters)}
    return tree({**gates, 'norm1/weight': (width, letters), 'norm1/bias': (width, letters)})


def attention_blocks(width=64):
    """Equinox's vision transformer, whose blocks are called after their attention only."""
    block = {f'attention_blocks/{{}}/attention/{k}_proj/weight': (width, width) for k in QKV}
    for name, reads, writes in (('linear1', width, 128), ('linear2', 128, width)):
        block[f'attention_blocks/{{}}/{name}/weight'] = (writes, reads)
        block[f'attention_blocks/{{}}/{name}/bias'] = (writes,)
    return tree(layers(2, block | norm('attention_blocks/{}/layer_norm1', width)))


def unet(width=64):
    """A block of a diffusion model, whose module 'proj' leads into its MLP."""
    block = 'down_blocks_0/attentions_0/transformer_blocks_{}'
    layer = {f'{block}/attn1/to_{k}/kernel': (width, width) for k in 'qkv'}
    layer |= dense(f'{block}/attn1/to_out_0', width, width)
    layer |= dense(f'{block}/ff/net_0/proj', width, 8 * width)
    layer |= dense(f'{block}/ff/net_2', 4 * width, width) | norm(f'{block}/norm1', width)
    rest = dense('time_embedding/linear_1', 32, 4 * width)
    return tree(rest | layers(2, layer) | dense('time_embedding/linear_2', 4 * width, 4 * width))


def deepseek(width=256, low=64, heads=128):
    """Multi-head latent attention: a rank between the width and the heads."""
    layer = {'model/layers/{}/input_layernorm/weight': (width,)}
    for path, *shape in (
        ('q_a_proj', width, low),
        ('q_b_proj', low, heads),
        ('o_proj', heads, width),
    ):
        layer[f'model/layers/{{}}/self_attn/{path}/kernel'] = tuple(shape)
    for path, *shape in (('w1', width, 512), ('w2', 512, width), ('w3', width, 512)):
        layer[f'model/layers/{{}}/feed_forward/{path}/kernel'] = tuple(shape)
    return tree({'model/embed_tokens/embedding': (512, width)} | layers(2, layer))


CASES = {
    'linen, language model': (
        lambda key: LinenLM().init(key, jnp.ones((1, 16), int)),
        {
            'Embed_0/embedding': TABLE,
            'Block_0/Dense_0/kernel': OUT_OF,
            'Block_0/Dense_1/kernel': INTO,
            'Block_1/MultiHeadDotProductAttention_0/query/kernel': ('embed', 'heads', 'kv'),
            'Block_1/MultiHeadDotProductAttention_0/out/kernel': ('heads', 'kv', 'embed'),
            'params/Dense_0/kernel': ('embed', 'vocab'),
        },
    ),
    'linen, dense': (
        lambda key: LinenMLP().init(key, jnp.ones((1, 24))),
        {'Dense_0/kernel': INTO, 'Dense_1/kernel': OUT_OF, 'Dense_2/kernel': INTO},
    ),
    'linen, experts': (
        lambda key: LinenMoE().init(key, jnp.ones((1, 16), int)),
        {
            'tok_embed/embedding': TABLE,
            'moe_0/wi': (None, *INTO),
            'moe_1/wo': (None, *OUT_OF),
            'logits/kernel': ('embed', 'vocab'),
        },
    ),
    'nnx': (
        lambda key: NnxLM(nnx.Rngs(key)),
        {
            'embedder/embedding': TABLE,
            'blocks/0/in_proj/kernel': INTO,
            'blocks/1/out_proj/kernel': OUT_OF,
            'blocks/1/attn/query/kernel': ('embed', 'heads', 'kv'),
            'lm_head/kernel': ('embed', 'vocab'),
        },
    ),
    'equinox': (
        EquinoxLM,
        {
            'embedding/weight': TABLE,
            'attention/query_proj/weight': ('heads', 'embed'),
            'attention/output_proj/weight': ('embed', 'heads'),
            'mlp/layers/0/weight': OUT_OF,
            'mlp/layers/1/weight': INTO,
        },
    ),
    'haiku, language model': (
        lambda key: haiku_lm.init(key, jnp.ones((1, 16), int)),
        {
            'embed/embeddings': TABLE,
            'multi_head_attention/query/w': QUERY,
            'multi_head_attention/linear/w': BACK,
            'mlp/~/linear_0/w': INTO,
            'mlp/~/linear_1/w': OUT_OF,
            'head/w': ('embed', 'vocab'),
        },
    ),
    'haiku, dense': (
        lambda key: haiku_critic.init(key, jnp.ones((1, 24))),
        {'linear_0/w': INTO, 'linear_1/w': OUT_OF, 'linear_2/w': (('data', 'model'), None)},
    ),
    **{
        f'mamba, {vocab}': (
            lambda key, vocab=vocab: mamba(vocab),
            {
                'embedding/embedding': TABLE,
                'mixer/in_proj/kernel': INTO,
                'mixer/out_proj/kernel': OUT_OF,
                'mixer/x_proj/kernel': ('mlp', None),
                'mixer/dt_proj/kernel': (None, 'mlp'),
                'mixer/A_log': ('mlp', None),
            },
        )
        for vocab in (64, 128, 256, 4096)
    },
    'diffusion transformer': (
        lambda key: dit(),
        {
            'blocks_0/attn/qkv/kernel': QUERY,
            'blocks_0/attn/proj/kernel': BACK,
            'blocks_1/mlp/Dense_0/kernel': INTO,
            'blocks_1/mlp/Dense_1/kernel': OUT_OF,
            'blocks_1/adaLN_modulation/kernel': INTO,
            'x_embedder/kernel': (None, None, None, ('data', 'model')),  # not of the 16 channels
            't_embedder/Dense_0/kernel': INTO,
            't_embedder/Dense_1/kernel': OUT_OF,
            'final/linear/kernel': INTO,
        },
    ),
    'mixer': (
        lambda key: mixer(),
        {
            'token_mixing/Dense_0/kernel': (None, 'mlp'),
            'token_mixing/Dense_1/kernel': ('mlp', None),
            'channel_mixing/Dense_0/kernel': INTO,
            'channel_mixing/Dense_1/kernel': OUT_OF,
            'head/kernel': ('embed', 'vocab'),
        },
    ),
    'experts in a list': (
        lambda key: mixtral(),
        {
            'embed_tokens/embedding': TABLE,
            'block_sparse_moe/gate/kernel': (None, None),
            'experts/0/w1/kernel': INTO,
            'experts/1/w2/kernel': OUT_OF,
            'experts/7/w3/kernel': INTO,
        },
    ),
    'recurrent': (
        lambda key: recurrent(),
        {'lstm/hi/kernel': INTO, 'lstm/if/kernel': INTO, 'projection/kernel': INTO},
    ),
    'blocks of attention': (
        lambda key: attention_blocks(),
        {
            'attention_blocks/0/attention/query_proj/weight': ('heads', 'embed'),
            'attention_blocks/0/linear1/weight': ('mlp', 'embed'),
            'attention_blocks/1/linear2/weight': ('embed', 'mlp'),
        },
    ),
    'two recurrent layers': (
        lambda key: two_lstms(),
        {
            'lstm/linear/w': INTO,
            'lstm_1/linear/w': INTO,
            'norm1/weight': (None, ('data', 'model')),  # a norm multiplies no rows by columns
            'norm1/bias': (None, ('data', 'model')),
        },
    ),
    'unet': (
        lambda key: unet(),
        {
            'attn1/to_q/kernel': QUERY,
            'attn1/to_out_0/kernel': BACK,
            'ff/net_0/proj/kernel': INTO,
            'ff/net_2/kernel': OUT_OF,
        },
    ),
    'latent attention': (
        lambda key: deepseek(),
        {
            'embed_tokens/embedding': TABLE,
            'q_a_proj/kernel': QUERY,
            'q_b_proj/kernel': (None, 'heads'),
            'o_proj/kernel': BACK,
            'w1/kernel': INTO,
            'w2/kernel': OUT_OF,
            'w3/kernel': INTO,
        },
    ),
}


def names_of(rules):
    return {path: rule.names for rule in rules.matches.rules for path in rule.arrays}


@pytest.mark.parametrize('name', CASES)
def test_names_stand_in_their_layers(name):
    init, expected = CASES[name]
    taken = names_of(suggest_rules(init, MESH, KEY))
    paths = {f'params/{path}': names for path, names in taken.items()}
    for end, names in expected.items():
        found = {path: n for path, n in paths.items() if path.endswith(end)}
        assert found and {*found.values()} == {names}, (end, found)


# Meshes: those whose model axis has one device, and those without one.


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('sizes', [{'data': 8, 'model': 1}, {'replica': 2, 'data': 4}])
def test_a_mesh_without_model_parallelism_shards_the_state(name, sizes):
    mesh = create_mesh(tuple(sizes.values()), tuple(sizes))
    state = jax.tree.map(lambda x: x if hasattr(x, 'dtype') else None, MODELS[name]())
    rules = suggest_rules(state, mesh)
    # Also if a list of the rules is edited and passed.
    plan = PjitPartitioner(mesh, AxisRules(names=[*rules])).plan(state)
    total = held = whole = 0
    for row in plan.rows:
        total += 4 * math.prod(row.shape)
        held += 4 * math.prod(row.shard_shape)
        whole += 4 * math.prod(row.shape) * (row.shard_shape == row.shape)
    assert held <= 1.1 * total / sizes['data']
    assert (rules.share.per_device, rules.share.replicated) == (held, whole)


def test_axes_without_standard_rules_stand_in_place_of_names():
    mesh = create_mesh((4, 2), ('fsdp_like', 'tensor'))
    state = {'up': {'kernel': array(64, 256)}, 'down': {'kernel': array(256, 64)}}
    rules = suggest_rules(state, mesh)
    shown = "PjitPartitioner(mesh, AxisRules([('batch', ('fsdp_like',))], names=rules))"
    assert shown in str(rules)
    for partitioner in PjitPartitioner(mesh, rules), eval(shown, {**globals(), **locals()}):
        specs = partitioner.plan(state).specs
        assert specs['up']['kernel'] == P('fsdp_like', 'tensor')
        assert specs['down']['kernel'] == P('tensor', 'fsdp_like')
        assert partitioner.data_partition_spec == P('fsdp_like')


def test_experts_are_sharded_over_their_axis():
    init, _ = CASES['linen, experts']
    taken = names_of(suggest_rules(init, {'data': 2, 'expert': 2, 'model': 2}, KEY))
    assert taken['moe_0/wi'] == ('expert', 'embed', 'mlp')


# Hand arithmetic: 4 * 64 * 256 bytes twice, 4 * 64 bytes of a vector, on data 4 x model 2.


def test_the_share_that_stays_on_every_device_is_printed():
    state = {'up': {'kernel': array(64, 256)}, 'down': {'kernel': array(256, 64)}}
    rules = suggest_rules(state | {'norm': {'scale': array(64)}}, MESH)
    assert (rules.share.total, rules.share.replicated) == (131_328, 256)
    assert (rules.share.per_device, rules.share.by_fsdp) == (65_792, 16_640)
    text = ' '.join(line.lstrip('# ') for line in str(rules).splitlines())
    assert 'PjitPartitioner(mesh, AxisRules(names=rules)) Whole on' in text
    assert 'Whole on every device of data 4 x model 2: 0.2% of 131.3 kB' in text
    assert 'Each device holds 50.1%; an even share is 12.5%' in text
    assert 'With AxisRules(fsdp_logical_axis_rules(standard_logical_axis_rules()), ' in text
    assert 'names=rules) it holds 12.7%' in text


# Init functions.


def needs_mesh(key):
    kernel = jax.random.normal(key, (64, 256))
    kernel = jax.lax.with_sharding_constraint(kernel, P('data'))
    return {'up': {'kernel': kernel}, 'activation': jax.nn.relu}


@pytest.mark.parametrize(
    'mesh',
    [MESH, {'data': -1, 'model': 2}, create_mesh((4, 2), tuple(MESH)), MeshConfig(axes=MESH)],
)
def test_an_init_function_that_needs_a_mesh(mesh):
    assert dict(suggest_rules(needs_mesh, mesh, KEY)) == {'.*/kernel': ('embed', 'mlp')}


def test_a_module_that_is_called_is_a_state():
    for made, init in (
        (eqx.filter_eval_shape(EquinoxLM, KEY), EquinoxLM),
        (nnx.eval_shape(lambda: NnxLM(nnx.Rngs(0))), lambda key: NnxLM(nnx.Rngs(key))),
    ):
        assert callable(made)
        assert [*suggest_rules(made, MESH)] == [*suggest_rules(init, MESH, KEY)]


@pytest.mark.parametrize(
    'args, words',
    [
        ((needs_mesh, KEY), ['must be a mesh', 'suggest_rules(init, mesh, key)']),
        (
            (needs_mesh, MESH),
            ['needs_mesh(key) got 0 arguments', 'write suggest_rules(needs_mesh, mesh, key)'],
        ),
        (({'w': array(64, 64)}, MESH, KEY), ['a dict, and 1 argument', 'only an init function']),
        ((needs_mesh, {'data': 'four'}, KEY), ["'four'"]),
    ],
)
def test_misuse(args, words):
    with pytest.raises(ValueError) as error:
        suggest_rules(*args)
    assert all(word in str(error.value) for word in words) and '\n' not in str(error.value)


def test_an_init_function_without_its_mesh_says_so():
    with pytest.raises(RuntimeError) as error:
        suggest_rules(needs_mesh, None, KEY)
    assert any('pass the mesh' in note for note in error.value.__notes__)
