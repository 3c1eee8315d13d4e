"""dm-haiku: a transformer with dropout, and a convolutional net with state."""

from functools import partial
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from client_runs import LENGTH, functional, image_batches, token_batches

VOCAB, WIDTH, HEADS, CLASSES = 32, 16, 8, 8


class TrainingState(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState
    rng: jax.Array
    step: jax.Array


@hk.transform
def transformer(tokens):
    init = hk.initializers.VarianceScaling(2.0)
    x = hk.Embed(VOCAB, WIDTH)(tokens)
    x = x + hk.get_parameter('positions', (LENGTH, WIDTH), init=init)
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
    y = hk.LayerNorm(-1, True, True)(x)
    attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=init, model_size=WIDTH)
    x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(y, y, y, mask=mask))
    x = x + hk.nets.MLP([2 * WIDTH, WIDTH])(hk.LayerNorm(-1, True, True)(x))
    return hk.Linear(VOCAB)(x)


clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-2))


def transformer_init(key):
    rng, init_rng = jax.random.split(key)
    params = transformer.init(init_rng, jnp.ones((1, LENGTH), jnp.int32))
    return TrainingState(params, clipped.init(params), rng, jnp.array(0))


def transformer_update(state, tokens):
    rng, next_rng = jax.random.split(state.rng)

    def loss_fn(params):
        logits = transformer.apply(params, rng, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    updates, opt_state = clipped.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return TrainingState(params, opt_state, next_rng, state.step + 1), loss


HAIKU_TRANSFORMER = functional(transformer_init, transformer_update, partial(token_batches, VOCAB))


# A convolutional net whose BatchNorm statistics are haiku's state.


@hk.transform_with_state
def convnet(images, is_training):
    x = images
    for channels in (8, 16):
        x = hk.Conv2D(channels, 3, with_bias=False)(x)
        x = hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training)
        x = hk.max_pool(jax.nn.relu(x), (2, 2, 1), (2, 2, 1), 'SAME')
    return hk.Linear(CLASSES)(hk.Flatten()(x))


class ConvnetState(NamedTuple):
    params: hk.Params
    state: hk.State
    opt_state: optax.OptState


momentum = optax.sgd(1e-2, momentum=0.9)


def convnet_init(key):
    params, state = convnet.init(key, jnp.ones((1, 8, 8, 3)), is_training=True)
    return ConvnetState(params, state, momentum.init(params))


def convnet_update(train_state, batch):
    def loss_fn(params):
        logits, state = convnet.apply(params, train_state.state, None, batch['image'], True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch['label'])
        return losses.mean(), state

    (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(train_state.params)
    updates, opt_state = momentum.update(grads, train_state.opt_state)
    return ConvnetState(optax.apply_updates(train_state.params, updates), state, opt_state), loss


HAIKU_CONVNET = functional(convnet_init, convnet_update, partial(image_batches, 8, CLASSES))
