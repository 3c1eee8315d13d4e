"""Generating text with a language model, one token of every row at a time.

Suffixes of array names: B batch, P tokens of the longest prompt, T all tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from partitioning import constrain
from partitioning.state.boxes import array_of, is_carrier
from train.errors import ConfigError, check_counts
from train.models.config import TransformerConfig
from train.models.forward import compute_logits, empty_cache


def generate(
    model: Any,
    params: Any,
    prompts_BP: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array,
    *,
    new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    num_tokens: int | None = None,
    stop_token: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Continues each prompt of a batch.

    Args:
      model: the built-in transformer, as a module or its `TransformerConfig`, which keeps the keys
        and values of earlier tokens; or a function (params, tokens [batch, length]) -> logits
        [batch, length, vocab] of any causal model, which is called with all tokens for each token.
      params: its parameters, nested dicts of arrays or an `nnx.State`.
      prompts_BP: int tokens, [batch, tokens of the longest prompt].
      lengths_B: the number of tokens in each prompt, at least 1.
      key: the random key of the sampling.
      new_tokens: the largest number of tokens to add to a prompt.
      temperature: the temperature of the softmax. 0 always takes the most likely token.
      top_k: only the `top_k` most likely tokens are sampled. 0 allows all.
      num_tokens: only tokens below this number are sampled. By default, all are.
      stop_token: the token that ends a row, without being added to it.

    Returns:
      int tokens, [batch, tokens of the longest prompt + new_tokens], with zeros after the end of a
      row; and the number of tokens in each row, with its prompt.

    Raises:
      ConfigError: if a setting is impossible, or if the model has too few learned positions.
    """
    check_counts(new_tokens=new_tokens)
    check_counts(0, top_k=top_k)
    if not temperature >= 0:
        raise ConfigError(f'temperature is {temperature!r}: it must be a number >= 0')
    width, size = prompts_BP.shape[1], prompts_BP.shape[1] + new_tokens
    config = getattr(model, 'config', model)
    if isinstance(config, TransformerConfig):
        advance = _with_cache(config, params, width, size)
    else:

        def advance(tokens_BT: jax.Array, lengths_B: jax.Array, cache: Any) -> Any:
            last = (lengths_B - 1)[:, None, None]
            return jnp.take_along_axis(model(params, tokens_BT), last, axis=1)[:, 0], cache

    def step(carry: Any) -> Any:
        count, tokens_BT, lengths_B, open_B, cache = carry
        logits_BV, cache = advance(tokens_BT, lengths_B, cache)
        is_token = jnp.arange(logits_BV.shape[1]) < (num_tokens or logits_BV.shape[1])
        logits_BV = constrain(jnp.where(is_token, logits_BV, -jnp.inf), ('batch', None))
        next_B = _sample(jax.random.fold_in(key, count), logits_BV, temperature, top_k)
        if stop_token is not None:
            open_B &= next_B != stop_token
        is_next = (jnp.arange(size) == lengths_B[:, None]) & open_B[:, None]
        tokens_BT = jnp.where(is_next, next_B[:, None].astype(tokens_BT.dtype), tokens_BT)
        return count + 1, tokens_BT, lengths_B + open_B, open_B, cache

    tokens_BT = jnp.pad(prompts_BP, ((0, 0), (0, new_tokens)))
    tokens_BT = jnp.where(jnp.arange(size) < lengths_B[:, None], tokens_BT, 0)
    carry = step((0, tokens_BT, lengths_B, jnp.ones(lengths_B.shape, bool), None))
    more = lambda carry: (carry[0] < new_tokens) & jnp.any(carry[3])  # noqa: E731
    _, tokens_BT, lengths_B, _, _ = jax.lax.while_loop(more, step, carry)
    return tokens_BT, lengths_B


def _with_cache(config: TransformerConfig, params: Any, width: int, size: int) -> Callable:
    """Returns (tokens, lengths, cache or None) -> (logits of the next token, cache)."""
    if config.positions == 'learned' and size > config.max_positions:
        raise ConfigError(
            f'a prompt of {width} tokens and {size - width} new tokens exceed max_positions, '
            f'{config.max_positions}: use a shorter prompt or fewer new tokens'
        )
    params = jax.tree.map(array_of, params, is_leaf=is_carrier)

    def advance(tokens_BT: jax.Array, lengths_B: jax.Array, cache: Any) -> Any:
        positions_BL = lengths_B[:, None] - 1
        if cache is None:
            # Prompts end in the same slot, so all next tokens go to one slot of the cache.
            positions_BL += jnp.arange(width) - (width - 1)
            cache = empty_cache(config, len(lengths_B), size)
        found_BL = jnp.maximum(positions_BL, 0)
        logits_BLV, cache = compute_logits(
            config,
            params,
            jnp.take_along_axis(tokens_BT, found_BL, axis=1),
            positions_BL=found_BL,
            segments_BL=(positions_BL >= 0).astype(jnp.int32),
            cache=cache,
        )
        return logits_BLV[:, -1], cache

    return advance


def _sample(key: jax.Array, logits_BV: jax.Array, temperature: float, top_k: int) -> jax.Array:
    if not temperature:
        return jnp.argmax(logits_BV, axis=-1)
    if top_k:
        least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV / temperature)
