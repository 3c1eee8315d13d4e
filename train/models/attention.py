"""The attention of the built-in transformer, with its cache of earlier keys and values.

Suffixes of array names: B batch, L length, S slots of keys and values, D embed, H heads,
K kv_heads, N head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.attention import Sight, attend
from train.models.config import TransformerConfig
from train.models.elementary import multiply, normalize
from train.models.parameters import Params
from train.models.remat import named
from train.models.residual import lay_out_projected
from train.models.rotary import rotate


def cached_names(config: TransformerConfig) -> tuple[str | None, ...]:
    """Returns the logical axes of cached keys and values.

    The layers have no name: each reads its slots by its number, so no rule shards them.
    """
    return (None, 'batch', None, config.kv_heads_axis, 'kv')


class Cache(NamedTuple):
    """The keys and values of earlier tokens, in slots.

    Attributes:
      keys: [layers, batch, slots, kv_heads, head_dim].
      values: like `keys`.
      segments_BS: the int segment of each slot.
      used: the number of slots in use, a scalar.
    """

    keys: jax.Array
    values: jax.Array
    segments_BS: jax.Array
    used: jax.Array


class Places(NamedTuple):
    """Where the tokens are.

    Attributes:
      segments_BL: the int segment of each token, or None if a row is one segment.
      rotation: what `find_rotation` returns for global layers, or None.
      local_rotation: the same for local layers.
    """

    segments_BL: jax.Array | None
    rotation: Any
    local_rotation: Any


def apply_attention(
    c: TransformerConfig,
    p: Params,
    x_BLD: jax.Array,
    places: Places,
    index: Any,
    cache: Cache | None,
) -> tuple[jax.Array, Cache | None]:
    of_keys = 'BPD,DHN->BPHN' if c.kv_heads_axis == 'heads' else 'BPD,DKN->BPKN'
    q_BLHN = lay_out_projected(multiply(c, 'BPD,DHN->BPHN', x_BLD, p, 'query'), 'heads')
    k_BSKN = lay_out_projected(multiply(c, of_keys, x_BLD, p, 'key'), c.kv_heads_axis)
    v_BSKN = lay_out_projected(multiply(c, of_keys, x_BLD, p, 'value'), c.kv_heads_axis)
    if c.qk_norm:
        q_BLHN, k_BSKN = normalize(c, p['query_norm'], q_BLHN), normalize(c, p['key_norm'], k_BSKN)
    local = c.is_local(index)
    if c.positions == 'rotary':
        pair = (places.rotation, places.local_rotation)
        if isinstance(local, bool):
            rotation = pair[local]
        else:
            rotation = jax.tree.map(lambda a, b: jnp.where(local, b, a), *pair)
        # Before tokens are exchanged for heads, a device has the fewest positions.
        q_BLHN = lay_out_projected(rotate(q_BLHN, rotation), 'heads')
        k_BSKN = lay_out_projected(rotate(k_BSKN, rotation), c.kv_heads_axis)
    q_BLHN = named(constrain(q_BLHN, ('batch', 'length', 'heads', 'kv')), 'query')
    k_BSKN = named(constrain(k_BSKN, ('batch', 'length', c.kv_heads_axis, 'kv')), 'key')
    v_BSKN = named(constrain(v_BSKN, ('batch', 'length', c.kv_heads_axis, 'kv')), 'value')
    if cache is not None:
        at = (index, 0, cache.used, 0, 0)
        keys, values = (
            constrain(jax.lax.dynamic_update_slice(held, new[None], at), cached_names(c))
            for held, new in ((cache.keys, k_BSKN), (cache.values, v_BSKN))
        )
        cache = cache._replace(keys=keys, values=values)
        k_BSKN, v_BSKN = keys[index], values[index]

    sight = Sight(
        first=0 if cache is None else cache.used,
        window=c.window,
        local=local,
        segments_BL=places.segments_BL,
        key_segments_BS=None if cache is None else cache.segments_BS,
    )
    attended_BLHN = attend(
        q_BLHN,
        k_BSKN,
        v_BSKN,
        sight=sight,
        scale=c.attention_scale or c.head_dim**-0.5,
        soft_cap=c.attention_soft_cap,
        settings=c.attention,
    )
    attended_BLHN = constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv'))
    attended_BLHN = lay_out_projected(attended_BLHN, 'heads')
    return multiply(c, 'BPHN,HND->BPD', attended_BLHN, p, 'out'), cache
