"""One layer of the built-in transformer: norms, attention and MLP, as pure functions.

Suffixes of array names: B batch, L length, S slots of keys and values, D embed, H heads,
K kv_heads, G heads of one kv_head, N head_dim, F mlp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.models.config import RopeScaling, TransformerConfig
from train.models.parameters import Params

RESIDUAL = ('batch', 'length', 'embed')


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


def apply_layer(
    config: TransformerConfig,
    params: Params,
    x_BLD: jax.Array,
    places: Places,
    index: Any,
    dropout_key: jax.Array | None = None,
    cache: Cache | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Adds attention and MLP, each after a norm, to the residual stream.

    Args:
      config: the settings of the model.
      params: the parameters of the layer.
      x_BLD: the residual stream.
      places: where the tokens are.
      index: the number of the layer, an integer or a scalar array.
      dropout_key: the random key of the dropout, or None.
      cache: the earlier tokens, with the segments of all. The result has all keys and values.
    """

    def add(x_BLD: jax.Array, branch_BLD: jax.Array, name: str, number: int) -> jax.Array:
        if config.post_norms:
            branch_BLD = normalize(config, params[f'{name}_post_norm'], branch_BLD)
        if dropout_key is not None:
            kept, key = 1 - config.dropout_rate, jax.random.fold_in(dropout_key, number)
            is_kept = jax.random.bernoulli(key, kept, branch_BLD.shape)
            branch_BLD = jnp.where(is_kept, branch_BLD / kept, 0)
        return constrain(x_BLD + branch_BLD, RESIDUAL)

    x_BLD = constrain(x_BLD, RESIDUAL)
    normed_BLD = normalize(config, params['attention_norm'], x_BLD)
    branch_BLD, cache = _attend(config, params['attention'], normed_BLD, places, index, cache)
    x_BLD = add(x_BLD, branch_BLD, 'attention', 0)
    normed_BLD = normalize(config, params['mlp_norm'], x_BLD)
    return add(x_BLD, _apply_mlp(config, params['mlp'], normed_BLD), 'mlp', 1), cache


def normalize(config: TransformerConfig, params: Params, x: jax.Array) -> jax.Array:
    """Applies RMSNorm or LayerNorm to the last dimension, in float32."""
    y = x.astype(jnp.float32)
    if config.norm == 'layer':
        y -= jnp.mean(y, axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + config.norm_epsilon)
    y *= params['scale'] + 1.0 if config.norm_scale_offset else params['scale']
    return (y + params['bias'] if 'bias' in params else y).astype(config.dtype)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Bounds values to (-cap, cap). None returns them unchanged."""
    return x if cap is None else cap * jnp.tanh(x / cap)


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
    sin, cos = rotation
    a, b = jnp.split(x_BLHN.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHN.dtype)


def _multiply(equation: str, x: jax.Array, params: Params, name: str) -> jax.Array:
    """Applies a matrix and its bias."""
    y, bias = jnp.einsum(equation, x, params[name].astype(x.dtype)), params.get(f'{name}_bias')
    return y if bias is None else y + bias.astype(x.dtype)


def _attend(
    c: TransformerConfig,
    p: Params,
    x_BLD: jax.Array,
    places: Places,
    index: Any,
    cache: Cache | None,
) -> tuple[jax.Array, Cache | None]:
    q_BLHN = _multiply('BLD,DHN->BLHN', x_BLD, p, 'query')
    k_BSKN = _multiply('BLD,DKN->BLKN', x_BLD, p, 'key')
    v_BSKN = _multiply('BLD,DKN->BLKN', x_BLD, p, 'value')
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
    q_BLHN = constrain(q_BLHN, ('batch', 'length', 'heads', 'kv'))
    k_BSKN = constrain(k_BSKN, ('batch', 'length', c.kv_heads_axis, 'kv'))
    v_BSKN = constrain(v_BSKN, ('batch', 'length', c.kv_heads_axis, 'kv'))
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
    attended_BLHN = constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv'))
    return _multiply('BLHN,HND->BLD', attended_BLHN, p, 'out'), cache


def _attend_capped(
    q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, mask: jax.Array, cap: float
) -> jax.Array:
    """Attention with bounded products, which `jax.nn.dot_product_attention` does not have."""
    q_BLKGN = q_BLHN.reshape(*q_BLHN.shape[:2], k_BSKN.shape[2], -1, q_BLHN.shape[3])
    products = jnp.einsum('BLKGN,BSKN->BKGLS', q_BLKGN, k_BSKN, preferred_element_type=jnp.float32)
    products = jnp.where(mask[:, :, None], soft_cap(products, cap), -jnp.inf)
    weights = jax.nn.softmax(products, axis=-1).astype(v_BSKN.dtype)
    return jnp.einsum('BKGLS,BSKN->BLKGN', weights, v_BSKN).reshape(q_BLHN.shape)


def _apply_mlp(c: TransformerConfig, p: Params, x_BLD: jax.Array) -> jax.Array:
    hidden_BLF = _multiply('BLD,DF->BLF', x_BLD, p, 'gate' if c.gated_mlp else 'up')
    if c.activation.startswith('gelu'):
        hidden_BLF = jax.nn.gelu(hidden_BLF, approximate=c.activation == 'gelu_tanh')
    elif c.activation == 'silu':
        hidden_BLF = jax.nn.silu(hidden_BLF)
    else:
        hidden_BLF = jax.nn.relu(hidden_BLF)
        hidden_BLF = hidden_BLF**2 if c.activation == 'relu2' else hidden_BLF
    if c.gated_mlp:
        hidden_BLF *= _multiply('BLD,DF->BLF', x_BLD, p, 'up')
    return _multiply('BLF,FD->BLD', constrain(hidden_BLF, ('batch', 'length', 'mlp')), p, 'down')
