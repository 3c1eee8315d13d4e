"""The layout of a batch whose arrays differ in their dimensions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.programs.inner_layouts import is_resource
from partitioning.rules import PaddedSpec, as_tuple, axis_sizes, num_shards


def batch_specs(batch: Any, spec: Any, mesh: Mesh, name: str, *, is_default: bool = False) -> Any:
    """The specs of the arrays of a batch.

    Args:
      batch: the batch.
      spec: a spec for each of its arrays that is not a scalar, or a tree of specs.
      mesh: the mesh.
      name: the name of the batch, for messages.
      is_default: whether the user has not chosen the spec. Then sizes must be divisible.

    Returns:
      `spec`, if it fits every array; or a tree of specs, in which scalars are replicated.

    Raises:
      ValueError: if nobody has chosen the spec, and the first dimension of an array does not fit.
    """
    if not is_resource(spec) or spec is None:
        return spec
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if is_default:
        for path, x in leaves:
            _check_first_size(f'{name}{jax.tree_util.keystr(path)}', np.shape(x), spec, mesh)
    if all(np.ndim(x) for _, x in leaves):
        return spec
    return jax.tree.map(lambda x: spec if np.ndim(x) else PartitionSpec(), batch)


def _check_first_size(name: str, shape: tuple[int, ...], spec: Any, mesh: Mesh) -> None:
    """Raises ValueError if the data axes do not divide the first dimension of an array."""
    if isinstance(spec, PaddedSpec) or not shape or not len(spec):
        return
    axes = as_tuple(spec[0])
    shards = num_shards(axes, mesh)
    if shape[0] % shards == 0:
        return
    entry = repr(spec[0])
    others = [d for d in range(1, len(shape)) if shape[d] % shards == 0]
    instead = ''
    if others:
        whole = 'None, ' * others[0]
        instead = f'data_spec=P({whole}{entry}) if dimension {others[0]} counts the rows, '
    sizes = axis_sizes(mesh)
    over = ' x '.join(f'{axis} {sizes[axis]}' for axis in axes)
    raise ValueError(
        f'{name} of shape {shape}: {shards} shards ({over}) do not divide its first dimension, of '
        f'size {shape[0]}. Write setup(..., {instead}data_spec=P() to replicate it, '
        'data_spec=partitioner.padded_data_partition_spec to pad it, or a tree with a '
        'PartitionSpec for each array'
    )
