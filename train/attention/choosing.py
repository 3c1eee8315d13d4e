"""The one function that models call for attention, and the choice of how it is computed.

`jax.nn.dot_product_attention` computes all scores at once, or calls the flash attention of cuDNN.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
G heads of one kv_head, N head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from train.attention.blockwise import attend_by_blocks
from train.attention.layout import (
    attend_on_each_device,
    device_kind,
    find_layout,
    length_axes,
    platform,
)
from train.attention.sight import ATTENDED, AttentionSettings, Kind, Sight
from train.errors import ConfigError, first_line


def attend(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    sight: Sight,
    settings: AttentionSettings,
) -> jax.Array:
    """Computes the attention of queries over keys and values.

    In a partitioned function, the arrays have the layouts that the logical axis rules give to
    ('batch', 'length', 'heads', 'kv'), and to 'kv_heads' in the place of 'heads' for keys and
    values that several heads share. If the rules divide the length, see `ring`. Returns the
    weighted sums of the values, with the shape of the queries. The arrays that the backward pass
    needs have the checkpoint name `ATTENDED`, except with cuDNN. Raises a ConfigError if `settings`
    forces a kind of attention that these arguments do not allow.

    Args:
      q_BLHN: the queries, [batch, length, heads, head_dim].
      k_BSKN: the keys, [batch, slots, kv_heads, head_dim]. Query head h has kv_head
        h // (heads / kv_heads).
      v_BSKN: the values, like the keys.
      sight: what each query sees, and the scores. Each query must see at least one key.
      settings: how attention is computed.
    """
    arrays = q_BLHN, k_BSKN, v_BSKN
    if axes := length_axes(q_BLHN):
        from train.attention.ring import attend_over_context  # imports Pallas, which is slow

        return attend_over_context(*arrays, axes, sight, settings, attend)
    kind = settings.kind
    if kind == 'auto':
        kernel: Kind = 'splash' if platform() == 'tpu' else 'cudnn'
        is_long = q_BLHN.shape[1] * k_BSKN.shape[1] >= settings.blockwise_from**2
        kind = 'blockwise' if is_long else 'dot'
        if platform() != 'cpu' and not any(_problems(kernel, *arrays, sight)):
            kind = kernel
    else:
        for problem in _problems(kind, *arrays, sight):
            raise ConfigError(f'AttentionSettings.kind is {kind!r}, but {problem}')
    if kind == 'dot':
        return checkpoint_name(attend_at_once(*arrays, sight), ATTENDED)
    layout, one = find_layout(q_BLHN.shape, k_BSKN.shape), _attend_by(kind, settings)
    if layout is None:
        return one(*arrays, sight)
    return attend_on_each_device(one, layout, *arrays, sight)


def _problems(
    kind: Kind, q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, sight: Sight
) -> Iterator[str]:
    """Yields each reason why this kind cannot compute attention for these arguments."""
    if kind not in ('splash', 'cudnn'):
        return
    if find_layout(q_BLHN.shape, k_BSKN.shape) is None:
        yield (
            f"on_indivisible is 'pad', and the {q_BLHN.shape[0]} rows or the {q_BLHN.shape[2]} "
            "heads are not whole shards: use sizes that the mesh divides, or kind 'blockwise' or "
            "'dot'"
        )
    if kind == 'splash':
        from train.attention.splash import splash_problems  # imports Pallas, which is slow

        yield from splash_problems(q_BLHN, k_BSKN, sight)
    else:
        yield from cudnn_problems(q_BLHN, k_BSKN, v_BSKN, sight)


def _attend_by(kind: Kind, settings: AttentionSettings) -> Callable[..., jax.Array]:
    """The function that computes attention of this kind, other than 'dot', on one device."""
    if kind == 'cudnn':
        return attend_by_cudnn
    if kind == 'splash':
        from train.attention.splash import attend_by_splash  # imports Pallas

        return functools.partial(attend_by_splash, settings=settings)
    return functools.partial(
        attend_by_blocks, queries=settings.block_queries, keys=settings.block_keys
    )


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
