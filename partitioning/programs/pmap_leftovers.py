"""What programs keep from pmap, and what to write instead in a partitioned function."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.programs.boundary import Argument, Boundary
from partitioning.programs.trace_errors import place_of
from partitioning.rules import describe_axes

_UNBOUND_AXIS = re.compile(r'unbound axis name: ([^\s.]+)')


def axis_error(error: Exception, boundary: Boundary) -> ValueError | None:
    """Our error for an axis of pmap, whose collectives programs keep when they are moved."""
    found = _UNBOUND_AXIS.search(str(error)) if isinstance(error, NameError) else None
    if found is None:
        return None
    axis = found[1]
    return ValueError(
        f'{boundary.arguments.function}{place_of(error)}: there is no axis {axis!r} as in pmap. '
        'Arrays in a partitioned function are global, so a mean over the batch already covers all '
        f'devices: remove lax.pmean(x, {axis!r}) and axis_name={axis!r}. Inside shard_map, use the '
        f'axes of the mesh, {describe_axes(boundary.mesh)}'
    )


def pmap_hint(argument: Argument, mesh: Mesh, leaf: Any, sharding: Sharding) -> str:
    """A hint if an array seems to have the leading dimension of devices that pmap needs.

    It is certain if `jax_utils.replicate` laid out the array. The specs of a plan have one entry
    per dimension, so an array with one dimension more is suspicious too.
    """
    shape = np.shape(leaf)
    if not shape or shape[0] not in (mesh.size, jax.local_device_count()):
        return ''
    held = getattr(leaf, 'sharding', None)
    replicated = (
        isinstance(held, NamedSharding)
        and held.spec == PartitionSpec(*held.mesh.shape)
        and held.mesh.axis_names != mesh.axis_names
    )
    planned = 0 < len(getattr(sharding, 'spec', ())) == len(shape) - 1
    if not replicated and (not planned or isinstance(argument.entry, Sharding)):
        return ''
    return (
        f'. The first dimension of {argument.name}, {shape[0]}, seems to be that of the devices: '
        'remove jax_utils.replicate and jax_utils.shard, which are for pmap; a partitioned '
        'function takes global arrays'
    )


def shard_hint(argument: Argument) -> str:
    """A hint if a batch may have been reshaped with `jax_utils.shard` for pmap."""
    entry = argument.entry
    if not isinstance(entry, NamedSharding) or entry.is_fully_replicated:
        return ''
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(argument.value)]
    devices = jax.local_device_count()
    if not shapes or any(len(shape) < 2 or shape[0] != devices for shape in shapes):
        return ''
    return (
        f'If the first dimension of {argument.name}, {devices}, is that of the devices, remove '
        'jax_utils.shard, which is for pmap'
    )
