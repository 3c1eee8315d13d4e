"""Attention on each device, for its own rows and heads.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
N head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from partitioning.rules import free_axes
from train.attention.layout import find_layout
from train.attention.sight import Sight


def attend_on_each_device(
    attend: Callable[[jax.Array, jax.Array, jax.Array, Sight], jax.Array],
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
) -> jax.Array:
    """Calls a function of the queries, keys, values and sight of each device.

    Args:
      attend: the function. Its result is like the queries.
      q_BLHN: the queries of all devices.
      k_BSKN: the keys.
      v_BSKN: the values.
      sight: what each query sees.

    Returns:
      The results of all devices. Without a mesh, and inside a `jax.shard_map` over all axes, the
      arguments are those of one device.
    """
    layout = find_layout(q_BLHN.shape, k_BSKN.shape)
    assert layout is not None
    free, group = free_axes(jax.sharding.get_abstract_mesh()), q_BLHN.shape[2] // k_BSKN.shape[2]
    if not free:
        return attend(q_BLHN, k_BSKN, v_BSKN, sight)
    if layout.repeats > 1:
        k_BSKN, v_BSKN = (x.repeat(layout.repeats, axis=2) for x in (k_BSKN, v_BSKN))

    def on_one(q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, arrays: Any) -> jax.Array:
        heads = q_BLHN.shape[2]
        k_BSKN, v_BSKN = (layout.own_heads(x, heads, group) for x in (k_BSKN, v_BSKN))
        return attend(q_BLHN, k_BSKN, v_BSKN, sight.with_arrays(arrays))

    rows, arrays = PartitionSpec(layout.queries[0]), sight.arrays()
    array_specs = {name: rows if 'segments' in name else PartitionSpec() for name in arrays}
    return jax.shard_map(
        on_one,
        in_specs=(layout.queries, layout.keys, layout.keys, array_specs),
        out_specs=layout.queries,
        axis_names={*free},
        check_vma=False,  # the kernels do not say over which axes their results vary
    )(q_BLHN, k_BSKN, v_BSKN, arrays)
