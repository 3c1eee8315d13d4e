"""The one function that models call for attention, and the choice of how it is computed.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
N head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
from jax.ad_checkpoint import checkpoint_name

from train.attention.blockwise import attend_by_blocks
from train.attention.dot_product import attend_at_once, attend_by_cudnn, cudnn_problems
from train.attention.layout import attend_on_each_device, find_layout, length_axes, platform
from train.attention.settings import ATTENDED, AttentionSettings, Kind
from train.attention.sight import Sight
from train.errors import ConfigError


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
    values that several heads share. If the rules divide the length, see `context`.

    Args:
      q_BLHN: the queries, [batch, length, heads, head_dim].
      k_BSKN: the keys, [batch, slots, kv_heads, head_dim]. Query head h has kv_head
        h // (heads / kv_heads).
      v_BSKN: the values, like the keys.
      sight: what each query sees, and the scores. Each query must see at least one key.
      settings: how attention is computed.

    Returns:
      The weighted sums of the values, with the shape of the queries. The arrays that the backward
      pass needs have the checkpoint name `ATTENDED`, except with cuDNN.

    Raises:
      ConfigError: if `settings` forces a kind of attention that these arguments do not allow.
    """
    arrays = q_BLHN, k_BSKN, v_BSKN
    if axes := length_axes(q_BLHN):
        from train.attention.context import attend_over_context  # imports Pallas, which is slow

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
        from train.attention.splash import attend_by_splash, choose_blocks  # imports Pallas

        return functools.partial(attend_by_splash, blocks=choose_blocks(settings))
    return functools.partial(
        attend_by_blocks, queries=settings.block_queries, keys=settings.block_keys
    )
