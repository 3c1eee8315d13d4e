"""Sampling from a language model, one token at a time, with cached keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def decode(
    model: Any,
    params: Any,
    prompt_BL: jax.Array,
    rng: jax.Array,
    *,
    length: int,
    temperature: float,
    num_tokens: int,
) -> jax.Array:
    """Continues each prompt of a batch.

    Args:
      model: a `Transformer`.
      params: its parameters.
      prompt_BL: int tokens, [batch, prompt length].
      rng: the random key of the sampling.
      length: the length of the result, including the prompt.
      temperature: the temperature of the softmax. 0 always takes the most likely token.
      num_tokens: only tokens below this number are sampled.

    Returns:
      int tokens, [batch, length]. Each row starts with its prompt.
    """
    _batch, prompt_length = prompt_BL.shape
    padded_BL = jnp.pad(prompt_BL, ((0, 0), (0, length - prompt_length)))

    def logits_at(cache: Any, token_B: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
        logits_BLV, updated = model.apply(
            {'params': params, **cache},
            token_B[:, None],
            decode_position=position,
            decode_length=length,
            mutable=['cache'],
        )
        return logits_BLV[:, 0, :num_tokens], updated

    def next_token(carry: tuple[Any, jax.Array], position: jax.Array) -> tuple[Any, jax.Array]:
        cache, token_B = carry
        logits_BV, cache = logits_at(cache, token_B, position)
        if temperature:
            key = jax.random.fold_in(rng, position)
            sampled_B = jax.random.categorical(key, logits_BV / temperature)
        else:
            sampled_B = jnp.argmax(logits_BV, axis=-1)
        in_prompt = position + 1 < prompt_length
        given_B = jax.lax.dynamic_index_in_dim(padded_BL, position + 1, axis=1, keepdims=False)
        token_B = jnp.where(in_prompt, given_B, sampled_B).astype(prompt_BL.dtype)
        return (cache, token_B), token_B

    _, empty = jax.eval_shape(lambda: logits_at({}, prompt_BL[:, 0], jnp.int32(0)))
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
    first_B = prompt_BL[:, 0]
    _, tokens_LB = jax.lax.scan(next_token, (cache, first_B), jnp.arange(length - 1))
    return jnp.concatenate([first_B[:, None], tokens_LB.T], axis=1)
