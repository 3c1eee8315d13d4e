"""Models of linen as its users write them, unmodified, over axes of any type."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AxisType, PartitionSpec as P

from partitioning import PjitPartitioner, TrainState, create_mesh

pytestmark = pytest.mark.core

VOCAB, EMBED, HEADS, DEPTH, BATCH, LENGTH = 16, 8, 2, 4, 8, 4
LOGICAL = [('batch', 'data'), ('embed', 'data'), ('mlp', 'model'), ('vocab', 'model')]
LOGICAL += [('heads', 'model'), ('kv', None), ('layers', None)]
# The names of kernels, with one entry per dimension or, as in flax's lm1b, with fewer.
NAMES = {
    'all': {
        'qkv': ('embed', 'heads', 'kv'),
        'out': ('heads', 'kv', 'embed'),
        'up': ('embed', 'mlp'),
    },
    'fewer': {'qkv': ('embed', 'heads'), 'out': ('heads',), 'up': ('embed', 'mlp')},
    'mesh axes': {
        'qkv': ('data', 'model', None),
        'out': ('model',),
        'up': (None, ('data', 'model')),
    },
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, BATCH, LENGTH), np.int32)
TX = optax.adam(1e-2)
KEY = jax.random.key(0)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def loss_of(logits, tokens):
    targets = (tokens + 1) % VOCAB
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def partitioner_of(axis_types=AUTO, **settings):
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    return PjitPartitioner(mesh=mesh, **{'logical_axis_rules': LOGICAL, **settings})


def losses_of(partitioner, init, step):
    """The plan of a program, and its losses; the plan must hold after the steps."""
    plan = partitioner.plan(init, KEY)
    assert partitioner.get_mesh_axes(partitioner.eval_shape(init, KEY)) == plan.specs
    state, losses = plan.init(KEY), []
    run = partitioner.partition(
        step, (plan.specs, partitioner.data_partition_spec), (plan.specs, None), donate_argnums=0
    )
    for tokens in TOKENS:
        state, loss = run(state, partitioner.to_global(tokens))
        losses.append(float(loss))
    plan.check(state)
    assert run.num_traces() == 1
    return plan, losses


class Block(nn.Module):
    boxes: str

    @nn.compact
    def __call__(self, x, _=None):
        names, lecun = NAMES[self.boxes], nn.initializers.lecun_normal()
        box = nn.with_partitioning if self.boxes == 'mesh axes' else nn.with_logical_partitioning
        h = nn.MultiHeadDotProductAttention(
            HEADS,
            qkv_features=HEADS * DEPTH,
            kernel_init=box(lecun, names['qkv']),
            out_kernel_init=box(lecun, names['out']),
            use_bias=False,
            deterministic=True,
        )(x, x)
        h = nn.DenseGeneral(EMBED, use_bias=False, kernel_init=box(lecun, names['up']))(x + h)
        return x + jnp.tanh(h), None


class Decoder(nn.Module):
    boxes: str
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        box = nn.with_logical_partitioning
        embed = nn.Embed(
            VOCAB, EMBED, embedding_init=box(nn.initializers.normal(1), ('vocab', 'embed'))
        )
        x = embed(tokens)
        if self.scanned:
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={'params': 0},
                split_rngs={'params': True},
                length=2,
                metadata_params={nn.PARTITION_NAME: 'layers'},
            )
            x, _ = layers(self.boxes)(x)
        else:
            x, _ = Block(self.boxes)(x)
        return embed.attend(x)


def linen_step(model, state, tokens):
    def loss(params):
        return loss_of(model.apply({'params': params}, tokens), tokens)

    value, grads = jax.value_and_grad(loss)(state.params)
    if isinstance(state, TrainState):
        return state.apply_gradients(grads, TX), value
    return state.apply_gradients(grads=grads), value


def flax_state(apply, params):
    return train_state.TrainState.create(apply_fn=apply, params=params, tx=TX)


@functools.cache
def plain_losses(scanned):
    """The losses of the unpartitioned program, whose parameters have no boxes."""
    model = Decoder('all', scanned)
    state = flax_state(None, nn.unbox(model.init(KEY, TOKENS[0])['params']))
    step, losses = jax.jit(functools.partial(linen_step, model)), []
    for tokens in TOKENS:
        state, loss = step(state, tokens)
        losses.append(float(loss))
    return losses


@pytest.mark.long
@pytest.mark.parametrize(
    'axis_types, boxes, scanned, ours',
    [
        (AUTO, 'fewer', True, False),
        (EXPLICIT, 'all', False, False),
        ((AUTO, EXPLICIT), 'mesh axes', False, True),
    ],
)
def test_a_linen_decoder_trains(axis_types, boxes, scanned, ours):
    """Attention and DenseGeneral with flax's boxes, in our train state or Flax's."""
    model = Decoder(boxes, scanned)
    apply = model.apply

    def init(key):
        variables = model.init(key, TOKENS[0])
        return TrainState.create(variables, TX) if ours else flax_state(apply, variables['params'])

    plan, losses = losses_of(partitioner_of(axis_types), init, functools.partial(linen_step, model))
    np.testing.assert_allclose(losses, plain_losses(scanned), atol=1e-5)
    (query,) = [row for row in plan.rows if row.path.startswith('params/') and 'query' in row.path]
    assert query.spec == P(*[None] * scanned, 'data', 'model', None)
    (copy,) = [row for row in plan.rows if 'mu' in row.path and 'query' in row.path]
    assert copy.spec == query.spec


def test_names_that_are_fewer_than_the_dimensions():
    """The plan says which dimensions have no name, and lint says what to write."""
    plan = partitioner_of().plan(lambda key: Decoder('fewer').init(key, TOKENS[0]), KEY)
    out = 'params/Block_0/MultiHeadDotProductAttention_0/out/kernel'
    first, *others = plan[out].dimensions
    assert (first.name, first.mesh_axes) == ('heads', 'model')
    for dimension in others:
        assert (dimension.name, dimension.mesh_axes) == (None, None)
        assert "('heads',) cover 1 of 3 dimensions" in dimension.reason
    few = {finding.where: finding for finding in plan.lint() if finding.kind == 'few names'}
    assert {path.rpartition('_0/')[2] for path in few} == {
        'query/kernel', 'key/kernel', 'value/kernel', 'out/kernel'
    }  # fmt: skip
    assert few[out].severity == 'warning' and "('heads', None, None)" in few[out].message


@pytest.mark.parametrize('axis', [0, 1, -1])
def test_lifted_layers_with_fewer_names(axis):
    """The new dimension is named where it is, also after dimensions without a name."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.ones, ('embed',))
            return nn.DenseGeneral((2, 4), use_bias=False, kernel_init=init)(x)

    layers = nn.vmap(
        Layer,
        variable_axes={'params': axis},
        split_rngs={'params': True},
        in_axes=None,
        axis_size=3,
        metadata_params={nn.PARTITION_NAME: 'layers'},
    )()
    state = partitioner_of().eval_shape(lambda key: layers.init(key, jnp.ones((2, 8))), KEY)
    kernel = state['params']['DenseGeneral_0']['kernel']
    shape = [8, 2, 4]
    shape.insert(axis if axis >= 0 else 3, 3)
    assert kernel.value.shape == tuple(shape)
    names = partitioner_of().get_logical_axes(state)['params']['DenseGeneral_0']['kernel']
    assert names == tuple({8: 'embed', 3: 'layers'}.get(size) for size in shape)
