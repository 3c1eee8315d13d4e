"""What lays out a part of a model by a rule of its own."""

from __future__ import annotations

import abc
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.rules import check_layout
from partitioning.state import path_str, shape_of


class Sharder(abc.ABC):
    """Lays out all of a module by a rule of its own.

    Usage:
      class FirstRowsThenColumns(Sharder):
          def shard(self, module, mesh):
              specs = {'bag_0': P('model'), 'bag_1': P(None, 'model')}
              return {name: place(bag, mesh, specs[name]) for name, bag in module.items()}
    """

    @abc.abstractmethod
    def shard(self, module: Any, mesh: Mesh) -> Any:
        """The module with its arrays laid out.

        Args:
          module: the subtree of parameters below the path, arrays or ShapeDtypeStructs; of an nnx
            module, the submodule.
          mesh: the mesh.

        Returns:
          What takes the place of `module`, of another structure if that is wanted. Each array has
          the NamedSharding it is to have: `place` gives it one. Arrays without one are like those
          that a plan does not name.
        """


def place(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Arrays laid out over a mesh; of ShapeDtypeStructs, such with that sharding.

    Raises:
      ValueError: a spec that the mesh or an array cannot have, with its path.
    """
    if not isinstance(spec, PartitionSpec):
        raise ValueError(f'{spec!r} is no PartitionSpec: write P({spec!r})')
    sharding = NamedSharding(mesh, spec)

    def one(path: Any, x: Any) -> Any:
        check_layout(spec, mesh, path_str(path) or 'the array', shape_of(x))
        return placed(x, sharding)

    return jax.tree_util.tree_map_with_path(one, tree)


def placed(x: Any, sharding: NamedSharding) -> Any:
    """An array in its shards; of a ShapeDtypeStruct, such a one with the sharding."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)
