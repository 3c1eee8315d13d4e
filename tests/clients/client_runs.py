"""Runs a program of another library twice: as its users write it, and under a partitioner."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning import MeshConfig, PjitPartitioner, check_compiled_once, suggest_rules

BATCH, LENGTH, STEPS = 8, 8, 5
KEY = jax.random.key(0)


def by_names(mesh: MeshConfig) -> PjitPartitioner:
    """A partitioner by the names that the model gives its parameters."""
    return PjitPartitioner(mesh=mesh)


class Client(NamedTuple):
    """One program.

    Attributes:
      plain: trains on a list of batches on one device and returns the losses, without our library.
      partitioned: takes a partitioner and returns the result of its `setup`.
      batches: makes the batches of the training.
      partitioner: makes the partitioner that lays out the program over the axes 'data' and 'model'.
    """

    plain: Callable[[list[Any]], list[float]]
    partitioned: Callable[[PjitPartitioner], tuple[Any, Any, Any]]
    batches: Callable[[], list[Any]]
    partitioner: Callable[[MeshConfig], PjitPartitioner] = by_names


# The programs by name, each with the package that it needs and the module that it is in. The
# slowest import comes last, so that only one of two workers pays for it.
CLIENTS = {
    'linen_lm1b': ('flax', 'linen_programs'),
    'linen_decoder': ('flax', 'linen_programs'),
    'linen_resnet': ('flax', 'linen_programs'),
    'linen_vit': ('flax', 'linen_programs'),
    'chex_autoencoder': ('chex', 'chex_programs'),
    'nnx_cnn': ('flax', 'nnx_programs'),
    'nnx_gemma': ('flax', 'nnx_programs'),
    'nnx_encoder': ('flax', 'nnx_programs'),
    'haiku_transformer': ('haiku', 'haiku_programs'),
    'haiku_convnet': ('haiku', 'haiku_programs'),
    'equinox_mlp': ('equinox', 'equinox_programs'),
    'equinox_transformer': ('equinox', 'equinox_programs'),
    'jraph_convolution': ('jraph', 'graph_programs'),
    'hf_gpt2': ('transformers.modeling_flax_utils', 'hugging_face_programs'),
    'hf_llama': ('transformers.modeling_flax_utils', 'hugging_face_programs'),
}
LAYOUTS = {'8x1': (8, 1), '4x2': (4, 2), '1x8': (1, 8), 'fsdp': None}


def load(name: str) -> Client:
    """A program by its name. The test is skipped if its package is missing."""
    package, module = CLIENTS[name]
    pytest.importorskip(package, reason=f'{package} is not installed; the extra clients has it')
    return getattr(importlib.import_module(module), name.upper())


def functional(
    init: Callable[[Any], Any],
    train_step: Callable[[Any, Any], tuple[Any, Any]],
    batches: Callable[[], list[Any]],
    **about: Any,
) -> Client:
    """A program that is already written as `init(key)` and `train_step(state, batch)`."""

    def plain(batches: list[Any]) -> list[float]:
        state, step, losses = jax.jit(init)(KEY), jax.jit(train_step, donate_argnums=0), []
        for batch in batches:
            state, loss = step(state, batch)
            losses.append(float(loss))
        return losses

    def partitioned(partitioner: PjitPartitioner) -> Any:
        return partitioner.setup(init, train_step, KEY)

    return Client(plain, partitioned, batches, **{'partitioner': suggested(init), **about})


def suggested(init: Callable[[Any], Any]) -> Callable[[MeshConfig], PjitPartitioner]:
    """A partitioner by the rules that are suggested for the state that `init` makes."""

    def partitioner(mesh: MeshConfig) -> PjitPartitioner:
        return PjitPartitioner(mesh, suggest_rules(init, mesh, KEY))

    return partitioner


# The two runs.


@functools.cache
def plain_losses(name: str) -> list[float]:
    """The losses of the program as its users write it."""
    client = load(name)
    return client.plain(client.batches())


def partitioned_run(name: str, layout: str) -> tuple[list[float], float]:
    """The losses under a partitioner, and the part of the state that one device holds.

    It raises if the step is compiled twice or moves an array.
    """
    client = load(name)
    partitioner = _partitioner(client, layout)
    state, step, data_spec = client.partitioned(partitioner)
    plan, losses = partitioner.plan(state), []
    for rows in client.batches():
        batch = partitioner.to_global(rows, spec=data_spec)
        state, loss = step(state, batch)
        losses.append(float(loss))
    check_compiled_once(step)
    plan.check(state)
    return losses, _part_per_device(state)


def _partitioner(client: Client, layout: str) -> PjitPartitioner:
    sizes = LAYOUTS[layout]
    if sizes is None:
        return PjitPartitioner(layout='fsdp')
    return client.partitioner(MeshConfig(axes=dict(zip(('data', 'model'), sizes, strict=True))))


def _part_per_device(state: Any) -> float:
    arrays = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, np.number)]
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    return held / sum(x.nbytes for x in arrays)


# How much longer the second is.


def extra_lines(name: str) -> tuple[int, int]:
    """The lines of a program beyond the README's example: for the meshes, and with 'fsdp'."""
    client = load(name)
    fsdp = _count_lines(client.partitioned)
    return fsdp + _count_lines(client.partitioner), fsdp


def _count_lines(function: Callable[..., Any]) -> int:
    """The lines in the body of a function, without those that the README's example has too."""
    _, *lines = (line.strip() for line in inspect.getsource(function).splitlines())
    body = '\n'.join(line for line in lines if line and not line.startswith(('#', '"""')))
    for in_readme in (
        r'def init\(key\):\nreturn .*',
        r'return partitioner\.setup\(\w+, \w+, KEY\)',
        r'return PjitPartitioner\(mesh=mesh\)',
    ):
        body = re.sub(rf'^{in_readme}$', '', body, flags=re.MULTILINE)
    return len([line for line in body.split('\n') if line])


# Data.


def token_batches(vocabulary: int) -> list[np.ndarray]:
    """Batches of token ids [rows, length]."""
    rng = np.random.default_rng(0)
    return list(rng.integers(0, vocabulary, (STEPS, BATCH, LENGTH), np.int32))


def image_batches(size: int, classes: int) -> list[dict[str, np.ndarray]]:
    """Batches of images [rows, size, size, 3] with their labels [rows]."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(STEPS, BATCH, size, size, 3)).astype(np.float32)
    labels = rng.integers(0, classes, (STEPS, BATCH), np.int32)
    return [{'image': i, 'label': y} for i, y in zip(images, labels, strict=True)]
