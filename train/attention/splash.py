"""Splash attention: Pallas kernels for TPUs that never hold the scores of all queries and keys.

Suffixes of array names: B batch, L length, H heads, K kv_heads, N head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax

from train.attention.band import Band
from train.attention.machine import platform
from train.attention.settings import SplashBlocks
from train.attention.sight import Sight
from train.attention.splash_kernels import heads_first, make_kernel, segment_ids

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
    q_BLHN: jax.Array,
    k_BLKN: jax.Array,
    v_BLKN: jax.Array,
    sight: Sight,
    scale: float,
    soft_cap: float | None,
    *,
    blocks: SplashBlocks,
) -> jax.Array:
    """Computes attention on one device; see `attend`.

    The arguments must have no `splash_problems`. On CPUs, the kernels are interpreted.
    """
    arrays = (*map(heads_first, (q_BLHN * scale, k_BLKN, v_BLKN)), segment_ids(sight))

    def run(band: Band, *arrays: Any) -> jax.Array:
        kernel = make_kernel(
            length=q_BLHN.shape[1],
            heads=q_BLHN.shape[2],
            band=band,
            soft_cap=soft_cap,
            blocks=blocks,
            interpret=platform() == 'cpu',
        )
        return jax.vmap(kernel)(*arrays)

    if sight.chooses:
        bands = (functools.partial(run, band) for band in (sight.local_band, sight.band))
        return heads_first(jax.lax.cond(sight.local, *bands, *arrays))
    return heads_first(run(sight.band, *arrays))
