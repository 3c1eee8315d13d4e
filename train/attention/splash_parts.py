"""Splash attention between a part of the queries of a row and a part of its keys.

The kernels of `splash` know where queries and keys are when they are compiled. Devices that
share a row run one program, so the distance between the two parts is an array. The kernels also
read from arrays which blocks to compute. This module computes these arrays from the distance.

Suffixes of array names: Q blocks of queries, S blocks of keys, W blocks that are computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from train.attention.layout import platform
from train.attention.settings import ATTENDED, SplashBlocks
from train.attention.sight import Sight
from train.attention.splash import block_sizes, heads_first, segment_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the queries of a row, and a part of its keys.

    Attributes:
      queries: the number of queries.
      keys: the number of keys.
      causal: whether a query sees only keys at its own place and before it.
      window: how many keys a query sees: the key at its own place and the keys before it; or None.
    """

    queries: int
    keys: int
    causal: bool
    window: int | None

    def __call__(self, query: Any, key: Any) -> Any:
        """Returns whether queries at these places see keys at these places."""
        seen = query >= key if self.causal else None
        if self.window is not None:
            near = query - key < self.window
            seen = near if seen is None else seen & near
        return seen


def make_part_kernel(
    part: Part,
    distance: Any,
    *,
    soft_cap: float | None,
    blocks: SplashBlocks,
    interpret: bool,
    save_residuals: bool = False,
) -> Any:
    """Returns a splash kernel for a part: a function of queries, keys, values and segments.

    Args:
      part: the two parts of the row.
      distance: the place of the first query less the place of the first key, an integer or a scalar
        array.
      soft_cap: see `attend`.
      blocks: the largest block sizes.
      interpret: whether jax interprets the kernels, on machines other than TPUs.
      save_residuals: whether the kernel also returns the logarithms of the sums of its weights.
    """
    sizes: Any = block_sizes(blocks, part.queries, part.keys)
    is_masked = part.causal or part.window is not None
    by_queries = _blocks_by_queries(part, distance, sizes.block_q, sizes.block_kv)
    dq = _blocks_by_queries(part, distance, sizes.block_q_dq, sizes.block_kv_dq)
    dkv = _blocks_by_keys(part, distance, sizes.block_q_dkv, sizes.block_kv_dkv)
    return splash_attention_kernel.SplashAttentionKernel(
        by_queries,
        dq,
        dkv,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=save_residuals,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=ATTENDED,
        mask_function=part if is_masked else None,
        interpret=interpret,
    )


def _blocks_by_queries(part: Part, distance: Any, queries: int, keys: int) -> MaskInfo:
    """The blocks of keys that each block of queries reads, in their order."""
    count_S, width = part.keys // keys, part.keys // keys
    first_Q = distance + jnp.arange(0, part.queries, queries, dtype=jnp.int32)
    start_Q, end_Q = jnp.zeros_like(first_Q), jnp.full_like(first_Q, count_S)
    if part.causal:
        end_Q = jnp.clip((first_Q + queries - 1) // keys + 1, 0, count_S)
    if part.window is not None:
        start_Q = jnp.clip((first_Q - part.window + 1) // keys, 0, count_S)
    if part.causal and part.window is not None:
        width = min(width, (part.window + queries - 2) // keys + 2)
    read_QW = start_Q[:, None] + jnp.arange(width, dtype=jnp.int32)
    return _mask_info(part, distance, read_QW, end_Q[:, None], count_S)


def _blocks_by_keys(part: Part, distance: Any, queries: int, keys: int) -> MaskInfo:
    """For each block of keys, the blocks of queries that read it, in their order."""
    count_Q, width = part.queries // queries, part.queries // queries
    first_S = jnp.arange(0, part.keys, keys, dtype=jnp.int32) - distance
    start_S, end_S = jnp.zeros_like(first_S), jnp.full_like(first_S, count_Q)
    if part.causal:
        start_S = jnp.clip(first_S // queries, 0, count_Q)
    if part.window is not None:
        end_S = jnp.clip((first_S + keys + part.window - 2) // queries + 1, 0, count_Q)
    if part.causal and part.window is not None:
        width = min(width, (part.window + keys - 2) // queries + 2)
    read_WS = start_S + jnp.arange(width, dtype=jnp.int32)[:, None]
    return _mask_info(part, distance, read_WS, end_S, count_Q)


def _mask_info(part: Part, distance: Any, read: jax.Array, end: jax.Array, count: int) -> MaskInfo:
    """The numbers of the blocks that a kernel reads for all heads, and which it computes."""
    if not part.causal and part.window is None:
        return MaskInfo(None, None, None, None, None)
    return MaskInfo(
        data_next=jnp.clip(jnp.minimum(read, end - 1), 0, count - 1)[None],
        mask_next=None,
        block_mask=(read < end).astype(jnp.int32)[None],
        partial_mask_blocks=None,
        # The kernels count keys from the first one of the part.
        q_sequence=distance + jnp.arange(part.queries, dtype=jnp.int32),
    )


def attend_by_splash_parts(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
    soft_cap: float | None,
    blocks: SplashBlocks,
) -> jax.Array:
    """Computes attention of scaled queries over keys. Each query must see at least one key.

    Queries and keys have lengths that are multiples of 128. On CPUs, the kernels are interpreted.
    """

    def run(kernel: Any, *arrays: Any) -> jax.Array:
        return jax.vmap(kernel)(*arrays)

    arrays = (*map(heads_first, (q_BLHN, k_BSKN, v_BSKN)), segment_ids(sight))
    return heads_first(_with_kernel(run, arrays, sight, soft_cap, blocks))


def splash_part(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
    soft_cap: float | None,
    blocks: SplashBlocks,
) -> tuple[jax.Array, jax.Array]:
    """Like `attend_by_splash_parts`, but has no gradient, and queries may see no keys.

    Returns:
      The result, NaN for queries that see no keys; and the logarithms of the sums of the weights,
      [batch, heads, length], very low or minus infinity for these queries.
    """

    def run(kernel: Any, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        attended_BHLN, (log_sum_BHL,) = jax.vmap(kernel)(*arrays)
        return attended_BHLN, log_sum_BHL

    arrays = (*map(heads_first, (q_BLHN, k_BSKN, v_BSKN)), segment_ids(sight))
    attended, log_sum_BHL = _with_kernel(run, arrays, sight, soft_cap, blocks, save_residuals=True)
    return heads_first(attended), log_sum_BHL


def splash_part_gradients(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    attended_BLHN: jax.Array,
    log_sum_BHL: jax.Array,
    gradient_BLHN: jax.Array,
    sight: Sight,
    soft_cap: float | None,
    blocks: SplashBlocks,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of scaled queries, keys and values; see `parts.part_gradients`."""

    def run(kernel: Any, q: Any, k: Any, v: Any, segments: Any, *rest: Any) -> Any:
        settings = kernel.kwargs

        def of_row(
            q: Any, k: Any, v: Any, segments: Any, attended: Any, log_sum: Any, d: Any
        ) -> Any:
            # The gradient of the kernels, given the results over all keys instead of over a part.
            kept = (q, k, v, segments, None, attended, log_sum)
            return splash_attention_kernel._splash_attention_bwd(
                settings['save_residuals'],
                settings['mask_value'],
                settings['is_mqa'],
                settings['block_sizes'],
                settings['residual_checkpoint_name'],
                settings['mask_function'],
                settings['attn_logits_soft_cap'],
                settings['interpret'],
                (*kept, kernel.dq_mask_info, kernel.dkv_mask_info),
                d,
            )[3:6]

        return jax.vmap(of_row)(q, k, v, segments, *rest)

    q, k, v, attended, gradient = map(
        heads_first, (q_BLHN, k_BSKN, v_BSKN, attended_BLHN, gradient_BLHN)
    )
    arrays = (q, k, v, segment_ids(sight), attended, log_sum_BHL, gradient)
    dq, dk, dv = _with_kernel(run, arrays, sight, soft_cap, blocks)
    return heads_first(dq), heads_first(dk), heads_first(dv)


def _with_kernel(
    run: Callable[..., Any],
    arrays: Any,
    sight: Sight,
    soft_cap: float | None,
    blocks: SplashBlocks,
    save_residuals: bool = False,
) -> Any:
    """Runs a function of a kernel and arrays, with the kernel for what `sight` says."""

    def with_window(window: int | None, *arrays: Any) -> Any:
        part = Part(
            queries=arrays[0].shape[2],
            keys=arrays[1].shape[2],
            causal=sight.causal,
            window=window,
        )
        kernel = make_part_kernel(
            part,
            sight.first,
            soft_cap=soft_cap,
            blocks=blocks,
            interpret=platform() == 'cpu',
            save_residuals=save_residuals,
        )
        return run(kernel, *arrays)

    if sight.window is None or isinstance(sight.local, bool):
        return with_window(sight.window if sight.local else None, *arrays)
    branches = (functools.partial(with_window, window) for window in (sight.window, None))
    return jax.lax.cond(sight.local, *branches, *arrays)
