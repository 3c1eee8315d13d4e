"""Manual sharding: functions that see the block of one device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.compat.torch_xla.marking import PaddedArray, lay_out_evenly
from partitioning.compat.torch_xla.meshes_and_specs import (
    SpecLike,
    mesh_or_global,
    resolve_partition_spec,
    shards_per_dimension,
)
from partitioning.mesh.validation import as_tuple_of
from partitioning.rules import describe_axes


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['array'], meta_fields=['mesh', 'spec']
)
@dataclasses.dataclass(frozen=True)
class ManualShards:
    """A global array as blocks, one per device, laid out by `spec` over `mesh`.

    It is a pytree, so it can be passed to jit.
    """

    array: jax.Array
    mesh: Mesh
    spec: PartitionSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one block."""
        counts = shards_per_dimension(self.mesh, self.spec)
        return tuple(size // n for size, n in zip(np.shape(self.array), counts, strict=True))

    def apply(
        self,
        fn: Callable[..., jax.Array],
        *others: ManualShards,
        partition_spec: SpecLike | None = None,
    ) -> ManualShards:
        """Runs a function on the blocks of every device.

        Usage:
          shards = enable_manual_sharding(x, mesh, ('x', None))
          total = shards.apply(lambda block: jax.lax.psum(block, 'x'), partition_spec=(None, None))

        Args:
          fn: a function that takes one block of this array and of each of `others`, and returns one
            block. It can use the names of the mesh axes in `jax.lax.psum`, `psum_scatter`,
            `ppermute` and so on. Outside jit, every call compiles it again.
          *others: more arrays on the same mesh.
          partition_spec: the layout of the returned array; by default the layout of this array.

        Raises:
          ValueError: if the results differ along a mesh axis that `partition_spec` does not use; if
            the function does not return one array with the rank of `partition_spec`; if a
            collective uses an axis that the mesh lacks; or if `others` are not on this mesh.
        """
        for number, other in enumerate(others, start=1):
            if not isinstance(other, ManualShards):
                raise ValueError(
                    f'operand {number} is {type(other).__qualname__}, not ManualShards: pass it to '
                    'enable_manual_sharding, with (None, ...) if every device should see all of it'
                )
            if other.mesh != self.mesh:
                raise ValueError(
                    f'operand {number} is on another mesh ({describe_axes(other.mesh)}) than the '
                    f'first array ({describe_axes(self.mesh)}), or their device orders differ'
                )
        spec = self.spec
        if partition_spec is not None:
            spec = resolve_partition_spec(self.mesh, partition_spec)

        @functools.wraps(fn)
        def checked(*blocks: jax.Array) -> jax.Array:
            result = fn(*blocks)
            if not isinstance(result, jax.Array):
                raise ValueError(
                    f'the function must return one array, not {type(result).__qualname__}: call '
                    'apply once per result'
                )
            if result.ndim != len(spec):
                raise ValueError(
                    f'the function returns blocks of shape {result.shape}, but partition spec '
                    f'{tuple(spec)} has {len(spec)} entries: pass partition_spec= for the result'
                )
            return result

        operands = (self, *others)
        in_specs = tuple(operand.spec for operand in operands)
        run = jax.shard_map(checked, mesh=self.mesh, in_specs=in_specs, out_specs=spec)
        try:
            array = jax.jit(run)(*(operand.array for operand in operands))
        except (ValueError, AssertionError, NameError) as error:
            if (message := _explain(error, self.mesh, spec)) is None:
                raise
            raise ValueError(message) from error
        return ManualShards(array=array, mesh=self.mesh, spec=spec)


def enable_manual_sharding(t: Any, mesh: Mesh | None, partition_spec: SpecLike) -> ManualShards:
    """Lays out an array and returns its blocks, for functions that see one block each.

    It takes and raises what `mark_sharding` does.
    """
    mesh = mesh_or_global(mesh)
    if isinstance(t, PaddedArray):
        raise ValueError('t is a PaddedArray: pass t.array, which includes the padding')
    remedy = "pass mark_sharding(..., on_indivisible='pad').array"
    array, spec = lay_out_evenly(t, mesh, partition_spec, remedy)
    return ManualShards(array=array, mesh=mesh, spec=spec)


def disable_manual_sharding(
    shards: ManualShards, full_shape: Sequence[int] | None = None
) -> jax.Array:
    """Returns the global array that consists of the blocks.

    Raises:
      ValueError: if `shards` is not ManualShards, or if the array does not have `full_shape`.
    """
    if not isinstance(shards, ManualShards):
        raise ValueError(
            f'{type(shards).__qualname__} is not ManualShards; enable_manual_sharding returns them'
        )
    shape = tuple(shards.array.shape)
    if full_shape is not None and as_tuple_of(full_shape, 'full_shape') != shape:
        raise ValueError(
            f'blocks of shape {shards.shape}, laid out by {tuple(shards.spec)} over '
            f'{describe_axes(shards.mesh)}, form an array of shape {shape}, not {tuple(full_shape)}'
        )
    return shards.array


def _explain(error: Exception, mesh: Mesh, spec: PartitionSpec) -> str | None:
    """Returns a clearer message for an error of jax, or None if it is clear already."""
    axes = describe_axes(mesh)
    if 'require replication' in str(error):
        return (
            f'partition spec {tuple(spec)} does not use all axes of the mesh {axes}, and the '
            'results may differ along the others: reduce over them (jax.lax.psum, pmean, ...), or '
            'add them to partition_spec=. To gather a dimension, call disable_manual_sharding and '
            'then mark_sharding with None for it'
        )
    # For an axis that the mesh lacks, some collectives of jax raise an empty AssertionError.
    if 'unbound axis name' in str(error):
        return f'{error} The mesh is {axes}'
    if isinstance(error, AssertionError) and not error.args:
        return f'jax raised an AssertionError; perhaps an axis is missing. The mesh is {axes}'
    return None
