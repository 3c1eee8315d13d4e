"""Attention between a part of the queries of a row and a part of its keys.

The splash kernels know where queries and keys are when they are compiled. Devices that share a row
run one program, so the distance between the two parts is an array. The kernels also read from
arrays which blocks to compute. This module computes these arrays from the distance.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
N head_dim; in the arrays that kernels read, Q blocks of queries, S blocks of keys, W blocks that
are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from train.attention.blockwise import LOWEST, Blocks, attend_with_sums, find_gradients
from train.attention.layout import platform
from train.attention.sight import ATTENDED, Sight, SplashBlocks, sees_any
from train.attention.splash import block_sizes, heads_first, segment_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the queries of a row, and a part of its keys.

    `window` is the number of keys that a query sees, or None; see `Sight`.
    """

    queries: int
    keys: int
    window: int | None

    def __call__(self, query: Any, key: Any) -> Any:
        """Returns whether queries at these places see keys at these places."""
        return sees_any(self.window, query - key, query - key)


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
      distance: the place of the first query less the place of the first key, an integer or a scalar
        array.
      soft_cap, blocks, interpret: see `splash.make_kernel`.
      save_residuals: whether the kernel also returns the logarithms of the sums of its weights.
    """
    sizes: Any = block_sizes(blocks, part.queries, part.keys)
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
        mask_function=part,
        interpret=interpret,
    )


def _blocks_by_queries(part: Part, distance: Any, queries: int, keys: int) -> MaskInfo:
    """The blocks of keys that each block of queries reads, in their order."""
    count_S = width = part.keys // keys
    first_Q = distance + jnp.arange(0, part.queries, queries, dtype=jnp.int32)
    start_Q = jnp.zeros_like(first_Q)
    end_Q = jnp.clip((first_Q + queries - 1) // keys + 1, 0, count_S)
    if part.window is not None:
        start_Q = jnp.clip((first_Q - part.window + 1) // keys, 0, count_S)
        width = min(width, (part.window + queries - 2) // keys + 2)
    read_QW = start_Q[:, None] + jnp.arange(width, dtype=jnp.int32)
    return _mask_info(part, distance, read_QW, end_Q[:, None], count_S)


def _blocks_by_keys(part: Part, distance: Any, queries: int, keys: int) -> MaskInfo:
    """For each block of keys, the blocks of queries that read it, in their order."""
    count_Q = width = part.queries // queries
    first_S = jnp.arange(0, part.keys, keys, dtype=jnp.int32) - distance
    start_S, end_S = jnp.clip(first_S // queries, 0, count_Q), jnp.full_like(first_S, count_Q)
    if part.window is not None:
        end_S = jnp.clip((first_S + keys + part.window - 2) // queries + 1, 0, count_Q)
        width = min(width, (part.window + keys - 2) // queries + 2)
    read_WS = start_S + jnp.arange(width, dtype=jnp.int32)[:, None]
    return _mask_info(part, distance, read_WS, end_S, count_Q)


def _mask_info(part: Part, distance: Any, read: jax.Array, end: jax.Array, count: int) -> MaskInfo:
    """The numbers of the blocks that a kernel reads for all heads, and which it computes."""
    return MaskInfo(
        data_next=jnp.clip(jnp.minimum(read, end - 1), 0, count - 1)[None],
        mask_next=None,
        block_mask=(read < end).astype(jnp.int32)[None],
        partial_mask_blocks=None,
        # The kernels count keys from the first one of the part.
        q_sequence=distance + jnp.arange(part.queries, dtype=jnp.int32),
    )


def attend_by_splash_parts(
    q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, sight: Sight, blocks: SplashBlocks
) -> jax.Array:
    """Computes attention of queries over keys. Each query must see at least one key.

    Queries and keys have lengths that are multiples of 128. On CPUs, the kernels are interpreted.
    """

    def run(kernel: Any, *arrays: Any) -> jax.Array:
        return jax.vmap(kernel)(*arrays)

    return heads_first(_with_kernel(run, (q_BLHN, k_BSKN, v_BSKN), (), sight, blocks))


# The attention of some queries over a part of the keys in float32 [batch, length, heads, head_dim],
# and the logarithms of the sums of their weights, [batch, length, heads], by which parts are added.
Attended = tuple[jax.Array, jax.Array]


def add_parts(one: Attended, other: Attended) -> Attended:
    """Returns the attention over the keys of two parts."""
    log_sum_BLH = jnp.logaddexp(one[1], other[1])

    def weighted(attended_BLHN: jax.Array, part_BLH: jax.Array) -> jax.Array:
        return attended_BLHN * jnp.exp(part_BLH - log_sum_BLH)[..., None]

    return weighted(*one) + weighted(*other), log_sum_BLH


def attend_part(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
    blocks: SplashBlocks | None,
) -> Attended:
    """Computes the attention over some keys: by splash kernels, or all scores at once.

    Queries may see no keys. `part_gradients` computes its gradients; jax cannot.
    """
    arrays = (q_BLHN, k_BSKN, v_BSKN)
    if blocks is None:
        return attend_with_sums(_one_block(q_BLHN, k_BSKN, sight), *arrays, sight.arrays())

    def run(kernel: Any, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        attended_BHLN, (log_sum_BHL,) = jax.vmap(kernel)(*arrays)
        return attended_BHLN, log_sum_BHL

    found = _with_kernel(run, arrays, (), sight, blocks, save_residuals=True)
    attended_BLHN, log_sum_BLH = map(heads_first, found)
    is_seen_BLH = log_sum_BLH > LOWEST  # otherwise the kernel returns NaN
    attended_BLHN = jnp.where(is_seen_BLH[..., None], attended_BLHN.astype(jnp.float32), 0)
    return attended_BLHN, jnp.where(is_seen_BLH, log_sum_BLH, LOWEST)


def part_gradients(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    attended_BLHN: jax.Array,
    log_sum_BLH: jax.Array,
    gradient_BLHN: jax.Array,
    *,
    sight: Sight,
    blocks: SplashBlocks | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what some keys add to the gradients of queries, keys and values, in float32.

    `attended_BLHN` is the attention over all keys, `log_sum_BLH` has the logarithms of the sums of
    its weights, and `gradient_BLHN` is its gradient.
    """
    arrays, rest = (q_BLHN, k_BSKN, v_BSKN), (attended_BLHN, log_sum_BLH, gradient_BLHN)
    if blocks is None:
        one_block = _one_block(q_BLHN, k_BSKN, sight)
        return find_gradients(one_block, *arrays, sight.arrays(), *rest)

    def run(kernel: Any, *arrays: Any) -> Any:
        settings = kernel.kwargs

        def of_row(
            q: Any, k: Any, v: Any, segments: Any, attended: Any, log_sum: Any, d: Any
        ) -> Any:
            # The kernels' own gradient, with the results over all keys in the place of their own.
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

        return jax.vmap(of_row)(*arrays)

    found = map(heads_first, _with_kernel(run, arrays, rest, sight, blocks))
    dq, dk, dv = (x.astype(jnp.float32) for x in found)
    return dq * sight.scale, dk, dv


def _one_block(q_BLHN: jax.Array, k_BSKN: jax.Array, sight: Sight) -> Blocks:
    return Blocks(sight=sight.without_arrays(), queries=q_BLHN.shape[1], keys=k_BSKN.shape[1])


def _with_kernel(
    run: Callable[..., Any],
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    rest: Sequence[jax.Array],
    sight: Sight,
    blocks: SplashBlocks,
    save_residuals: bool = False,
) -> Any:
    """Runs a function of a kernel, scaled queries, keys, values, segments and other arrays.

    All arrays have heads first. The kernel computes what `sight` says.
    """
    q_BLHN, k_BSKN, v_BSKN = arrays
    q, k, v = map(heads_first, (q_BLHN * sight.scale, k_BSKN, v_BSKN))

    def with_window(window: int | None, *arrays: Any) -> Any:
        kernel = make_part_kernel(
            Part(queries=q_BLHN.shape[1], keys=k_BSKN.shape[1], window=window),
            sight.first,
            soft_cap=sight.soft_cap,
            blocks=blocks,
            interpret=platform() == 'cpu',
            save_residuals=save_residuals,
        )
        return run(kernel, *arrays)

    return sight.by_window(with_window, q, k, v, segment_ids(sight), *map(heads_first, rest))
