"""Attention by `jax.nn.dot_product_attention`: all scores at once, or the flash attention of cuDNN.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
G heads of one kv_head, N head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from train.attention.layout import device_kind
from train.attention.sight import Sight
from train.errors import first_line


def attend_at_once(
    q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, sight: Sight
) -> jax.Array:
    """Computes attention in plain jax, with scores in float32; see `attend`."""
    mask = sight.mask(q_BLHN.shape[1], k_BSKN.shape[1])
    if sight.soft_cap is None:
        return jax.nn.dot_product_attention(q_BLHN, k_BSKN, v_BSKN, mask=mask, scale=sight.scale)
    # jax.nn.dot_product_attention has no soft cap.
    q_BLKGN = (q_BLHN * sight.scale).reshape(
        *q_BLHN.shape[:2], k_BSKN.shape[2], -1, q_BLHN.shape[3]
    )
    scores = jnp.einsum('BLKGN,BSKN->BKGLS', q_BLKGN, k_BSKN, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, :, None], sight.bound(scores), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKN.dtype)
    return jnp.einsum('BKGLS,BSKN->BLKGN', weights, v_BSKN).reshape(q_BLHN.shape)


# cuDNN takes segments as a bias, [batch, 1, length, slots] in bfloat16: 128 MiB per row at 8,192.
LONGEST_SEGMENTED = 8192


def cudnn_problems(
    q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, sight: Sight
) -> Iterator[str]:
    """Yields each reason why cuDNN cannot compute attention for these arguments."""
    instead = "use kind 'auto', 'blockwise' or 'dot'"
    length, slots = q_BLHN.shape[1], k_BSKN.shape[1]
    if not device_kind().startswith('NVIDIA'):
        yield f'the devices are {device_kind()!r}, and cuDNN is for GPUs of NVIDIA: {instead}'
    elif sight.soft_cap is not None:
        yield f'the soft cap is {sight.soft_cap}, and cuDNN has none: {instead}'
    elif q_BLHN.dtype not in (jnp.bfloat16, jnp.float16):
        yield f"the dtype is {q_BLHN.dtype}: use dtype 'bfloat16', or {instead}"
    elif not isinstance(sight.first, int) or sight.first:
        yield f'there are {length} queries for the {slots} slots of a cache: {instead}'
    elif sight.segments_BL is not None and length * slots > LONGEST_SEGMENTED**2:
        yield (
            f'the rows of {length} tokens have segments, for which cuDNN needs a mask of '
            f'{length} x {slots}; use rows of at most {LONGEST_SEGMENTED} tokens, or {instead}'
        )
    else:
        call = functools.partial(attend_by_cudnn, sight=sight)
        try:
            jax.eval_shape(lambda *args: jax.vjp(call, *args)[0], q_BLHN, k_BSKN, v_BSKN)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            yield f'jax says: {first_line(error)} {instead}'


def attend_by_cudnn(
    q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, sight: Sight
) -> jax.Array:
    """Computes attention on one device; see `attend`. It has no soft cap."""
    segments = sight.segments_BL, sight.segments_BS
    mask = None
    if segments[0] is not None and segments[1] is not None:
        mask = (segments[0][:, :, None] == segments[1][:, None, :])[:, None]

    def run(window: int | None, q_BLHN: Any, k_BSKN: Any, v_BSKN: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BLHN,
            k_BSKN,
            v_BSKN,
            mask=mask,
            scale=sight.scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation='cudnn',
        )

    return sight.by_window(run, q_BLHN, k_BSKN, v_BSKN)
