"""TrainStates created from variables, boxes or plain arrays."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.linen.partitioning import AxisMetadata

from partitioning import TrainState

KERNEL = np.arange(32.0, dtype=np.float32).reshape(8, 4) / 8
SCALE = np.linspace(0.5, 2.0, 4, dtype=np.float32)
NAMES = {'kernel': ('embed', 'mlp'), 'scale': ('mlp',)}


def arrays():
    return {'dense': {'kernel': jnp.asarray(KERNEL), 'scale': jnp.asarray(SCALE)}}


def boxed():
    return {
        'dense': {k: nn.LogicallyPartitioned(x, NAMES[k]) for k, x in arrays()['dense'].items()}
    }


def variables():
    """The variables of a model with flax's param_with_axes and variable_with_axes."""
    return {
        'params': arrays(),
        'params_axes': {'dense': {f'{k}_axes': AxisMetadata(n) for k, n in NAMES.items()}},
        'batch_stats': {'norm': {'mean': jnp.zeros(4)}},
        'batch_stats_axes': {'norm': {'mean_axes': AxisMetadata(('mlp',))}},
    }


WAYS = {
    'collections': variables,
    'frozen collections': lambda: freeze(variables()),
    'boxes': lambda: {'params': boxed()},
    'boxes alone': boxed,
    'arrays alone': arrays,
}
each_way = pytest.mark.parametrize('way', WAYS)


def made(way, tx=None):
    return TrainState.create(WAYS[way](), tx or optax.adam(0.1))


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
