"""The one function that models call for attention, and the choice of how it is computed.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
N head_dim.
"""

from __future__ import annotations

import jax

from train.attention.context import attend_over_context, length_axes
from train.attention.dot import attend_at_once
from train.attention.machine import platform
from train.attention.settings import AttentionSettings
from train.attention.sight import Sight
from train.attention.splash import attend_by_splash, splash_problems
from train.errors import ConfigError


def attend(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    sight: Sight,
    scale: float,
    soft_cap: float | None = None,
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
      sight: what each query sees. Each must see at least one key.
      scale: the factor of the products of queries and keys.
      soft_cap: bounds the scaled products by soft_cap * tanh(product / soft_cap).
      settings: how it is computed.

    Returns:
      The sums of the values, like the queries.

    Raises:
      ConfigError: if `settings` forces a kind of attention that these arguments do not allow.
    """
    if axes := length_axes(q_BLHN):
        return attend_over_context(
            q_BLHN, k_BSKN, v_BSKN, axes, sight, scale, soft_cap, settings, attend
        )
    kind = settings.kind
    if kind != 'dot' and (kind == 'splash' or platform() == 'tpu'):
        problem = next(splash_problems(q_BLHN, k_BSKN, sight), None)
        if problem is None:
            blocks = settings.splash_blocks
            return attend_by_splash(q_BLHN, k_BSKN, v_BSKN, sight, scale, soft_cap, blocks)
        if kind == 'splash':
            raise ConfigError(f"AttentionSettings.kind is 'splash', but {problem}")
    return attend_at_once(q_BLHN, k_BSKN, v_BSKN, sight, scale, soft_cap)
