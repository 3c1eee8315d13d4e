"""Splash attention: Pallas kernels for TPUs that never hold the scores of all queries and keys.

Suffixes of array names: B batch, L length, H heads, K kv_heads, N head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import PartitionSpec

from train.attention.layout import find_layout, free_axes
from train.attention.machine import platform
from train.attention.settings import SplashBlocks
from train.attention.sight import Sight
from train.attention.splash_kernels import make_kernel

LANES = 128  # the width of a TPU's vector registers: blocks are whole multiples of it


def splash_problems(q_BLHN: jax.Array, k_BLKN: jax.Array, sight: Sight) -> Iterator[str]:
    """Yields why splash attention cannot compute the attention of these arguments, if so."""
    length, slots = q_BLHN.shape[1], k_BLKN.shape[1]
    if length != slots or not isinstance(sight.first, int) or sight.first:
        yield (
            f'there are {length} queries for the {slots} slots of a cache, and splash attention '
            "needs a query for each key: use kind 'auto' or 'dot'"
        )
    elif length % LANES:
        up = -(-length // LANES) * LANES
        yield (
            f'the length is {length}, which is not a multiple of {LANES}: use rows of length {up}, '
            "or kind 'auto' or 'dot'"
        )
    if find_layout(q_BLHN.shape, k_BLKN.shape) is None:
        yield (
            f'the batch of {q_BLHN.shape[0]} rows or the {q_BLHN.shape[2]} heads are padded '
            "(on_indivisible is 'pad'): use sizes that the mesh divides, or kind 'auto' or 'dot'"
        )
    if platform() == 'gpu':
        yield "the devices are GPUs, and its kernels are for TPUs: use kind 'auto' or 'dot'"


def attend_by_splash(
    q_BLHN: jax.Array,
    k_BLKN: jax.Array,
    v_BLKN: jax.Array,
    sight: Sight,
    scale: float,
    soft_cap: float | None,
    blocks: SplashBlocks,
) -> jax.Array:
    """Computes attention on each device for its own rows and heads; see `attend`.

    The arguments must have no `splash_problems`. On CPUs, the kernels are interpreted.
    """
    length, group = q_BLHN.shape[1], q_BLHN.shape[2] // k_BLKN.shape[2]
    layout = find_layout(q_BLHN.shape, k_BLKN.shape)
    assert layout is not None
    if layout.repeats > 1:
        k_BLKN, v_BLKN = (x.repeat(layout.repeats, axis=2) for x in (k_BLKN, v_BLKN))
    make = functools.partial(
        make_kernel,
        length=length,
        causal=sight.causal,
        soft_cap=soft_cap,
        blocks=blocks,
        interpret=platform() == 'cpu',
    )

    def attend(q_BLHN: Any, k_BLKN: Any, v_BLKN: Any, segments: Any, local: Any) -> jax.Array:
        heads = q_BLHN.shape[2]
        k_BLKN, v_BLKN = (layout.own_heads(x, heads, group) for x in (k_BLKN, v_BLKN))
        arrays = (*(x.swapaxes(1, 2) for x in (q_BLHN * scale, k_BLKN, v_BLKN)), segments)

        def run(window: int | None, *arrays: Any) -> jax.Array:
            return jax.vmap(make(heads=heads, window=window))(*arrays)

        if local is None:
            attended_BHLN = run(sight.window if sight.local else None, *arrays)
        else:
            branches = (functools.partial(run, window) for window in (sight.window, None))
            attended_BHLN = jax.lax.cond(local, *branches, *arrays)
        return attended_BHLN.swapaxes(1, 2)

    segments = None
    if sight.segments_BL is not None and sight.segments_BS is not None:
        segments = splash_attention_kernel.SegmentIds(sight.segments_BL, sight.segments_BS)
    traced = sight.window is not None and not isinstance(sight.local, bool)
    args = (q_BLHN, k_BLKN, v_BLKN, segments, sight.local if traced else None)
    free = free_axes()
    if not free:
        return attend(*args)
    rows = PartitionSpec(layout.queries[0])
    return jax.shard_map(
        attend,
        in_specs=(layout.queries, layout.keys, layout.keys, rows, PartitionSpec()),
        out_specs=layout.queries,
        axis_names=free,
        check_vma=False,  # the kernels do not say over which axes their results vary
    )(*args)
