"""The flash attention of cuDNN, for NVIDIA's GPUs, through `jax.nn.dot_product_attention`.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
N head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from train.attention.band import Band
from train.attention.machine import device_kind
from train.attention.sight import Sight
from train.errors import first_line

# cuDNN takes segments as a bias, [batch, 1, length, slots] in bfloat16: 128 MiB per row at 8,192.
LONGEST_SEGMENTED = 8192


def cudnn_problems(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
    scale: float,
    soft_cap: float | None,
) -> Iterator[str]:
    """Yields why cuDNN cannot compute the attention of these arguments, if so."""
    instead = "use kind 'auto', 'blockwise' or 'dot'"
    length, slots = q_BLHN.shape[1], k_BSKN.shape[1]
    if not device_kind().startswith('NVIDIA'):
        yield f'the devices are {device_kind()!r}, and cuDNN is for GPUs of NVIDIA: {instead}'
    elif soft_cap is not None:
        yield f'the soft cap is {soft_cap}, and cuDNN has none: {instead}'
    elif q_BLHN.dtype not in (jnp.bfloat16, jnp.float16):
        yield f"the dtype is {q_BLHN.dtype}: use dtype 'bfloat16', or {instead}"
    elif not isinstance(sight.first, int) or sight.first or (not sight.causal and sight.window):
        yield (
            f'there are {length} queries for the {slots} slots of a cache, or a window without '
            f'causal attention: {instead}'
        )
    elif sight.segments_BL is not None and length * slots > LONGEST_SEGMENTED**2:
        yield (
            f'the rows of {length} tokens have segments, for which cuDNN needs a mask of '
            f'{length} x {slots}; use rows of at most {LONGEST_SEGMENTED} tokens, or {instead}'
        )
    else:
        call = functools.partial(attend_by_cudnn, sight=sight, scale=scale, soft_cap=soft_cap)
        try:
            jax.eval_shape(lambda *args: jax.vjp(call, *args)[0], q_BLHN, k_BSKN, v_BSKN)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            yield f'jax says: {first_line(error)} {instead}'


def attend_by_cudnn(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
    scale: float,
    soft_cap: None = None,
) -> jax.Array:
    """Computes attention on one device; see `attend`. It has no soft cap."""
    segments = sight.segments_BL, sight.segments_BS
    mask = None
    if segments[0] is not None and segments[1] is not None:
        mask = (segments[0][:, :, None] == segments[1][:, None, :])[:, None]

    def run(band: Band, q_BLHN: Any, k_BSKN: Any, v_BSKN: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BLHN,
            k_BSKN,
            v_BSKN,
            mask=mask,
            scale=scale,
            is_causal=sight.causal,
            local_window_size=None if band.most is None else (band.most - 1, 0),
            implementation='cudnn',
        )

    args = q_BLHN, k_BSKN, v_BSKN
    if sight.chooses:
        bands = (functools.partial(run, band) for band in (sight.local_band, sight.band))
        return jax.lax.cond(sight.local, *bands, *args)
    return run(sight.band, *args)
