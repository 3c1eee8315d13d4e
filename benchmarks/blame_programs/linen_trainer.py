"""A trainer of one's own: a linen transformer with logical axes, optax, and a hand-written loss.

Suffixes of array names: B batch, L length, D embed, F mlp, H heads, K kv, V vocab.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.blame_programs.building import build_step
from partitioning import TrainState, constrain

MESH = {'data': 4, 'model': 2}
RULES = [
    ('batch', 'data'),
    ('vocab', 'model'),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('embed', 'data'),
    ('kv', None),
    ('length', None),
    ('layers', None),
]
DIM, HIDDEN, HEADS, KV, VOCAB, LAYERS = 512, 2048, 8, 64, 8192, 4
BATCH, LENGTH = 32, 256


def kernel(*names):
    """An initializer of a parameter with logical axes."""
    return nn.with_logical_partitioning(nn.initializers.normal(0.02), names)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x_BLD):
        shape, names = (DIM, HEADS, KV), ('embed', 'heads', 'kv')
        wq = self.param('query', kernel(*names), shape)
        wk = self.param('key', kernel(*names), shape)
        wv = self.param('value', kernel(*names), shape)
        wo = self.param('out', kernel('heads', 'kv', 'embed'), (HEADS, KV, DIM))
        q_BLHK, k_BLHK, v_BLHK = (jnp.einsum('BLD,DHK->BLHK', x_BLD, w) for w in (wq, wk, wv))
        q_BLHK = constrain(q_BLHK, ('batch', 'length', 'heads', 'kv'))
        k_BLHK = constrain(k_BLHK, ('batch', 'length', 'heads', 'kv'))
        v_BLHK = constrain(v_BLHK, ('batch', 'length', 'heads', 'kv'))
        scores = jnp.einsum('BLHK,BMHK->BHLM', q_BLHK, k_BLHK) / KV**0.5
        weights = jax.nn.softmax(scores)
        mixed_BLHK = jnp.einsum('BHLM,BMHK->BLHK', weights, v_BLHK)
        mixed_BLHK = constrain(mixed_BLHK, ('batch', 'length', 'heads', 'kv'))
        return jnp.einsum('BLHK,HKD->BLD', mixed_BLHK, wo)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x_BLD, _):
        x_BLD = constrain(x_BLD, ('batch', 'length', 'embed'))
        mixed_BLD = Attention(name='attention')(x_BLD)
        x_BLD = constrain(x_BLD + mixed_BLD, ('batch', 'length', 'embed'))
        up = self.param('up', kernel('embed', 'mlp'), (DIM, HIDDEN))
        down = self.param('down', kernel('mlp', 'embed'), (HIDDEN, DIM))
        hidden_BLF = constrain(jax.nn.gelu(x_BLD @ up), ('batch', 'length', 'mlp'))
        out_BLD = hidden_BLF @ down
        return constrain(x_BLD + out_BLD, ('batch', 'length', 'embed')), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens_BL):
        table = self.param('embedding', kernel('vocab', 'embed'), (VOCAB, DIM))
        x_BLD = constrain(table[tokens_BL], ('batch', 'length', 'embed'))
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )
        x_BLD, _ = layers(name='layers')(x_BLD, None)
        head = self.param('head', kernel('embed', 'vocab'), (DIM, VOCAB))
        return constrain(x_BLD @ head, ('batch', 'length', 'vocab'))


MODEL = Model()
OPTIMIZER = optax.adamw(1e-3)


def nats(logits_BLV, targets_BL):
    """The mean negative log likelihood of the targets."""
    log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    hot_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1])
    found_BL = jnp.sum(logits_BLV * hot_BLV, axis=-1)
    return jnp.mean(log_z_BL - found_BL)


def init(key):
    tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)
    return TrainState.create(MODEL.init(key, tokens)['params'], OPTIMIZER)


def step(state, batch):
    def loss(params):
        logits_BLV = MODEL.apply({'params': params}, batch['inputs'])
        return nats(logits_BLV, batch['targets'])

    value, gradient = jax.value_and_grad(loss)(state.params)
    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    return new, value


def build(rules):
    """The partitioner, the partitioned step, and its arguments."""
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    batch = {'inputs': tokens, 'targets': tokens}
    return build_step(MESH, rules, init, step, batch)
