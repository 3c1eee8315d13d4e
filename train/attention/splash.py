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


# The sizes with which MaxText's benchmarks train dense models of 7 to 405 billion parameters
# (github.com/AI-Hypercomputer/maxtext, benchmarks/maxtext_*_model_configs.py, 2025), without its
# compiler flags for more memory in the kernels. v5e uses the sizes of `SplashBlocks` there.
_DEFAULTS = {
    'v5p': SplashBlocks(queries=2048, dkv_queries=2048, dq_queries=2048),
    'v6e': SplashBlocks(queries=1024, dkv_queries=2048, dq_queries=2048),
    'tpu7x': SplashBlocks(queries=1024, dkv_queries=2048, dq_queries=2048),
}


def choose_blocks(settings: AttentionSettings) -> SplashBlocks:
    """Returns the block sizes of the settings, which by default suit the chip."""
    if settings.splash_blocks is not None:
        return settings.splash_blocks
    chip = chip_of(device_kind())
    return _DEFAULTS.get(chip.name if chip else '', SplashBlocks())


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
            block_sizes=block_sizes(blocks, length, length),
            attn_logits_soft_cap=soft_cap,
            residual_checkpoint_name=ATTENDED,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)  # the devices of this process may not be the mesh's


def block_sizes(
    blocks: SplashBlocks, queries: int, keys: int
) -> splash_attention_kernel.BlockSizes:
    """Returns the block sizes for numbers of queries and keys, which are multiples of 128."""
    return splash_attention_kernel.BlockSizes(
        block_q=_fit(blocks.queries, queries),
        block_kv=_fit(blocks.keys, keys),
        block_kv_compute=_fit(blocks.keys_compute, keys),
        block_q_dkv=_fit(blocks.dkv_queries, queries),
        block_kv_dkv=_fit(blocks.dkv_keys, keys),
        block_kv_dkv_compute=_fit(blocks.dkv_keys_compute, keys),
        block_q_dq=_fit(blocks.dq_queries, queries),
        block_kv_dq=_fit(blocks.dq_keys, keys),
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


LANES = 128  # the width of a TPU's vector registers: blocks are whole multiples of it


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
    q_BLHN: jax.Array, k_BLKN: jax.Array, v_BLKN: jax.Array, sight: Sight, *, blocks: SplashBlocks
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
            blocks=blocks,
            interpret=platform() == 'cpu',
        )
        return jax.vmap(kernel)(*arrays)

    return heads_first(sight.by_window(run, *arrays))
