"""A small train step whose memory, FLOPs and exchanges can be counted by hand."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from partitioning import MeshConfig, PjitPartitioner

ROWS, WIDTH, HIDDEN = 64, 256, 512
PRODUCT = 2 * ROWS * WIDTH * HIDDEN  # the FLOPs of each matrix product


def init(key):
    """Two matrices of float32, as AdamW's state, and a step number."""
    named = nn.LogicallyPartitioned
    params = {
        'up': named(jnp.zeros((WIDTH, HIDDEN)), ('embed', 'mlp')),
        'down': named(jnp.zeros((HIDDEN, WIDTH)), ('mlp', 'embed')),
        'scale': named(jnp.ones((WIDTH,)), ('norm',)),
    }
    moments = jax.tree.map(jnp.zeros_like, params)
    return {'params': params, 'opt_state': {'mu': moments}, 'step': jnp.zeros((), jnp.int32)}


def train_step(state, batch, times):
    """Computes the hidden layer again in the backward pass."""

    def loss(params):
        def network(x):
            return jnp.tanh(x * params['scale'] @ params['up']) @ params['down']

        return times * (jax.checkpoint(network)(batch['x']) ** 2).sum()

    gradients = jax.grad(loss)(state['params'])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state['opt_state']['mu'], gradients)
    params = jax.tree.map(lambda p, m: p - m, state['params'], mu)
    return {'params': params, 'opt_state': {'mu': mu}, 'step': state['step'] + 1}


BATCH = {'x': jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}
RULES = [('batch', 'data'), ('embed', 'data'), ('mlp', 'model'), ('norm', None)]


def partitioned(axes, **settings):
    """The partitioner, the step, and the abstract state, on CPU devices."""
    count = math.prod(axes.values())
    mesh = MeshConfig(axes=axes, devices=jax.devices()[:count])
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES, **settings)
    plan = partitioner.plan(init, jax.random.key(0))
    step = partitioner.partition(
        train_step,
        (plan.specs, partitioner.data_partition_spec),
        plan.specs,
        static_argnums=2,
        donate_argnums=0,
    )
    return partitioner, step, plan.abstract_state
