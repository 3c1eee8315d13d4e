"""A linen model with logical axes, which a partitioner lays out by rules."""

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
    ('mlp', 'model'),
    ('embed', 'data'),
    ('classes', 'model'),
    ('layers', None),
]
ROWS, WIDTH, HIDDEN, CLASSES, LAYERS = 32, 256, 1024, 512, 2


def kernel(*names):
    return nn.with_logical_partitioning(nn.initializers.normal(0.02), names)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        up = self.param('up', kernel('embed', 'mlp'), (WIDTH, HIDDEN))
        down = self.param('down', kernel('mlp', 'embed'), (HIDDEN, WIDTH))
        hidden = jax.nn.silu(x.astype(jnp.bfloat16) @ up.astype(jnp.bfloat16))
        hidden = constrain(hidden, ('batch', 'mlp'))
        out = hidden @ down.astype(jnp.bfloat16)
        return constrain(x + out.astype(jnp.float32), ('batch', None)), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )
        x, _ = layers(name='layers')(x, None)
        head = self.param('head', kernel('embed', 'classes'), (WIDTH, CLASSES))
        logits = x.astype(jnp.bfloat16) @ head.astype(jnp.bfloat16)
        return constrain(logits, ('batch', 'classes')).astype(jnp.float32)


def build():
    model, optimizer = Model(), optax.adamw(1e-3)

    def init(key):
        params = model.init(key, jnp.zeros((ROWS, WIDTH)))['params']
        return TrainState.create(params, optimizer)

    def step(state, batch):
        def loss_of(params):
            logits = model.apply({'params': params}, batch['x'])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch['y']).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        changed = {'step': state.step + 1, 'params': params, 'opt_state': opt_state}
        return dataclasses.replace(state, **changed), loss

    batch = {
        'x': jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        'y': jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    }
    _, partitioned, args = build_step(MESH, RULES, init, step, batch)
    return partitioned, args
