"""chex: a variational autoencoder whose state is a chex.dataclass with averaged parameters."""

from functools import partial
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from client_runs import functional, image_batches

WIDTH, LATENTS = 16, 8


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, images, key):
        x = nn.relu(nn.Conv(WIDTH, (3, 3), strides=2)(images))
        mean, log_variance = jnp.split(nn.Dense(2 * LATENTS)(x.reshape(len(x), -1)), 2, -1)
        z = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
        x = nn.relu(nn.Dense(16 * WIDTH)(z)).reshape(-1, 4, 4, WIDTH)
        return nn.ConvTranspose(3, (3, 3), strides=(2, 2))(x), mean, log_variance


@chex.dataclass(frozen=True)
class AutoencoderState:
    params: chex.ArrayTree
    opt_state: optax.OptState
    ema: Any
    key: chex.PRNGKey
    step: chex.Array


autoencoder, lion, ema = Autoencoder(), optax.lion(1e-3), optax.ema(0.99)


def autoencoder_init(key):
    params = autoencoder.init(key, jnp.ones((1, 8, 8, 3)), key)['params']
    return AutoencoderState(
        params=params, opt_state=lion.init(params), ema=ema.init(params), key=key, step=0
    )


def autoencoder_step(state, batch):
    key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        images, mean, log_variance = autoencoder.apply({'params': params}, batch['image'], key)
        chex.assert_equal_shape((images, batch['image']))
        divergence = -0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).sum(-1)
        return (optax.huber_loss(images, batch['image']).sum((1, 2, 3)) + divergence).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    updates, opt_state = lion.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    _, averaged = ema.update(params, state.ema)
    return state.replace(
        params=params, opt_state=opt_state, ema=averaged, step=state.step + 1
    ), loss


CHEX_AUTOENCODER = functional(autoencoder_init, autoencoder_step, partial(image_batches, 8, 8))
