"""The programs of tests/clients, under a partitioner: each returns a step and its arguments."""

from __future__ import annotations

from typing import Any

import client_runs

from partitioning.mesh import MeshConfig


def _of_client(name: str, data: int = 4, model: int = 2) -> Any:
    """The train step of a client over the axes data and model, with its state and first batch."""
    client = client_runs.load(name)
    partitioner = client.partitioner(MeshConfig(axes={'data': data, 'model': model}))
    state, step, _ = client.partitioned(partitioner)
    return step, (state, client.batches()[0])


def linen_lm1b() -> Any:
    """A language model like flax's example, with names on its kernels."""
    return _of_client('linen_lm1b')


def nnx_cnn() -> Any:
    """A convolutional net with BatchNorm and Dropout, as in flax's tutorial."""
    return _of_client('nnx_cnn')


def nnx_gemma() -> Any:
    """A decoder with grouped queries and rotary positions."""
    return _of_client('nnx_gemma')


def equinox_transformer() -> Any:
    """A transformer of equinox's layers."""
    return _of_client('equinox_transformer')


def chex_autoencoder() -> Any:
    """A variational autoencoder with Lion and averaged parameters."""
    return _of_client('chex_autoencoder')
