"""Layouts for the batches of an input loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.torch_xla.mark import check_array, check_divisible, mark_sharding
from partitioning.compat.torch_xla.meshes import mesh_or_global
from partitioning.compat.torch_xla.partition_spec import SpecLike, resolve_partition_spec
from partitioning.layout import local_to_global
from partitioning.rules import nearest


@dataclasses.dataclass(frozen=True)
class ShardingSpec:
    """A mesh and a partition spec: a layout for arrays of one rank.

    Usage:
      spec = ShardingSpec(mesh, ('data', None))
      x = spec.apply(x)

    Attributes:
      mesh: the mesh; given as None, the global one.
      partition_spec: the spec, as a PartitionSpec whatever it was given as.
      minibatch: whether arrays are this process's rows of the batch, which processes put together,
        rather than the whole batch.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def __init__(self, mesh: Mesh | None, partition_spec: SpecLike, minibatch: bool = False):
        """Args:
        mesh: the mesh; None for the global one.
        partition_spec: for each dimension a mesh dimension or name, a tuple of them, or None.
        minibatch: see the attribute.

        Raises:
          ValueError: a spec that the mesh cannot have; minibatch with rows that are not sharded.
        """
        if not isinstance(minibatch, bool):
            raise ValueError(f'minibatch={minibatch!r} must be True or False')
        object.__setattr__(self, 'mesh', mesh_or_global(mesh))
        spec = resolve_partition_spec(self.mesh, partition_spec)
        object.__setattr__(self, 'partition_spec', spec)
        object.__setattr__(self, 'minibatch', minibatch)
        if minibatch and (not len(spec) or spec[0] is None):
            raise ValueError(
                f'minibatch=True with partition spec {tuple(spec)}: processes have different rows, '
                'so the first dimension must be over a mesh axis'
            )

    def can_apply(self, t: Any) -> bool:
        """Whether an array has the rank of the spec."""
        return len(check_array(t)) == len(self.partition_spec)

    def sharding(self, t: Any) -> NamedSharding | None:
        """The sharding that an array gets; None where the spec is for another rank."""
        return NamedSharding(self.mesh, self.partition_spec) if self.can_apply(t) else None

    def apply(self, t: Any) -> jax.Array:
        """Lays out an array.

        Raises:
          ValueError: an array of another rank, or sizes that do not divide; with `minibatch` a
            number of rows that the devices of this process do not divide, or a traced array.
        """
        if not self.can_apply(t):
            raise ValueError(
                f'an array of shape {np.shape(t)} is of rank {np.ndim(t)}, but partition spec '
                f'{tuple(self.partition_spec)} is for rank {len(self.partition_spec)}'
            )
        if not self.minibatch:
            check_divisible(
                check_array(t),
                self.mesh,
                self.partition_spec,
                'drop or fill up a last batch that is too small, or write None for the dimension',
            )
            return mark_sharding(t, self.mesh, self.partition_spec)
        if isinstance(t, jax.core.Tracer):
            raise ValueError(
                'minibatch=True puts the rows of processes together, which no traced function '
                'can: apply the spec to its arguments'
            )
        return local_to_global(t, self.mesh, self.partition_spec)


InputSharding = ShardingSpec | SpecLike | Mapping[str, ShardingSpec | SpecLike | None] | None


def shard_batch(batch: Any, input_sharding: InputSharding, mesh: Mesh | None = None) -> Any:
    """Lays out the arrays of a batch.

    Usage:
      batch = shard_batch(batch, {'x': ('data', None), 'y': ('data', None, None)}, mesh)

    Args:
      batch: an array, or a pytree of them.
      input_sharding: one for all arrays, which then have the same rank, or for a dict of arrays a
        dict with one for each: a partition spec, a ShardingSpec, or None: whole on each device.
      mesh: the mesh of partition specs and None; None for the global one. A ShardingSpec has its
        own.

    Raises:
      ValueError: a dict of specs for a batch that is none; an array of another rank than its spec;
        sizes that do not divide; a mesh that is not that of the ShardingSpec.
      KeyError: arrays without an entry in a dict of specs, or entries without an array.
    """
    if not isinstance(input_sharding, Mapping):
        return _shard(batch, input_sharding, mesh, '')
    if not isinstance(batch, Mapping):
        raise ValueError(
            f'input_sharding has specs for {sorted(input_sharding)}, but the batch is '
            f'{type(batch).__qualname__}, not a dict with these arrays'
        )
    _check_keys(batch, input_sharding, 'array', 'input_sharding')
    _check_keys(input_sharding, batch, 'spec', 'batch')
    return {name: _shard(part, input_sharding[name], mesh, name) for name, part in batch.items()}


def _shard(
    batch: Any, sharding: ShardingSpec | SpecLike | None, mesh: Mesh | None, name: str
) -> Any:
    if isinstance(sharding, ShardingSpec) and mesh not in (None, sharding.mesh):
        raise ValueError(f'{name or "the batch"}: the ShardingSpec is of another mesh: drop mesh=')

    def place(path: Any, array: Any) -> jax.Array:
        where = name + jax.tree_util.keystr(path)
        spec = sharding
        if not isinstance(spec, ShardingSpec):
            entries = (None,) * np.ndim(array) if spec is None else spec
            spec = ShardingSpec(mesh, entries)
        try:
            return spec.apply(array)
        except ValueError as error:
            raise ValueError(f'{where or "the batch"}: {error}') from error

    return jax.tree_util.tree_map_with_path(place, batch)


def _check_keys(needed: Mapping[str, Any], given: Mapping[str, Any], what: str, where: str) -> None:
    for name in needed:
        if name not in given:
            hint = nearest(str(name), map(str, given))
            raise KeyError(f'{what} {name!r} has no entry in {where}, which has {[*given]}.{hint}')
