"""A small model, its state under every kind of optimizer in optax, and a mesh for them."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from partitioning import PjitPartitioner, unbox

RULES = [('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('embed', 'data')]
RULES += [('layers', None)]
LAYERS, VOCAB, EMBED, MLP = 2, 32, 16, 64  # all sizes differ, so a size identifies its dimension
PARAMETERS = {  # path: (shape, logical axes, number of shards over 4 x 2 devices)
    'table': ((VOCAB, EMBED), ('vocab', 'embed'), 8),
    'layers/up': ((LAYERS, EMBED, MLP), ('layers', 'embed', 'mlp'), 8),
    'layers/bias': ((LAYERS, MLP), ('layers', 'mlp'), 2),
}
TOKENS = np.arange(32, dtype=np.int32).reshape(8, 4)


def waves(key, shape, dtype=jnp.float32):
    """An initializer that compiles fast; random numbers take longer to compile than the step."""
    return jnp.sin(jnp.arange(math.prod(shape), dtype=dtype)).reshape(shape) / 9


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        named = functools.partial(nn.with_logical_partitioning, waves)
        up = self.param('up', named(('embed', 'mlp')), (EMBED, MLP))
        bias = self.param('bias', named(('mlp',)), (MLP,))
        return x + (x @ up + bias) @ up.T, None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(waves, ('vocab', 'embed'))
        table = self.param('table', init, (VOCAB, EMBED))
        layers = nn.scan(
            Layer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=LAYERS,
            unroll=LAYERS,  # compiles faster than a loop
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )
        x, _ = layers(name='layers')(table[tokens], None)
        return x @ table.T


def by_rank(params):
    return jax.tree.map(lambda p: 'matrix' if p.ndim > 2 else 'other', params)


FACTORED = {'min_dim_size_to_factor': 8}
OPTIMIZERS = {
    'adamw': lambda: optax.adamw(1e-2),
    'clip and adam': lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    'sgd with momentum': lambda: optax.sgd(1e-2, momentum=0.9),
    'lion': lambda: optax.lion(1e-2),
    'adafactor': lambda: optax.adafactor(1e-2, **FACTORED),
    'adafactor with momentum': lambda: optax.adafactor(1e-2, momentum=0.9, **FACTORED),
    'adafactor, not factored': lambda: optax.adafactor(1e-2, factored=False),
    'multi_transform': lambda: optax.multi_transform(
        {'matrix': optax.adam(1e-2), 'other': optax.sgd(1e-2, momentum=0.9)}, by_rank
    ),
    'masked': lambda: optax.masked(
        optax.adamw(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 2, params)
    ),
    'MultiSteps': lambda: optax.MultiSteps(optax.adamw(1e-2), 2),
    'inject_hyperparams': lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    'muon': lambda: optax.contrib.muon(1e-2),
    'schedule_free': lambda: optax.contrib.schedule_free_adamw(1e-2),
    'prodigy': lambda: optax.contrib.prodigy(1.0),
    'sm3': lambda: optax.sm3(1e-2),
    'novograd': lambda: optax.novograd(1e-2),
    'amsgrad': lambda: optax.amsgrad(1e-2),
    'adadelta': lambda: optax.adadelta(1e-2),
    'sophia': lambda: optax.contrib.sophia(1e-2),
    'lbfgs': lambda: optax.lbfgs(
        memory_size=3, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=4)
    ),
    'galore': lambda: optax.contrib.galore(1e-2, rank=4),
}


def initializer(tx):
    def init(key):
        params = Model().init(key, TOKENS[:1])['params']
        return {'params': params, 'opt_state': tx.init(unbox(params)), 'step': jnp.int32(0)}

    return init


@functools.cache
def partitioner_of_4_by_2():
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
    return partitioner


@functools.cache
def abstract_state(name):
    """The shapes and names of the state under an optimizer."""
    return jax.eval_shape(initializer(OPTIMIZERS[name]()), jax.random.key(0))
