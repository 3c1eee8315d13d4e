"""flax.nnx: a CNN like flax's tutorial, a small Gemma with names, and an encoder without."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from client_runs import KEY, Client, functional, image_batches, suggested, token_batches
from flax import nnx

VOCAB, WIDTH, HEADS, HEAD_SIZE, HIDDEN, CLASSES = 32, 16, 8, 4, 32, 8


def train(model, optimizer, train_step, batches):
    return [float(train_step(model, optimizer, batch)) for batch in batches]


# A CNN with BatchNorm and Dropout. Statistics and random streams are variables of the model.


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(3, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.linear1 = nnx.Linear(64, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.linear2 = nnx.Linear(32, CLASSES, rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))

    def __call__(self, x):
        x = self.pool(nnx.relu(self.norm1(self.conv1(x))))
        x = self.pool(nnx.relu(self.norm2(self.conv2(x))))
        x = nnx.relu(self.dropout(self.linear1(x.reshape(x.shape[0], -1))))
        return self.linear2(x)


def cnn_create(key):
    model = CNN(rngs=nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)


def cnn_train_step(model, optimizer, batch):
    def loss_fn(model):
        logits = model(batch['image'])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch['label']).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def cnn_plain(batches):
    return train(*cnn_create(KEY), nnx.jit(cnn_train_step), batches)


def cnn_partitioned(partitioner):
    def train_step(state, batch):
        loss = cnn_train_step(*state, batch)
        return state, loss

    return partitioner.setup(cnn_create, train_step, KEY)


NNX_CNN = Client(
    cnn_plain,
    cnn_partitioned,
    partial(image_batches, 8, CLASSES),
    suggested(cnn_create),
)


# A decoder in the style of Gemma: grouped queries, rotary positions, names in the metadata.


def names(*axes):
    return {'kernel_metadata': {'out_sharding': axes}}


def rotate(x):
    """Rotary positions of x [rows, length, heads, size]."""
    angles = jnp.arange(x.shape[1])[:, None] / 100 ** (jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class GemmaAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        project = partial(nnx.LinearGeneral, WIDTH, use_bias=False, rngs=rngs)
        self.query = project((HEADS, HEAD_SIZE), **names('embed', 'heads', 'kv'))
        self.key = project((1, HEAD_SIZE), **names('embed', None, 'kv'))
        self.value = project((1, HEAD_SIZE), **names('embed', None, 'kv'))
        self.out = nnx.LinearGeneral(
            (HEADS, HEAD_SIZE),
            WIDTH,
            axis=(-2, -1),
            use_bias=False,
            rngs=rngs,
            **names('heads', 'kv', 'embed'),
        )

    def __call__(self, x):
        query, key, value = rotate(self.query(x)), rotate(self.key(x)), self.value(x)
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))


class GemmaBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        norm = partial(nnx.RMSNorm, WIDTH, scale_metadata={'out_sharding': ('embed',)}, rngs=rngs)
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm1, self.norm2, self.attention = norm(), norm(), GemmaAttention(rngs)
        self.gate = linear(WIDTH, HIDDEN, **names('embed', 'mlp'))
        self.up = linear(WIDTH, HIDDEN, **names('embed', 'mlp'))
        self.down = linear(HIDDEN, WIDTH, **names('mlp', 'embed'))

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))


class Gemma(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = {'embedding_metadata': {'out_sharding': ('vocab', 'embed')}}
        self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **table)
        self.blocks = nnx.List([GemmaBlock(rngs)])

    def __call__(self, tokens):
        x = self.embedder(tokens) * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return self.embedder.attend(x)


def gemma_create(key):
    model = Gemma(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def gemma_train_step(model, optimizer, tokens):
    def loss_fn(model):
        logits = model(tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def gemma_plain(batches):
    with nnx.use_eager_sharding(False):
        return train(*gemma_create(KEY), nnx.jit(gemma_train_step), batches)


def gemma_partitioned(partitioner):
    def train_step(state, batch):
        loss = gemma_train_step(*state, batch)
        return state, loss

    return partitioner.setup(gemma_create, train_step, KEY)


NNX_GEMMA = Client(gemma_plain, gemma_partitioned, partial(token_batches, VOCAB))


# An encoder with nnx.MultiHeadAttention for masked tokens, in nnx's functional style.


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.dropout(self.attention(x))))


def encoder_init(key):
    model = Encoder(nnx.Rngs(key))
    return nnx.split((model, nnx.Optimizer(model, optax.rmsprop(1e-2), wrt=nnx.Param)))


def encoder_step(state, tokens):
    model, optimizer = nnx.merge(*state)

    def loss_fn(model):
        logits = model(jnp.where(tokens % 4 == 0, 0, tokens))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.split((model, optimizer)), loss


NNX_ENCODER = functional(encoder_init, encoder_step, partial(token_batches, VOCAB))
