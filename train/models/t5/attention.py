"""T5's attention, its masks, and its cache of earlier keys and values.

Suffixes of array names: B batch, L queries, S keys, E embed, H heads, K head dimension, T the
length of the cache.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.models.remat import named
from train.models.residual import lay_out
from train.models.t5.config import T5Config
from train.models.t5.layers import Dense

MASKED = -1e10


def pair_mask(queries_BL: jax.Array, keys_BS: jax.Array) -> jax.Array:
    """Returns where both a query and a key are true, bool [batch, 1, L, S]."""
    return (queries_BL[:, :, None] & keys_BS[:, None, :])[:, None]


def segment_mask(queries_BL: jax.Array, keys_BS: jax.Array) -> jax.Array:
    """Returns where a query and a key are in the same segment, bool [batch, 1, L, S]."""
    return (queries_BL[:, :, None] == keys_BS[:, None, :])[:, None]


def decoder_mask(
    targets_BL: jax.Array,
    segments_BL: jax.Array | None = None,
    prefix_BL: jax.Array | None = None,
) -> jax.Array:
    """Returns where a decoder position sees another, bool [batch, 1, L, L].

    Args:
      targets_BL: the target tokens; 0 is padding.
      segments_BL: the segments of packed rows, which do not see each other.
      prefix_BL: 1 where positions also see later ones that have 1.
    """
    length = jnp.arange(targets_BL.shape[1])
    mask = (length[:, None] >= length)[None, None]
    if prefix_BL is not None:
        mask = mask | pair_mask(prefix_BL > 0, prefix_BL > 0)
    mask = mask & pair_mask(targets_BL > 0, targets_BL > 0)
    return mask if segments_BL is None else mask & segment_mask(segments_BL, segments_BL)


class Attention(nn.Module):
    """Multi-head attention without scaling, which is in the initial kernels of the queries.

    Attributes:
      decode: whether keys and values are cached, for one new position per call. The first call,
        without a cache, creates it.
      prefill: whether the call fills the cache with the keys and values of `prefill_lengths`
        positions of each row. It needs a cache.
    """

    config: T5Config
    deterministic: bool
    decode: bool = False
    prefill: bool = False

    @nn.compact
    def __call__(
        self,
        queries_BLE: jax.Array,
        keys_BSE: jax.Array,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        prefill_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from queries to keys.

        Args:
          queries_BLE: what asks, [batch, queries, embed].
          keys_BSE: what is asked, [batch, keys, embed].
          mask: bool, broadcastable to [batch, heads, queries, keys].
          bias: added to the products, broadcastable to the same; over all positions of the cache
            while decoding.
          prefill_lengths: int32 [batch], with `prefill`.
        """
        c = self.config
        shape = (c.emb_dim, c.num_heads, c.head_dim)
        heads = ('heads', 'kv') if c.scalable else ('joined_kv',)

        def project(
            name: Literal['query', 'key', 'value'], x: jax.Array, divisor: float = 1.0
        ) -> jax.Array:
            dense = Dense(shape, 1, ('embed', *heads), c.dtype, 'normal', divisor, name=name)
            laid_out = lay_out(dense(x), ('batch', 'length', 'heads', 'kv'), self.decode)
            return named(laid_out, name)

        scale = math.sqrt(c.head_dim)
        query_BLHK = project('query', queries_BLE, scale)
        if c.scale_attn_logits:
            query_BLHK = query_BLHK / jnp.asarray(scale, c.dtype)
        key_BSHK, value_BSHK = project('key', keys_BSE), project('value', keys_BSE)
        if self.decode or self.prefill:
            key_BSHK, value_BSHK, mask, bias = self._with_cache(
                key_BSHK, value_BSHK, mask, bias, prefill_lengths
            )
        mixed_BLHK = self._attend(query_BLHK, key_BSHK, value_BSHK, mask, bias)
        mixed_BLHK = named(mixed_BLHK, 'attended')
        out = Dense((*shape[1:], c.emb_dim), 2, (*heads, 'embed'), c.dtype, 'normal', name='out')
        return named(out(mixed_BLHK), 'attention_out')

    def _attend(self, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> jax.Array:
        """Returns the mixture of values for each query, [batch, queries, heads, head_dim]."""
        c = self.config
        if c.float32_attention_logits:
            query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        logits = jnp.einsum('blhk,bshk->bhls', query, key)
        added = None if mask is None else jnp.where(mask, 0.0, MASKED).astype(c.dtype)
        if bias is not None:
            added = bias if added is None else added + bias
        if added is not None:
            logits = logits + added.astype(logits.dtype)
        weights = jax.nn.softmax(logits).astype(c.dtype)
        if c.dropout_rate and not self.deterministic:
            kept = 1.0 - c.dropout_rate
            shape = (*weights.shape[:-2], 1, weights.shape[-1])  # the same for all queries
            keep = jax.random.bernoulli(self.make_rng('dropout'), kept, shape)
            weights = weights * (keep.astype(c.dtype) / jnp.asarray(kept, c.dtype))
        return jnp.einsum('bhls,bshk->blhk', weights, value)

    def _with_cache(self, key: Any, value: Any, mask: Any, bias: Any, lengths: Any) -> Any:
        """Reads and writes the cache; returns the keys, values, mask and bias to attend with."""
        exists = self.has_variable('cache', 'cached_key')
        if self.prefill and (self.decode or not exists):
            raise ValueError(
                'prefill fills an existing cache in one call: create the cache with decode=True, '
                'then call with prefill=True and decode=False'
            )
        key_BHKS, value_BHKS = (x.transpose(0, 2, 3, 1) for x in (key, value))
        keys = self.variable('cache', 'cached_key', jnp.zeros_like, key_BHKS)
        values = self.variable('cache', 'cached_value', jnp.zeros_like, value_BHKS)
        index = self.variable('cache', 'cache_index', lambda: jnp.zeros((), jnp.int32))
        if not exists:
            return key, value, mask, bias
        length = keys.value.shape[-1]
        if self.prefill:
            filled = jnp.arange(length) < lengths[:, None, None, None]
            keys.value = key_BHKS * filled.astype(key.dtype)
            values.value = value_BHKS * filled.astype(value.dtype)
            index.value = lengths.astype(jnp.int32)
            return key, value, mask, bias
        if (key.shape[0], key.shape[1]) != (keys.value.shape[0], 1):
            raise ValueError(
                f'a decoding step takes tokens of shape [{keys.value.shape[0]}, 1], like the rows '
                f'of the cache, and got [{key.shape[0]}, {key.shape[1]}]'
            )
        if bias is not None and bias.shape[-1] != length:
            raise ValueError(
                f'the cache has {length} positions and the biases {bias.shape[-1]}: pass '
                f'max_decode_length={length}'
            )
        # The index is a scalar, or one per row after a prefill.
        now = jnp.reshape(index.value, (-1, 1, 1, 1))
        is_now = (jnp.arange(length) == now).astype(key.dtype)
        keys.value = keys.value + key_BHKS * is_now
        values.value = values.value + value_BHKS * is_now
        index.value = index.value + 1
        seen = jnp.arange(length) <= now
        if bias is not None:
            # A search may step a row past its end. There is no bias then, as in T5X.
            place_B = now[:, 0, 0, 0]
            rows_HBS = jnp.take(bias[0], place_B, axis=1, mode='fill', fill_value=0)
            bias = rows_HBS.transpose(1, 0, 2)[:, :, None]
        key, value = (x.value.transpose(0, 3, 1, 2) for x in (keys, values))
        return key, value, seen if mask is None else mask & seen, bias
