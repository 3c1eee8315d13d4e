"""Layouts for the batches of an input loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.torch_xla.marking import check_array, lay_out_evenly
from partitioning.compat.torch_xla.meshes_and_specs import (
    SpecLike,
    mesh_or_global,
    resolve_partition_spec,
)
from partitioning.layout import local_to_global
from partitioning.rules import nearest


@dataclasses.dataclass(frozen=True)
class ShardingSpec:
    """A mesh and a partition spec: the layout of arrays of one rank.

    Attributes:
      mesh: the mesh. The constructor also accepts None for the global mesh.
      partition_spec: the spec, as a PartitionSpec. The constructor accepts every form of spec.
      minibatch: if True, an array holds only the rows of this process, and the rows of all
        processes form the batch; by default, an array is the whole batch.

    Raises:
      ValueError: if the mesh cannot have this spec; with `minibatch`, if no axis shards the rows.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def __init__(self, mesh: Mesh | None, partition_spec: SpecLike, minibatch: bool = False):
        spec = resolve_partition_spec(mesh, partition_spec)
        if not isinstance(minibatch, bool):
            raise ValueError(f'minibatch={minibatch!r} must be True or False')
        if minibatch and (not len(spec) or spec[0] is None):
            raise ValueError(f'minibatch=True needs a mesh axis as first entry, not {tuple(spec)}')
        object.__setattr__(self, 'mesh', mesh_or_global(mesh))
        object.__setattr__(self, 'partition_spec', spec)
        object.__setattr__(self, 'minibatch', minibatch)

    def can_apply(self, t: Any) -> bool:
        """Returns whether an array has the rank of the spec."""
        return len(check_array(t)) == len(self.partition_spec)

    def sharding(self, t: Any) -> NamedSharding | None:
        """Returns the sharding that an array gets, or None if it has another rank than the spec."""
        return NamedSharding(self.mesh, self.partition_spec) if self.can_apply(t) else None

    def apply(self, t: Any) -> jax.Array:
        """Lays out an array.

        Raises:
          ValueError: if the array has another rank, or if a size is not divisible; with
            `minibatch` also if the array is traced.
        """
        if not self.minibatch:
            remedy = 'drop or fill up a last batch that is too small'
            return lay_out_evenly(t, self.mesh, self.partition_spec, remedy)[0]
        if isinstance(t, jax.core.Tracer):
            raise ValueError('minibatch=True cannot be used inside a traced function')
        spec = resolve_partition_spec(self.mesh, self.partition_spec, check_array(t))
        return local_to_global(t, self.mesh, spec)


InputSharding = ShardingSpec | SpecLike | Mapping[str, ShardingSpec | SpecLike | None] | None


def shard_batch(batch: Any, input_sharding: InputSharding, mesh: Mesh | None = None) -> Any:
    """Lays out the arrays of a batch.

    Usage:
      batch = shard_batch(batch, {'x': ('data', None), 'y': ('data', None, None)}, mesh)

    Args:
      batch: an array, or a pytree of arrays.
      input_sharding: a partition spec, a ShardingSpec, or None to replicate, for all arrays; or a
        dict with one of these per entry of the batch, which is then a dict too.
      mesh: the mesh for partition specs and None; by default the global mesh.

    Raises:
      ValueError: if there are several specs but the batch is not a dict; if an array has another
        rank than its spec; if a size is not divisible; or if a ShardingSpec has another mesh.
      KeyError: if an array has no entry in `input_sharding`, or an entry has no array.
    """
    if not isinstance(input_sharding, Mapping):
        return _shard(batch, input_sharding, mesh)
    if not isinstance(batch, Mapping):
        raise ValueError(
            f'input_sharding is a dict for {sorted(input_sharding)}, but the batch is '
            f'{type(batch).__qualname__}'
        )
    _check_keys('array', batch, 'input_sharding', input_sharding)
    _check_keys('spec', input_sharding, 'batch', batch)
    return {name: _shard(part, input_sharding[name], mesh, name) for name, part in batch.items()}


def _shard(batch: Any, given: Any, mesh: Mesh | None, name: str = '') -> Any:
    if isinstance(given, ShardingSpec) and mesh not in (None, given.mesh):
        raise ValueError(f'{name or "the batch"}: the ShardingSpec has another mesh: remove mesh=')

    def place(path: Any, array: Any) -> jax.Array:
        try:
            if isinstance(given, ShardingSpec):
                return given.apply(array)
            entries = (None,) * np.ndim(array) if given is None else given
            return ShardingSpec(mesh, entries).apply(array)
        except ValueError as error:
            where = name + jax.tree_util.keystr(path)
            raise ValueError(f'{where or "the batch"}: {error}') from error

    return jax.tree_util.tree_map_with_path(place, batch)


def _check_keys(noun: str, needed: Iterable[str], where: str, given: Iterable[str]) -> None:
    for name in needed:
        if name not in given:
            hint = nearest(name, given)
            raise KeyError(f'{noun} {name!r} has no entry in {where}, which has {[*given]}.{hint}')
