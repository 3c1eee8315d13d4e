"""Generating text with a language model, one token of every row at a time.

Suffixes of array names: B batch, P tokens of the longest prompt, T all tokens, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from partitioning import constrain
from partitioning.state.boxes import array_of, is_carrier
from train.decoding import DecodingState, sample
from train.decoding.interface import NO_ROWS, TokensToLogits
from train.decoding.sampling import SamplingState, check_sampling
from train.errors import ConfigError, check_counts
from train.models.config import TransformerConfig
from train.models.forward import compute_logits, empty_cache
from train.models.residual import whole_lengths

# After how many tokens the host is told how many there are.
TOKENS_BETWEEN_REPORTS = 64


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
    top_p: float = 0.0,
    num_tokens: int | None = None,
    stop_token: int | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Continues each prompt of a batch.

    Raises a ConfigError if a setting is impossible, or if the model has too few learned positions.

    Args:
      model: the built-in transformer, as a module or its `TransformerConfig`, which keeps the keys
        and values of earlier tokens; or a function (params, tokens [batch, length]) -> logits
        [batch, length, vocab] of any causal model, which is called with all tokens for each token.
      params: its parameters, nested dicts of arrays or an `nnx.State`.
      prompts_BP: int tokens, [batch, tokens of the longest prompt].
      lengths_B: the number of tokens in each prompt, at least 1.
      new_tokens: the largest number of tokens to add to a prompt.
      temperature, top_k, top_p: see `train.evaluators.samples.Samples`.
      num_tokens: only tokens below this number are sampled. By default, all are.
      stop_token: the token that ends a row, without being added to it.
      on_tokens: a function that the host calls, while the devices work, with the number of new
        tokens so far.

    Returns:
      int tokens, [batch, tokens of the longest prompt + new_tokens], with zeros after the end of a
      row; and the number of tokens in each row, with its prompt.
    """
    check_counts(new_tokens=new_tokens)
    check_sampling(temperature, top_k, top_p)
    size = prompts_BP.shape[1] + new_tokens
    prompts_BT = jnp.pad(prompts_BP, ((0, 0), (0, new_tokens)))
    prompts_BT = jnp.where(jnp.arange(size) < lengths_B[:, None], prompts_BT, 0)
    config, cache = getattr(model, 'config', model), None
    if isinstance(config, TransformerConfig):
        advance, cache = _with_cache(config, params, prompts_BP, lengths_B, size)
    else:

        def advance(state: DecodingState) -> tuple[jax.Array, None]:
            last = state.cur_index[:, None, None]
            return jnp.take_along_axis(model(params, state.sequences), last, axis=1)[:, 0], None

    def step(state: DecodingState) -> tuple[jax.Array, Any]:
        logits_BV, cache = advance(state)
        is_token = jnp.arange(logits_BV.shape[1]) < (num_tokens or logits_BV.shape[1])
        return constrain(jnp.where(is_token, logits_BV, -jnp.inf), ('batch', None)), cache

    def report(state: SamplingState) -> SamplingState:
        if on_tokens is not None:
            is_due = state.step % TOKENS_BETWEEN_REPORTS == 0
            call = functools.partial(jax.debug.callback, on_tokens)
            jax.lax.cond(is_due, call, lambda number: None, state.step)
        return state

    decoded = sample(
        step,
        cache,
        prompts_BT[:, :-1],
        cache_axes=jax.tree.map(lambda _: NO_ROWS, cache),
        end_token=stop_token,
        key=key,
        start_index_B=lengths_B - 1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=new_tokens,
        process_state=report,
    )
    tokens_BT = jnp.concatenate([prompts_BT[:, :1], decoded.tokens[:, 0]], axis=1)
    end_B = lengths_B + new_tokens
    if stop_token is not None:
        is_stop = (tokens_BT == stop_token) & (jnp.arange(size) >= lengths_B[:, None])
        end_B = jnp.minimum(end_B, jnp.where(is_stop, jnp.arange(size), size).min(axis=1))
    return jnp.where(jnp.arange(size) < end_B[:, None], tokens_BT, 0), end_B


def _with_cache(
    config: TransformerConfig, params: Any, prompts_BP: jax.Array, lengths_B: jax.Array, size: int
) -> tuple[TokensToLogits, Any]:
    """Returns the decoding step, and the cache of all tokens but the last one of each prompt."""
    width = prompts_BP.shape[1]
    if config.positions == 'learned' and size > config.max_positions:
        raise ConfigError(
            f'a prompt of {width} tokens and {size - width} new tokens exceed max_positions, '
            f'{config.max_positions}: use a shorter prompt or fewer new tokens'
        )
    params = jax.tree.map(array_of, params, is_leaf=is_carrier)

    def advance(tokens_BL: jax.Array, positions_BL: jax.Array, cache: Any) -> Any:
        with whole_lengths():
            return compute_logits(
                config,
                params,
                tokens_BL,
                positions_BL=jnp.maximum(positions_BL, 0),
                segments_BL=(positions_BL >= 0).astype(jnp.int32),
                cache=cache,
            )

    def step(state: DecodingState) -> tuple[jax.Array, Any]:
        logits_BLV, cache = advance(state.cur_token, state.cur_index[:, None], state.cache)
        return logits_BLV[:, -1], cache

    cache = empty_cache(config, len(lengths_B), size)
    if width > 1:
        # Prompts end in the same slot, so all next tokens go to one slot of the cache.
        positions_BL = (lengths_B - width)[:, None] + jnp.arange(width - 1)
        tokens_BL = jnp.take_along_axis(prompts_BP, jnp.maximum(positions_BL, 0), axis=1)
        cache = advance(tokens_BL, positions_BL, cache)[1]
    return step, cache
