"""An encoder and a decoder with one table, in linen with the names of T5, and Adafactor.

Suffixes of array names: B batch, L targets, S inputs, D embed, F mlp, J joined_kv, H heads, K kv,
V vocab.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.blame_programs.building import build_step
from partitioning import TrainState, constrain

MESH = {'data': 2, 'model': 4}
RULES = [
    ('batch', 'data'),
    ('vocab', 'model'),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('kv', None),
    ('joined_kv', 'model'),
    ('embed', 'data'),
    ('length', None),
]
DIM, HIDDEN, HEADS, KV, VOCAB, LAYERS = 512, 1024, 8, 64, 8192, 2
BATCH, SOURCE, TARGET = 16, 128, 64


def boxed(*names):
    """An initializer of a parameter with logical axes."""
    return nn.with_logical_partitioning(nn.initializers.normal(0.02), names)


class Attention(nn.Module):
    causal: bool = False

    @nn.compact
    def __call__(self, x_BLD, y_BSD):
        joined = HEADS * KV
        wq = self.param('query', boxed('embed', 'joined_kv'), (DIM, joined))
        wk = self.param('key', boxed('embed', 'joined_kv'), (DIM, joined))
        wv = self.param('value', boxed('embed', 'joined_kv'), (DIM, joined))
        wo = self.param('out', boxed('joined_kv', 'embed'), (joined, DIM))
        q_BLHK = (x_BLD @ wq).reshape(*x_BLD.shape[:2], HEADS, KV)
        k_BSHK = (y_BSD @ wk).reshape(*y_BSD.shape[:2], HEADS, KV)
        v_BSHK = (y_BSD @ wv).reshape(*y_BSD.shape[:2], HEADS, KV)
        q_BLHK = constrain(q_BLHK, ('batch', 'length', 'heads', 'kv'))
        k_BSHK = constrain(k_BSHK, ('batch', 'length', 'heads', 'kv'))
        v_BSHK = constrain(v_BSHK, ('batch', 'length', 'heads', 'kv'))
        scores_BHLS = jnp.einsum('BLHK,BSHK->BHLS', q_BLHK, k_BSHK) / KV**0.5
        if self.causal:
            scores_BHLS += jnp.triu(jnp.full(scores_BHLS.shape[2:], -1e9), 1)
        mixed_BLHK = jnp.einsum('BHLS,BSHK->BLHK', jax.nn.softmax(scores_BHLS), v_BSHK)
        mixed_BLHK = constrain(mixed_BLHK, ('batch', 'length', 'heads', 'kv'))
        return mixed_BLHK.reshape(*x_BLD.shape[:2], joined) @ wo


class Feed(nn.Module):
    @nn.compact
    def __call__(self, x_BLD):
        gate = self.param('gate', boxed('embed', 'mlp'), (DIM, HIDDEN))
        up = self.param('up', boxed('embed', 'mlp'), (DIM, HIDDEN))
        down = self.param('down', boxed('mlp', 'embed'), (HIDDEN, DIM))
        hidden_BLF = jax.nn.gelu(x_BLD @ gate) * (x_BLD @ up)
        hidden_BLF = constrain(hidden_BLF, ('batch', 'length', 'mlp'))
        return hidden_BLF @ down


class Model(nn.Module):
    @nn.compact
    def __call__(self, inputs_BS, targets_BL):
        table = self.param('table', boxed('vocab', 'embed'), (VOCAB, DIM))
        x_BSD = constrain(table[inputs_BS], ('batch', 'length', 'embed'))
        for number in range(LAYERS):
            x_BSD += Attention(name=f'reads_{number}')(x_BSD, x_BSD)
            x_BSD = constrain(x_BSD, ('batch', 'length', 'embed'))
            x_BSD = x_BSD + Feed(name=f'read_{number}')(x_BSD)
            x_BSD = constrain(x_BSD, ('batch', 'length', 'embed'))
        y_BLD = constrain(table[targets_BL], ('batch', 'length', 'embed'))
        for number in range(LAYERS):
            y_BLD += Attention(name=f'recalls_{number}', causal=True)(y_BLD, y_BLD)
            y_BLD += Attention(name=f'looks_{number}')(y_BLD, x_BSD)
            y_BLD = constrain(y_BLD, ('batch', 'length', 'embed'))
            y_BLD = y_BLD + Feed(name=f'write_{number}')(y_BLD)
            y_BLD = constrain(y_BLD, ('batch', 'length', 'embed'))
        logits_BLV = jnp.einsum('BLD,VD->BLV', y_BLD, table)
        return constrain(logits_BLV, ('batch', 'length', 'vocab'))


MODEL = Model()
OPTIMIZER = optax.adafactor(1e-3)


def init(key):
    tokens = jnp.zeros((BATCH, SOURCE), jnp.int32), jnp.zeros((BATCH, TARGET), jnp.int32)
    return TrainState.create(MODEL.init(key, *tokens)['params'], OPTIMIZER)


def step(state, batch):
    def loss(params):
        logits_BLV = MODEL.apply({'params': params}, batch['inputs'], batch['targets'])
        log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
        hot_BLV = jax.nn.one_hot(jnp.roll(batch['targets'], -1, axis=1), VOCAB)
        return jnp.mean(log_z_BL - jnp.sum(logits_BLV * hot_BLV, axis=-1))

    value, gradient = jax.value_and_grad(loss)(state.params)
    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    return new, value


def build(rules):
    """The partitioner, the partitioned step, and its arguments."""
    batch = {
        'inputs': jax.ShapeDtypeStruct((BATCH, SOURCE), jnp.int32),
        'targets': jax.ShapeDtypeStruct((BATCH, TARGET), jnp.int32),
    }
    return build_step(MESH, rules, init, step, batch)
