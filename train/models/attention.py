"""The attention of the built-in transformer: rotary positions, and a cache of keys and values.

Suffixes of array names: B batch, L length, S slots of keys and values, D embed, H heads,
K kv_heads, N head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partitioning import constrain
from train.attention import Sight, attend
from train.attention.layout import platform
from train.models.config import RopeScaling, TransformerConfig
from train.models.elementary import multiply, normalize
from train.models.parameters import Params
from train.models.remat import named
from train.models.residual import lay_out_projected


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


def find_rotation(
    positions_BL: jax.Array, head_dim: int, wavelength: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sines and cosines of rotary positions, each [batch, length, 1, head_dim / 2]."""
    half = head_dim // 2
    frequency_N = wavelength ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling:
        kept_N = jnp.zeros(half)
        if scaling.original_length:
            turns_N = scaling.original_length * frequency_N / (2 * jnp.pi)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            kept_N = jnp.clip((turns_N - low) / (high - low), 0, 1)
        frequency_N *= kept_N + (1 - kept_N) / scaling.factor
    angle = positions_BL[:, :, None, None].astype(jnp.float32) * frequency_N
    return jnp.sin(angle), jnp.cos(angle)


def rotate(x_BLHN: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each pair (i, i + head_dim / 2) of a head."""
    sin, cos = (jnp.concatenate([half, half], axis=-1) for half in rotation)
    half = x_BLHN.shape[-1] // 2
    if platform() == 'cpu':
        swapped_BLHN = jnp.concatenate([-x_BLHN[..., half:], x_BLHN[..., :half]], axis=-1)
    else:
        # The other half of each pair comes from a product, which is exact. Slices of a head would
        # cut the vector registers of TPUs into parts: at 1 B parameters with heads of 64, the step
        # would take 249 ms of estimated compute on v5e instead of 220.
        swap_NN = jnp.asarray(
            np.roll(np.diag([1.0] * half + [-1.0] * half), half, axis=1), x_BLHN.dtype
        )
        swapped_BLHN = jnp.dot(x_BLHN, swap_NN, precision=jax.lax.Precision.HIGHEST)
    x, swapped = x_BLHN.astype(jnp.float32), swapped_BLHN.astype(jnp.float32)
    return (x * cos + swapped * sin).astype(x_BLHN.dtype)


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
        scale=c.attention_scale or c.head_dim**-0.5,
        soft_cap=c.attention_soft_cap,
    )
    attended_BLHN = attend(q_BLHN, k_BSKN, v_BSKN, sight=sight, settings=c.attention)
    attended_BLHN = constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv'))
    attended_BLHN = lay_out_projected(attended_BLHN, 'heads')
    return multiply(c, 'BPHN,HND->BPD', attended_BLHN, p, 'out'), cache
