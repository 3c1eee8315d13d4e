"""Forecasts of partitioned functions, with figures that are counted by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from partitioning import MeshConfig, PjitPartitioner
from partitioning.aot.forecasting import forecast

pytestmark = pytest.mark.core

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
    count = 1
    for size in axes.values():
        count *= abs(size)
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


@pytest.fixture(scope='module')
def on_cpus():
    partitioner, step, state = partitioned({'data': 4, 'model': 2})
    said = []
    made = forecast(partitioner, step, state, BATCH, 3, progress=said.append)
    assert [text.split()[0] for text in said] == ['tracing', 'compiling']
    return made


@pytest.fixture(scope='module')
def in_place_of_tpus():
    partitioner, step, state = partitioned({'data': 4, 'model': 2})
    return forecast(
        partitioner,
        step,
        state,
        BATCH,
        3,
        topology='v5p-128',
        on_cpu=True,
        axes={'data': -1, 'model': 8},
    )


def test_the_bytes_of_arguments(on_cpus):
    memory = on_cpus.memory
    matrices = 2 * 4 * WIDTH * HIDDEN // 8  # each of 8 devices has an eighth
    assert memory.parameters == memory.optimizer == matrices + 4 * WIDTH
    assert memory.batch == 4 * ROWS * WIDTH // 4  # the rows are divided by 4
    assert memory.other == 4
    assert memory.arguments == 2 * (matrices + 4 * WIDTH) + ROWS * WIDTH + 4
    assert memory.limit is on_cpus.fits is on_cpus.chip is None
    assert memory.peak == pytest.approx(memory.arguments + memory.temporaries, rel=0.01)
