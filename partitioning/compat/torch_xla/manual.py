"""Functions of the blocks that devices hold: manual sharding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.compat.torch_xla.mark import check_array, check_divisible, mark_sharding
from partitioning.compat.torch_xla.meshes import mesh_or_global
from partitioning.compat.torch_xla.padded_array import PaddedArray
from partitioning.compat.torch_xla.partition_spec import SpecLike, resolve_partition_spec, ways_of
from partitioning.mesh.checks import as_tuple_of
from partitioning.rules import describe_axes


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['array'], meta_fields=['mesh', 'spec']
)
@dataclasses.dataclass(frozen=True)
class ManualShards:
    """An array as the blocks of its devices, each of which a function sees alone.

    A pytree: it passes through jit as it is.

    Attributes:
      array: the global array that the blocks make.
      mesh: the mesh it lies on.
      spec: its layout.
    """

    array: jax.Array
    mesh: Mesh
    spec: PartitionSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a block."""
        sizes = zip(np.shape(self.array), ways_of(self.mesh, self.spec), strict=True)
        return tuple(size // n for size, n in sizes)

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
          fn: a function of the blocks of this array and of `others` to one block. The names of the
            mesh axes are known in it: `jax.lax.psum`, `psum_scatter`, `ppermute`, ... take them.
            Outside jit it is compiled anew with each call.
          *others: more arrays on the same mesh. What each device should see whole is
            `enable_manual_sharding(t, mesh, (None, ...))`.
          partition_spec: the layout of the array that the results make; by default that of this
            one.

        Raises:
          ValueError: the results differ along a mesh axis that does not divide the array they
            make (reduce over it, or let it divide one); they are not one array of the rank of
            `partition_spec`; a collective over an axis that the mesh lacks; `others` are no
            ManualShards of this mesh.
        """
        for number, other in enumerate(others):
            _check_other(number, other, self.mesh)
        spec = (
            self.spec
            if partition_spec is None
            else resolve_partition_spec(self.mesh, partition_spec)
        )

        @functools.wraps(fn)
        def checked(*blocks: jax.Array) -> jax.Array:
            result = fn(*blocks)
            _check_result(result, spec)
            return result

        operands = (self, *others)
        run = jax.shard_map(
            checked,
            mesh=self.mesh,
            in_specs=tuple(operand.spec for operand in operands),
            out_specs=spec,
            check_vma=True,
        )
        try:
            array = jax.jit(run)(*(operand.array for operand in operands))
        except (ValueError, AssertionError, NameError) as error:
            if (message := _explained(error, self.mesh, spec)) is None:
                raise
            raise ValueError(message) from error
        return ManualShards(array=array, mesh=self.mesh, spec=spec)


def enable_manual_sharding(t: Any, mesh: Mesh | None, partition_spec: SpecLike) -> ManualShards:
    """Lays out an array and gives its blocks, for functions that see one block each.

    Usage:
      shards = enable_manual_sharding(jnp.zeros((8, 8)), mesh, (0, 1))  # of 1 x 8
      shards.shape  # (8, 1)
      disable_manual_sharding(shards.apply(lambda block: block + 1))  # ones, (8, 8)

    Args:
      t: an array.
      mesh: the mesh; None for the global one.
      partition_spec: for each dimension a mesh dimension or name, a tuple of them, or None.

    Raises:
      ValueError: a spec that the mesh or the array cannot have, sizes that do not divide.
    """
    mesh = mesh_or_global(mesh)
    if isinstance(t, PaddedArray | ManualShards):
        raise ValueError(
            f'a {type(t).__name__} cannot be made manual: give its array, with what it is padded '
            'with'
            if isinstance(t, PaddedArray)
            else 'these are ManualShards already'
        )
    shape = check_array(t)
    spec = resolve_partition_spec(mesh, partition_spec, len(shape))
    check_divisible(shape, mesh, spec, "or give it mark_sharding(..., on_indivisible='pad').array")
    return ManualShards(array=mark_sharding(t, mesh, spec), mesh=mesh, spec=spec)


def disable_manual_sharding(
    shards: ManualShards, full_shape: Sequence[int] | None = None
) -> jax.Array:
    """The global array that the blocks make.

    Args:
      shards: the blocks.
      full_shape: the shape that the array should have.

    Raises:
      ValueError: no ManualShards, or an array of another shape.
    """
    if not isinstance(shards, ManualShards):
        raise ValueError(
            f'{type(shards).__qualname__} is no ManualShards, which enable_manual_sharding makes'
        )
    shape = tuple(shards.array.shape)
    if full_shape is not None and as_tuple_of(full_shape, 'full_shape') != shape:
        raise ValueError(
            f'blocks of shape {shards.shape}, laid out by {tuple(shards.spec)} over '
            f'{describe_axes(shards.mesh.shape)}, make an array of shape {shape}, not '
            f'{tuple(full_shape)}'
        )
    return shards.array


def _explained(error: Exception, mesh: Mesh, spec: PartitionSpec) -> str | None:
    """What an error of jax means here, with the way out; None: it says so itself."""
    axes = describe_axes(mesh.shape)
    if isinstance(error, ValueError) and 'require replication' in str(error):
        return (
            f'partition spec {tuple(spec)} leaves out axes of the mesh {axes} along which the '
            'results differ, or may: reduce over them in the function (jax.lax.psum, pmean, ...), '
            'or name them in partition_spec=. Instead of an all-gather, disable_manual_sharding '
            'and mark_sharding with None in their places'
        )
    if isinstance(error, NameError) and 'unbound axis name' in str(error):
        return f'{error} The mesh is {axes}'
    if isinstance(error, AssertionError) and not error.args:  # some collectives of jax say no more
        return (
            'an assertion without a text fails in the function: one of its own, or that of jax '
            f'for a collective over an axis that the mesh {axes} lacks'
        )
    return None


def _check_other(number: int, other: Any, mesh: Mesh) -> None:
    if not isinstance(other, ManualShards):
        raise ValueError(
            f'operand {number + 1} is {type(other).__qualname__}, not ManualShards: give it to '
            'enable_manual_sharding, with (None, ...) if each device should see all of it'
        )
    if other.mesh != mesh:
        raise ValueError(
            f'operand {number + 1} is on another mesh, {describe_axes(other.mesh.shape)}, than the '
            f'first, {describe_axes(mesh.shape)} (or on one with another order of devices)'
        )


def _check_result(result: Any, spec: PartitionSpec) -> None:
    if not isinstance(result, jax.Array):
        raise ValueError(
            f'the function must return one array, not {type(result).__qualname__}: apply it once '
            'for each result'
        )
    if result.ndim != len(spec):
        raise ValueError(
            f'the function returns blocks of shape {result.shape}, but partition spec '
            f'{tuple(spec)} is for {len(spec)} dimensions: pass partition_spec= for the result'
        )
