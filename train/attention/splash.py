"""Splash attention: Pallas kernels for TPUs that never hold the scores of all queries and keys.

Making the kernel for a mask is quick, however long the rows are.

Suffixes of array names: B batch, L length, H heads, K kv_heads, N head_dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from partitioning.hardware import chip_of
from train.attention.layout import device_kind, platform
from train.attention.sight import ATTENDED, AttentionSettings, Sight, SplashBlocks, sees_any


@dataclasses.dataclass(frozen=True)
class WindowMask(splash_attention_mask.Mask):
    """Which keys each query of a row sees.

    The kernels compute the mask from the places of queries and keys, by `mask_function`. `Mask` is
    also asked for the values of each block, to find out whether any is true and whether all are,
    which takes a minute for 128k positions. `WindowMask` returns an array of only two values, which
    has the same answers.
    """

    window: int | None
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length

    @property
    def q_sequence(self) -> np.ndarray:
        """The places of the queries."""
        return np.arange(self.length, dtype=np.int32)

    def mask_function(self, queries: Any, keys: Any) -> Any:
        """Returns whether queries at these places see keys at these places."""
        return sees_any(self.window, queries - keys, queries - keys)

    def __getitem__(self, index: Any) -> np.ndarray:
        queries, keys = index
        ends = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
        sees_all = all(sees_any(self.window, end, end) for end in ends)
        return np.array([sees_any(self.window, *ends), sees_all])


LANES = 128  # the width of a TPU's vector registers: blocks are whole multiples of it
_CHIPS = ('v5e', 'v5p', 'v6e', 'tpu7x')
_LARGEST = 2048
# What a block costs besides its scores, in scores. Of the blocks of 1024 and 2048 that tokamax
# 0.0.17 measured (data/autotuning), 1024 x 1024 are fastest for causal rows of 2,048 and 4,096
# tokens and 2048 x 2048 for 16,384, on v5p, v6e and tpu7x, and for 8,192 on the last two. So it is
# with a cost of 0.154 to 0.286 million. Nothing was published for smaller blocks, or for v5e.
_COST_OF_BLOCK = 0.16 * 2**20
_SCORES_AT_ONCE = 2**19  # 2 MiB in float32
# A fused backward kernel returns so many arrays of the size of the queries at most. It saves more
# time than they take, but they take memory.
_MOST_PARTS = 4


def choose_blocks(settings: AttentionSettings, length: int, window: int | None) -> SplashBlocks:
    """Returns the block sizes for rows of a length, a multiple of 128, on the chip of the mesh.

    By default, blocks are squares of the size that costs least: small ones skip more of what the
    mask hides, and large ones have fewer steps.
    """
    if settings.splash_blocks is not None:
        return settings.splash_blocks
    chip = chip_of(device_kind())
    if chip is None or chip.name not in _CHIPS:
        return SplashBlocks()
    sizes = [n for n in range(LANES, min(length, _LARGEST) + 1, LANES) if length % n == 0]

    def cost(size: int) -> float:
        return count_blocks(length, size, window) * (size**2 + _COST_OF_BLOCK)

    size = min(sizes, key=cost)
    at_once = max(n for n in sizes if size % n == 0 and n * size <= _SCORES_AT_ONCE)
    return SplashBlocks(
        queries=size,
        keys=size,
        keys_compute=at_once,
        dkv_queries=size,
        dkv_keys=size,
        dkv_keys_compute=at_once,
        dq_queries=size,
        dq_keys=size,
        fused=length <= _MOST_PARTS * size,
    )


def count_blocks(length: int, size: int, window: int | None) -> int:
    """Returns how many square blocks of a row's scores have some that a query sees."""
    firsts = np.arange(0, length, size)
    before = 0 if window is None else np.maximum(0, (firsts - window + 1) // size)
    return int(np.sum(firsts // size - before + 1))


@functools.lru_cache(maxsize=32)
def make_kernel(
    *,
    length: int,
    heads: int,
    window: int | None,
    soft_cap: float | None,
    blocks: SplashBlocks,
    interpret: bool,
) -> Any:
    """Returns a function of queries, keys, values and segments of one row, heads first.

    `blocks` are the largest block sizes. Machines other than TPUs interpret the kernels.
    """
    with jax.ensure_compile_time_eval():
        kernel = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([WindowMask(window, length)] * heads),
            block_sizes=block_sizes(blocks, length, length, fused=blocks.fused),
            attn_logits_soft_cap=soft_cap,
            residual_checkpoint_name=ATTENDED,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)  # the devices of this process may not be the mesh's


def block_sizes(
    blocks: SplashBlocks, queries: int, keys: int, *, fused: bool = False
) -> splash_attention_kernel.BlockSizes:
    """Returns the block sizes for numbers of queries and keys, which are multiples of 128."""
    return splash_attention_kernel.BlockSizes(
        block_q=_fit(blocks.queries, queries),
        block_kv=_fit(blocks.keys, keys),
        block_kv_compute=_fit(blocks.keys_compute, keys),
        block_q_dkv=_fit(blocks.dkv_queries, queries),
        block_kv_dkv=_fit(blocks.dkv_keys, keys),
        block_kv_dkv_compute=_fit(blocks.dkv_keys_compute, keys),
        block_q_dq=None if fused else _fit(blocks.dq_queries, queries),
        block_kv_dq=None if fused else _fit(blocks.dq_keys, keys),
        use_fused_bwd_kernel=fused,
    )


def _fit(size: int, length: int) -> int:
    """The largest multiple of 128 that is at most `size` and divides the length."""
    return max(n for n in range(128, size + 1, 128) if length % n == 0)


def heads_first(x: jax.Array) -> jax.Array:
    """Swaps the length and the heads of arrays of rows."""
    return x.swapaxes(1, 2)


def segment_ids(sight: Sight) -> Any:
    """Returns the segments of queries and keys as the kernels take them, or None."""
    if sight.segments_BL is None or sight.segments_BS is None:
        return None
    return splash_attention_kernel.SegmentIds(sight.segments_BL, sight.segments_BS)


def splash_problems(q_BLHN: jax.Array, k_BLKN: jax.Array, sight: Sight) -> Iterator[str]:
    """Yields why splash attention cannot compute the attention of these arguments, if so."""
    length, slots = q_BLHN.shape[1], k_BLKN.shape[1]
    if length != slots or not isinstance(sight.first, int) or sight.first:
        yield (
            f'there are {length} queries for the {slots} slots of a cache, and splash attention '
            "needs a query for each key: use kind 'auto', 'blockwise' or 'dot'"
        )
    elif length % LANES:
        up = -(-length // LANES) * LANES
        yield (
            f'the length is {length}, which is not a multiple of {LANES}: use rows of length {up}, '
            "or kind 'auto', 'blockwise' or 'dot'"
        )
    if platform() == 'gpu':
        yield "the devices are GPUs, and its kernels are for TPUs: use kind 'auto' or 'cudnn'"


def attend_by_splash(
    q_BLHN: jax.Array,
    k_BLKN: jax.Array,
    v_BLKN: jax.Array,
    sight: Sight,
    *,
    settings: AttentionSettings,
) -> jax.Array:
    """Computes attention on one device; see `attend`.

    The arguments must have no `splash_problems`. On CPUs, the kernels are interpreted.
    """
    arrays = (*map(heads_first, (q_BLHN * sight.scale, k_BLKN, v_BLKN)), segment_ids(sight))

    def run(window: int | None, *arrays: Any) -> jax.Array:
        kernel = make_kernel(
            length=q_BLHN.shape[1],
            heads=q_BLHN.shape[2],
            window=window,
            soft_cap=sight.soft_cap,
            blocks=choose_blocks(settings, q_BLHN.shape[1], window),
            interpret=platform() == 'cpu',
        )
        return jax.vmap(kernel)(*arrays)

    return heads_first(sight.by_window(run, *arrays))
