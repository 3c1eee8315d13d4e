"""Programs of other libraries, unchanged, train as they do without a partitioner."""

import os

import client_runs
import numpy as np
import pytest
from client_runs import CLIENTS, LAYOUTS

# The lines that each program needs beyond the README's example: by names or rules, and with 'fsdp'.
EXTRA_LINES = {
    'linen_lm1b': (0, 0),
    'linen_decoder': (2, 0),
    'linen_resnet': (1, 0),
    'linen_vit': (1, 0),
    'chex_autoencoder': (1, 0),
    'nnx_cnn': (4, 3),
    'nnx_gemma': (3, 3),
    'nnx_encoder': (1, 0),
    'haiku_transformer': (1, 0),
    'haiku_convnet': (1, 0),
    'equinox_mlp': (4, 3),
    'equinox_transformer': (1, 0),
    'jraph_convolution': (1, 0),
    'hf_gpt2': (1, 0),
    'hf_llama': (1, 0),
}


# One program has all layouts. The others are laid out by their names or rules on one mesh, or by
# 'fsdp'. MESHWRIGHT_ALL_LAYOUTS=1 tests every program on every layout.
BY_NAMES = {
    'linen_lm1b': ('4x2',),
    'linen_decoder': ('4x2',),
    'linen_resnet': ('4x2',),
    'nnx_cnn': ('4x2',),
    'nnx_gemma': ('4x2',),
    'haiku_convnet': ('1x8',),
    'equinox_mlp': tuple(LAYOUTS),
    'hf_llama': ('4x2',),
}


def layouts_of(name):
    if os.environ.get('MESHWRIGHT_ALL_LAYOUTS'):
        return LAYOUTS
    return BY_NAMES.get(name, ('fsdp',))


# The largest part of a state that one device may hold, so that no layout replicates everything.
LARGEST_PART = {'8x1': 1.0, '4x2': 0.75, '1x8': 0.55, 'fsdp': 0.25}


@pytest.mark.long
@pytest.mark.parametrize(
    ('name', 'layout'),
    [(name, layout) for name in CLIENTS for layout in layouts_of(name)],
)
def test_losses_equal_those_of_the_plain_run(name, layout):
    expected = client_runs.plain_losses(name)
    losses, part = client_runs.partitioned_run(name, layout)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len({f'{loss:.4f}' for loss in expected}) == len(expected)  # every step changes the loss
    assert part <= LARGEST_PART[layout]


@pytest.mark.parametrize('name', CLIENTS)
def test_few_lines_beyond_the_readme(name):
    assert client_runs.extra_lines(name) == EXTRA_LINES[name]
