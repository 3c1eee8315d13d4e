"""Arrays that are whole in a state, and padded and sharded inside partitioned functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding

from partitioning.rules import PaddedSpec


def _is_resource(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | PaddedSpec | Sharding)


def has_padded(resources: Any) -> bool:
    """Whether any of the resources is a PaddedSpec."""
    leaves = jax.tree.leaves(resources, is_leaf=_is_resource)
    return any(isinstance(leaf, PaddedSpec) for leaf in leaves)


def pad_inside(
    fn: Callable[..., Any], in_resources: Any, out_resources: Any, static_argnums: Sequence[int]
) -> Callable[..., Any]:
    """Returns `fn`, inside which arrays with a PaddedSpec are sharded.

    XLA's partitioner pads sizes that its devices do not divide and slices results at the end of
    the program: with 7 columns over 2 devices, each device computes 4. The arguments and the result
    keep their shapes.

    Args:
      fn: a function to be jitted over a mesh with Auto axes.
      in_resources: the resources of its positional arguments without the static ones; a tuple, or
        one entry for all.
      out_resources: the resources of its result.
      static_argnums: the positions of arguments without an entry in `in_resources`.
    """

    @functools.wraps(fn)
    def padded(*args: Any, **kwargs: Any) -> Any:
        placed = list(args)
        static = {i + len(args) if i < 0 else i for i in static_argnums}
        dynamic = [i for i in range(len(args)) if i not in static]
        of_each = (
            in_resources if isinstance(in_resources, tuple) else (in_resources,) * len(dynamic)
        )
        for i, resources in zip(dynamic, of_each, strict=False):
            placed[i] = _shard(placed[i], resources)
        return _shard(fn(*placed, **kwargs), out_resources)

    return padded


def _shard(tree: Any, resources: Any) -> Any:
    def place(resource: Any, below: Any) -> Any:
        if not isinstance(resource, PaddedSpec):
            return below
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, resource.inside), below)

    return jax.tree.map(place, resources, tree, is_leaf=_is_resource)
