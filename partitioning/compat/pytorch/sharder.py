"""Sharder: user code that lays out one part of a model."""

from __future__ import annotations

import abc
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.rules import check_layout
from partitioning.state import path_str, shape_of


class Sharder(abc.ABC):
    """Lays out all arrays of a module.

    Usage:
      class FirstRowsThenColumns(Sharder):
          def shard(self, module, mesh):
              specs = {'bag_0': P('model'), 'bag_1': P(None, 'model')}
              return {name: place(bag, mesh, specs[name]) for name, bag in module.items()}
    """

    @abc.abstractmethod
    def shard(self, module: Any, mesh: Mesh) -> Any:
        """Lays out a module.

        Args:
          module: the subtree of parameters below the path, arrays or ShapeDtypeStructs; or the
            submodule of an nnx module.
          mesh: the mesh.

        Returns:
          The replacement of `module`, possibly of another structure. `place` gives each array its
          NamedSharding. Arrays without one are treated as if the plan did not name them.
        """


def place(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Lays out all arrays of a tree by one spec; ShapeDtypeStructs get the sharding.

    Raises:
      ValueError: if the mesh or an array cannot have the spec; the message has the array's path.
    """
    if not isinstance(spec, PartitionSpec):
        raise ValueError(f'{spec!r} is not a PartitionSpec: write P({spec!r})')
    sharding = NamedSharding(mesh, spec)

    def one(path: Any, x: Any) -> Any:
        check_layout(spec, mesh, path_str(path) or 'the array', shape_of(x))
        return placed(x, sharding)

    return jax.tree_util.tree_map_with_path(one, tree)


def placed(x: Any, sharding: NamedSharding) -> Any:
    """An array moved to its shards, or a ShapeDtypeStruct with the sharding."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)
