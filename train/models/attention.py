"""The attention of the built-in transformer, with its cache of earlier keys and values.

Suffixes of array names: B batch, L length, S slots of keys and values, D embed, H heads,
K kv_heads, G heads of one kv_head, N head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.models.config import TransformerConfig
from train.models.elementary import multiply, normalize, soft_cap
from train.models.parameters import Params
from train.models.remat import named
from train.models.rotary import rotate


def cached_names(config: TransformerConfig) -> tuple[str | None, ...]:
    """Returns the logical axes of cached keys and values."""
    return ('layers', 'batch', None, config.kv_heads_axis, 'kv')


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
    q_BLHN = multiply('BLD,DHN->BLHN', x_BLD, p, 'query')
    k_BSKN = multiply('BLD,DKN->BLKN', x_BLD, p, 'key')
    v_BSKN = multiply('BLD,DKN->BLKN', x_BLD, p, 'value')
    if c.qk_norm:
        q_BLHN, k_BSKN = normalize(c, p['query_norm'], q_BLHN), normalize(c, p['key_norm'], k_BSKN)
    local = c.is_local(index)
    if c.positions == 'rotary':
        pair = (places.rotation, places.local_rotation)
        if isinstance(local, bool):
            rotation = pair[local]
        else:
            rotation = jax.tree.map(lambda a, b: jnp.where(local, b, a), *pair)
        q_BLHN, k_BSKN = rotate(q_BLHN, rotation), rotate(k_BSKN, rotation)
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

    first = 0 if cache is None else cache.used
    distance_LS = first + jnp.arange(q_BLHN.shape[1])[:, None] - jnp.arange(k_BSKN.shape[1])
    mask = distance_LS >= 0
    if local is not False:
        mask &= (distance_LS < (c.window or 0)) | jnp.logical_not(local)
    mask, segments_BL = mask[None, None], places.segments_BL
    if segments_BL is not None:
        segments_BS = segments_BL if cache is None else cache.segments_BS
        mask &= (segments_BL[:, :, None] == segments_BS[:, None, :])[:, None]

    scale = c.attention_scale or c.head_dim**-0.5
    if c.attention_soft_cap is None:
        attended_BLHN = jax.nn.dot_product_attention(q_BLHN, k_BSKN, v_BSKN, mask=mask, scale=scale)
    else:
        attended_BLHN = _attend_capped(q_BLHN * scale, k_BSKN, v_BSKN, mask, c.attention_soft_cap)
    attended_BLHN = named(constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv')), 'attended')
    return multiply('BLHN,HND->BLD', attended_BLHN, p, 'out'), cache


def _attend_capped(
    q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, mask: jax.Array, cap: float
) -> jax.Array:
    """Attention with bounded products, which `jax.nn.dot_product_attention` does not have."""
    q_BLKGN = q_BLHN.reshape(*q_BLHN.shape[:2], k_BSKN.shape[2], -1, q_BLHN.shape[3])
    products = jnp.einsum('BLKGN,BSKN->BKGLS', q_BLKGN, k_BSKN, preferred_element_type=jnp.float32)
    products = jnp.where(mask[:, :, None], soft_cap(products, cap), -jnp.inf)
    weights = jax.nn.softmax(products, axis=-1).astype(v_BSKN.dtype)
    return jnp.einsum('BKGLS,BSKN->BLKGN', weights, v_BSKN).reshape(q_BLHN.shape)
