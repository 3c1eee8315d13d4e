"""Checks that the arrays of a call are where the function needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from partitioning.programs.boundary import Argument, Boundary
from partitioning.programs.pmap_leftovers import pmap_hint
from partitioning.rules import describe_axes, sharding_str, spec_str


def layout_problems(
    boundary: Boundary, argument: Argument, *, only_other_meshes: bool = False
) -> Iterator[str]:
    """Arrays that were put somewhere must be where their entry says.

    Args:
      boundary: the layouts of the function.
      argument: the argument.
      only_other_meshes: whether to skip arrays on the mesh of the function.
    """
    for path, sharding, leaf in argument.pairs():
        where = f'{argument.name}{jax.tree_util.keystr(path)}'
        if sharding is None:
            continue
        if isinstance(leaf, np.ndarray) and jax.process_count() > 1:
            if not sharding.is_fully_replicated:
                yield (
                    f'{where} is a numpy array, but each process holds only a part of it: make a '
                    'global array with partitioner.to_global'
                )
            continue
        if not is_placed(leaf) or leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            continue
        if only_other_meshes and getattr(leaf.sharding, 'mesh', None) == boundary.mesh:
            continue
        yield (
            f'{where} of shape {leaf.shape} is laid out as {_layout_str(leaf.sharding)}, but its '
            f'entry in in_axis_resources says {_layout_str(sharding)}: '
            f'{_move(argument, sharding)}'
        ) + pmap_hint(argument, boundary.mesh, leaf, sharding)


def is_placed(leaf: Any) -> bool:
    """Whether the program has put an array on devices, so that jax does not move it."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return leaf.committed


def _move(argument: Argument, sharding: Sharding) -> str:
    name = argument.name
    if not isinstance(argument.entry, Sharding):
        return f'write jax.device_put({name}, plan.shardings)'
    spec = getattr(sharding, 'spec', None)
    if spec is None:
        return f'move it with jax.device_put({name}, sharding)'
    move = f'jax.device_put({name}, NamedSharding(partitioner.mesh, {spec_str(spec)}))'
    if sharding.is_fully_replicated:
        return f'write its own specs as the entry, such as plan.specs, or {move}'
    return f'write {move}'


def device_problems(boundary: Boundary, keywords: Mapping[str, Any]) -> Iterator[str]:
    """Keyword arguments keep their layout, so they must be on the devices of the mesh."""
    if not isinstance(boundary.mesh, Mesh):
        return
    devices = set(boundary.mesh.devices.flat)
    for name, tree in keywords.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if is_placed(leaf) and leaf.sharding.device_set != devices:
                yield (
                    f'{name}{jax.tree_util.keystr(path)} is laid out as '
                    f'{_layout_str(leaf.sharding)}, but the function runs on the '
                    f'{len(devices)} devices of {describe_axes(boundary.mesh)}: write '
                    f'jax.device_put({name}, NamedSharding(partitioner.mesh, P()))'
                )


def _layout_str(sharding: Sharding) -> str:
    """A layout on one line: `P('data') over data 4 x model 2`, or the single device."""
    if len(sharding.device_set) == 1:
        return f'one device, {next(iter(sharding.device_set))}'
    return sharding_str(sharding)
