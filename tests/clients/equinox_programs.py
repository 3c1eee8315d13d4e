"""equinox: an MLP with filtered transformations, and a transformer with jax's own."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from client_runs import KEY, LENGTH, Client, functional, image_batches, suggested, token_batches

VOCAB, WIDTH, HEADS, CLASSES = 32, 16, 8, 8


# An MLP: eqx.filter_jit passes over the activation, which is a leaf but not an array.

adam = optax.adam(1e-2)


def create(key):
    model = eqx.nn.MLP(8 * 8 * 3, CLASSES, width_size=64, depth=1, key=key)
    return model, adam.init(eqx.filter(model, eqx.is_array))


@eqx.filter_value_and_grad
def mlp_loss(model, batch):
    logits = jax.vmap(model)(batch['image'].reshape(len(batch['image']), -1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['label']).mean()


@eqx.filter_jit
def make_step(model, opt_state, batch):
    loss, grads = mlp_loss(model, batch)
    updates, opt_state = adam.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def mlp_plain(batches):
    model, opt_state = create(KEY)
    losses = []
    for batch in batches:
        model, opt_state, loss = make_step(model, opt_state, batch)
        losses.append(float(loss))
    return losses


def mlp_partitioned(partitioner):
    def init(key):
        return eqx.filter(create(key), eqx.is_array)

    def train_step(state, batch):
        *state, loss = make_step(*eqx.combine(state, eqx.filter_eval_shape(create, KEY)), batch)
        return eqx.filter(tuple(state), eqx.is_array), loss

    return partitioner.setup(init, train_step, KEY)


EQUINOX_MLP = Client(
    mlp_plain,
    mlp_partitioned,
    partial(image_batches, 8, CLASSES),
    suggested(lambda key: eqx.filter(create(key), eqx.is_array)),
)


# A transformer: its arrays are the state, and its static part is closed over.


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        attention_key, mlp_key = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention_key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=mlp_key)

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.positions = jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.blocks = [Block(keys[2])]
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


adamw = optax.adamw(1e-2)
_, static_part = eqx.partition(Transformer(KEY), eqx.is_inexact_array)


def transformer_init(key):
    params = eqx.filter(Transformer(key), eqx.is_inexact_array)
    return params, adamw.init(params)


def transformer_step(state, tokens):
    params, opt_state = state

    def loss_fn(params):
        logits = jax.vmap(eqx.combine(params, static_part))(tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adamw.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


EQUINOX_TRANSFORMER = functional(transformer_init, transformer_step, partial(token_batches, VOCAB))
