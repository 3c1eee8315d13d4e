"""How queries, keys and values are divided over devices, and on which platform attention runs.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
N head_dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from partitioning import activation_spec
from partitioning.rules import free_axes, sharding_axes
from train.attention.sight import Sight


def device_kind() -> str:
    """Returns the `device_kind` of the mesh that is set, or of this process without a mesh.

    The mesh knows it also for described devices, where this process has others. A mesh that was
    made without devices, an `AbstractMesh`, counts as this process's devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str(jax.devices()[0].device_kind if device is None else device.device_kind)


def platform() -> str:
    """Returns 'tpu', 'gpu' or 'cpu': the platform of `device_kind`."""
    kind = device_kind()
    return 'tpu' if kind.startswith('TPU') else 'cpu' if kind == 'cpu' else 'gpu'


class Layout(NamedTuple):
    """How rows and heads are divided, so that each device attends with its own heads.

    Attributes:
      queries: the spec of the queries, and of the result.
      keys: the spec of keys and values.
      repeats: how often each kv_head is repeated before it is divided.
      sliced: the axes along which devices have the same kv_heads, of which each takes its own.
    """

    queries: PartitionSpec
    keys: PartitionSpec
    repeats: int = 1
    sliced: tuple[str, ...] = ()


def length_axes(q_BLHN: jax.Array) -> tuple[str, ...]:
    """Returns the mesh axes of more than one device over which the rules divide the length."""
    spec = activation_spec(q_BLHN.shape, ('batch', 'length', 'heads', 'kv'))
    if not isinstance(spec, PartitionSpec):
        return ()
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(axis for axis in sharding_axes(spec[1]) if sizes[axis] > 1)


def find_layout(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Layout | None:
    """Returns the layout that the logical axis rules give, or None if it needs padding.

    If the axes of 'kv_heads' and 'heads' differ, each device takes the kv_heads of its own
    heads, or if its heads are not whole groups, kv_heads are repeated.
    """
    group = q_shape[2] // k_shape[2]
    queries = activation_spec(q_shape, ('batch', None, 'heads', None))
    keys = activation_spec(k_shape, ('batch', None, 'heads' if group == 1 else 'kv_heads', None))
    if queries is None or keys is None:
        return Layout(PartitionSpec(), PartitionSpec())
    if not isinstance(queries, PartitionSpec) or not isinstance(keys, PartitionSpec):
        return None
    axes, kv_axes = sharding_axes(queries[2]), sharding_axes(keys[2])
    if axes == kv_axes:
        return Layout(queries, keys)
    gathered = PartitionSpec(keys[0], None, None, None)
    if not axes:
        return Layout(queries, gathered)
    sizes = jax.sharding.get_abstract_mesh().shape
    heads = q_shape[2] // math.prod(sizes[axis] for axis in axes)
    if heads % group and group % heads:
        return Layout(queries, queries, repeats=group)
    if axes[: len(kv_axes)] == kv_axes:  # the heads of a device are among its kv_heads
        return Layout(queries, keys, sliced=axes[len(kv_axes) :])
    return Layout(queries, gathered, sliced=axes)


def attend_on_each_device(
    attend: Callable[[jax.Array, jax.Array, jax.Array, Sight], jax.Array],
    layout: Layout,
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
) -> jax.Array:
    """Calls a function of the queries, keys, values and sight of each device.

    Its results are like the queries. Without a mesh, and inside a `jax.shard_map` over all axes,
    the arguments belong to one device.
    """
    free, group = free_axes(jax.sharding.get_abstract_mesh()), q_BLHN.shape[2] // k_BSKN.shape[2]
    if not free:
        return attend(q_BLHN, k_BSKN, v_BSKN, sight)
    if layout.repeats > 1:
        k_BSKN, v_BSKN = (x.repeat(layout.repeats, axis=2) for x in (k_BSKN, v_BSKN))

    def on_one(q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, arrays: Any) -> jax.Array:
        if layout.sliced:
            heads = q_BLHN.shape[2]
            first = jax.lax.axis_index(layout.sliced) * heads // group
            count = max(heads // group, 1)
            k_BSKN, v_BSKN = (
                jax.lax.dynamic_slice_in_dim(x, first, count, axis=2) for x in (k_BSKN, v_BSKN)
            )
        return attend(q_BLHN, k_BSKN, v_BSKN, dataclasses.replace(sight, **arrays))

    rows, arrays = PartitionSpec(layout.queries[0]), sight.arrays()
    array_specs = {name: rows if 'segments' in name else PartitionSpec() for name in arrays}
    return jax.shard_map(
        on_one,
        in_specs=(layout.queries, layout.keys, layout.keys, array_specs),
        out_specs=layout.queries,
        axis_names={*free},
        check_vma=False,  # the kernels do not say over which axes their results vary
    )(q_BLHN, k_BSKN, v_BSKN, arrays)
