"""A classifier of images: a linen transformer over patches, with flax's constraints and bfloat16.

Suffixes of array names: B batch, L patches, D embed, F mlp, H heads, K kv, C classes, P pixels.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import with_logical_constraint as constrain

from benchmarks.blame_programs.building import build_step
from partitioning import TrainState

MESH = {'data': 4, 'model': 2}
RULES = [
    ('batch', 'data'),
    ('classes', 'model'),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('embed', 'data'),
    ('kv', None),
    ('length', None),
    ('pixels', None),
]
DIM, HIDDEN, HEADS, KV, CLASSES, LAYERS = 512, 2048, 8, 64, 4096, 3
BATCH, PATCHES, PIXELS = 64, 64, 768


def box(*names):
    """An initializer of a parameter with logical axes."""
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x_BLD):
        normed_BLD = nn.LayerNorm(dtype=jnp.bfloat16, use_bias=False, use_scale=False)(x_BLD)
        wqkv = self.param('qkv', box('embed', None, 'heads', 'kv'), (DIM, 3, HEADS, KV))
        qkv_CBLHK = jnp.einsum('BLD,DCHK->CBLHK', normed_BLD, wqkv.astype(jnp.bfloat16))
        qkv_CBLHK = constrain(qkv_CBLHK, (None, 'batch', 'length', 'heads', 'kv'))
        mixed_BLHK = jax.nn.dot_product_attention(*qkv_CBLHK)
        mixed_BLHK = constrain(mixed_BLHK, ('batch', 'length', 'heads', 'kv'))
        wo = self.param('out', box('heads', 'kv', 'embed'), (HEADS, KV, DIM))
        mixed_BLD = jnp.einsum('BLHK,HKD->BLD', mixed_BLHK, wo.astype(jnp.bfloat16))
        x_BLD = constrain(x_BLD + mixed_BLD, ('batch', 'length', 'embed'))
        up = self.param('up', box('embed', 'mlp'), (DIM, HIDDEN)).astype(jnp.bfloat16)
        down = self.param('down', box('mlp', 'embed'), (HIDDEN, DIM)).astype(jnp.bfloat16)
        hidden_BLF = constrain(jax.nn.silu(x_BLD @ up), ('batch', 'length', 'mlp'))
        return constrain(x_BLD + hidden_BLF @ down, ('batch', 'length', 'embed'))


class Model(nn.Module):
    @nn.compact
    def __call__(self, images_BLP):
        patch = self.param('patch', box('pixels', 'embed'), (PIXELS, DIM))
        place = self.param('place', box('length', 'embed'), (PATCHES, DIM))
        x_BLD = images_BLP.astype(jnp.bfloat16) @ patch.astype(jnp.bfloat16)
        x_BLD = constrain(x_BLD + place.astype(jnp.bfloat16), ('batch', 'length', 'embed'))
        for number in range(LAYERS):
            x_BLD = nn.remat(Block)(name=f'block_{number}')(x_BLD)
        pooled_BD = constrain(jnp.mean(x_BLD, axis=1), ('batch', 'embed'))
        head = self.param('head', box('embed', 'classes'), (DIM, CLASSES))
        return constrain(pooled_BD.astype(jnp.float32) @ head, ('batch', 'classes'))


MODEL = Model()
OPTIMIZER = optax.sgd(1e-3, momentum=0.9, nesterov=True)


def init(key):
    images = jnp.zeros((BATCH, PATCHES, PIXELS))
    return TrainState.create(MODEL.init(key, images)['params'], OPTIMIZER)


def loss_of(params, batch):
    logits_BC = MODEL.apply({'params': params}, batch['images'])
    log_z_B = jax.nn.logsumexp(logits_BC, axis=-1)
    hot_BC = jax.nn.one_hot(batch['labels'], CLASSES)
    return jnp.mean(log_z_B - jnp.sum(logits_BC * hot_BC, axis=-1))


def step(state, batch):
    value, gradient = jax.value_and_grad(loss_of)(state.params, batch)
    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    return new, value


def build(rules):
    """The partitioner, the partitioned step, and its arguments."""
    batch = {
        'images': jax.ShapeDtypeStruct((BATCH, PATCHES, PIXELS), jnp.float32),
        'labels': jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    return build_step(MESH, rules, init, step, batch)
