"""Every preset gives the loss and the gradients of the same model on one device, in float32.

The whole model is here as a run has it: the embedding, attention with fewer heads of keys, a gated
MLP, the output layer and the loss, on packed rows. `MESHWRIGHT_ALL_LAYOUTS=1` tests every preset on
every mesh.
"""

import functools
import os

import gin
import jax
import numpy as np
import pytest
from gin_fixtures import load_config
from small import model
from test_shipped_configs import PRESETS, RUN

from partitioning import unbox
from train import NextToken

pytestmark = pytest.mark.core

ROWS, LENGTH, VOCAB = 16, 32, 264
THREE = ('three_d', 'few_kv_heads', 'context')  # presets with three mesh axes
TWO = [name for name in PRESETS if name not in (*THREE, 'pipeline')]  # pipelines have own tests
# Presets with the sizes of their axes, where each shows something that the others do not.
CHOSEN = [
    ('fsdp', 'NUM_PARTITIONS=1'),
    ('fsdp', 'NUM_PARTITIONS=4'),
    ('fsdp_tensor', 'NUM_PARTITIONS=2'),
    ('tensor_sequence', 'NUM_PARTITIONS=8'),
    ('few_kv_heads', 'NUM_PARTITIONS=2', 'HEAD_GROUPS=2'),
    ('context', 'NUM_PARTITIONS=1', 'CONTEXT_PARTITIONS=4'),
    ('context', 'NUM_PARTITIONS=2', 'CONTEXT_PARTITIONS=2'),
]
# Every preset that divides the 8 devices over two axes, on 8x1, 4x2, 2x4 and 1x8.
ALL = [
    *((name, f'NUM_PARTITIONS={n}') for name in TWO for n in (1, 2, 4, 8)),
    *(('three_d', f'NUM_PARTITIONS={n}') for n in (1, 2, 4)),
    *(('few_kv_heads', f'NUM_PARTITIONS={n}', f'HEAD_GROUPS={8 // n}') for n in (1, 2, 4, 8)),
    *(('context', f'NUM_PARTITIONS={n}', f'CONTEXT_PARTITIONS={8 // n}') for n in (1, 2, 4, 8)),
]


def batch():
    """Rows of three packed documents, and targets without a weight at the end of a row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    ends = np.sort(rng.integers(1, LENGTH, (ROWS, 2, 1)), axis=1)
    place = np.arange(LENGTH)
    starts = np.concatenate([np.zeros((ROWS, 1, 1), int), ends], axis=1)
    begun = place >= starts
    return {
        'decoder_input_tokens': tokens[:, :-1],
        'decoder_target_tokens': tokens[:, 1:],
        'decoder_loss_weights': np.broadcast_to(place < LENGTH - 3, (ROWS, LENGTH)).astype(
            'float32'
        ),
        'decoder_segment_ids': begun.sum(axis=1, dtype=np.int32),
        'decoder_positions': (place - (begun * starts).max(axis=1)).astype(np.int32),
    }


@functools.cache
def reference():
    """An objective, its parameters, and their loss and gradients on one device."""
    objective = NextToken(model=model(num_heads=16, num_kv_heads=8, scale_embeddings=False))
    init = functools.partial(objective.init, batch=batch())
    params = unbox(jax.jit(init)(jax.random.key(0))['params'])
    return objective, init, params, jax.jit(gradient(objective))(params, batch())


def gradient(objective):
    return jax.value_and_grad(lambda params, batch: objective.loss(params, batch, None, {}).total)


@pytest.mark.parametrize('layout', ALL if os.environ.get('MESHWRIGHT_ALL_LAYOUTS') else CHOSEN)
def test_a_preset_gives_the_loss_and_gradients_of_one_device(layout):
    preset, *bindings = layout
    objective, init, params, (loss, gradients) = reference()
    load_config(
        ['configs/runs/pretrain.gin', f'configs/partitioning/{preset}.gin'], [*RUN, *bindings]
    )
    partitioner = gin.get_bindings('TrainConfig')['partitioner']
    plan = partitioner.plan(lambda key: init(key)['params'], jax.random.key(0))
    step = partitioner.partition(
        gradient(objective), (plan.specs, partitioner.data_partition_spec), (None, plan.specs)
    )
    got_loss, got = step(params, batch())
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(gradients)
    for (path, expected), found in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(got), strict=True
    ):
        error = np.max(np.abs(expected - found)) / np.max(np.abs(expected))
        assert error < 1e-5, jax.tree_util.keystr(path)
