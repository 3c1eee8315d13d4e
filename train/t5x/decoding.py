"""T5X's decoding functions, with its parameters and defaults, on top of `train.decoding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from train.decoding import (
    Decoded,
    DecodingState as DecodingState,
    Search,
    beam_search as search_beams,
)
from train.decoding.interface import NO_ROWS, TokensToLogits
from train.decoding.sampling import SamplingState, sample
from train.errors import ConfigError

# Cached arrays that all rows share. The index has rows after a prefill.
_INDEX, _SHARED = 'cache_index', 'cached_bias'


def temperature_sample(
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    decode_rng: jax.Array | None = None,
    num_decodes: int = 1,
    temperature: float | jax.Array = 1.0,
    topk: int = 1,
    topp: float = 0.0,
    cache_offset: int = 0,
    initial_index: jax.Array | None = None,
    max_decode_steps: int | jax.Array | None = None,
    max_decode_steps_hard_limit: int | None = None,
    rescale_log_probs: bool = True,
    state_callback_fn: Callable[[SamplingState], SamplingState] | None = None,
    logit_callback_fn: Callable[[jax.Array, SamplingState], jax.Array] | None = None,
) -> Decoded:
    """Samples sequences token by token; see `train.decoding.sample`.

    Raises a ConfigError if both `topk` and `topp` are set, or if a setting is impossible.

    Args:
      inputs: the prompts, int32 [batch, length], shifted right; 0 where no token is given.
      cache: the cache of the model.
      tokens_to_logits: the function DecodingState -> logits, cache.
      eos_id: the token that ends a sequence.
      decode_rng: the random key; by default, the key of seed 0.
      num_decodes: the number of sequences per row.
      temperature: the temperature of the softmax, one number or one per row.
      topk: only the `topk` most likely tokens are sampled. 0 allows all.
      topp: only the most likely tokens whose probabilities add up to `topp` are sampled.
      cache_offset: the number of dimensions before the rows in cached arrays, 1 for scanned layers.
      initial_index: the place of the first token that the model reads, int32 [batch].
      max_decode_steps: the largest number of tokens after the prompt.
      max_decode_steps_hard_limit: the largest value of `max_decode_steps`.
      rescale_log_probs: whether scores belong to the distribution that is sampled from.
      state_callback_fn: changes the state before each step.
      logit_callback_fn: changes the logits before each choice.

    Returns:
      Tokens int32 [batch, num_decodes, length] and scores [batch, num_decodes], the best one last.
    """
    if topk and topp:
        raise ConfigError(
            f'decoding.temperature_sample.topk is {topk} and topp is {topp}: write topk = 0 to use '
            'topp'
        )
    if max_decode_steps is not None and max_decode_steps_hard_limit:
        max_decode_steps = jnp.minimum(max_decode_steps, max_decode_steps_hard_limit)
    return sample(
        tokens_to_logits,
        cache,
        inputs,
        cache_axes=row_axes(cache, cache_offset, initial_index is not None),
        end_token=eos_id,
        num_decodes=num_decodes,
        key=decode_rng,
        start_index_B=initial_index,
        temperature=temperature,
        top_k=topk,
        top_p=topp,
        max_new_tokens=max_decode_steps,
        rescale_log_probs=rescale_log_probs,
        process_logits=logit_callback_fn,
        process_state=state_callback_fn,
    )


def beam_search(
    inputs: jax.Array,
    cache: Any,
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int = 4,
    alpha: float = 0.6,
    max_decode_len: int | None = None,
    decode_rng: jax.Array | None = None,
    cache_offset: int = 0,
    initial_index: jax.Array | None = None,
) -> Decoded:
    """Searches for the most likely sequences; see `train.decoding.beam_search`.

    Args:
      inputs, cache, tokens_to_logits, cache_offset, initial_index: as in `temperature_sample`.
      eos_id: the token that ends a sequence.
      num_decodes: the number of beams per row.
      alpha: the exponent of the penalty for short sequences.
      max_decode_len: the number of tokens to decode, by default the length of `inputs`.
      decode_rng: is not used.

    Returns:
      Tokens int32 [batch, num_decodes, length] and scores [batch, num_decodes], the best one last.
    """
    if max_decode_len is not None:
        longer = max(max_decode_len - inputs.shape[1], 0)
        inputs = jnp.pad(inputs, ((0, 0), (0, longer)))[:, :max_decode_len]
    return search_beams(
        tokens_to_logits,
        cache,
        inputs,
        cache_axes=row_axes(cache, cache_offset, initial_index is not None),
        end_token=eos_id,
        num_decodes=num_decodes,
        key=decode_rng,
        start_index_B=initial_index,
        alpha=alpha,
    )


def row_axes(cache: Any, cache_offset: int, is_prefilled: bool) -> Any:
    """The row dimension of each array of a cache of T5X's networks."""

    def axis(path: Any, _: Any) -> int:
        name = getattr(path[-1], 'key', '')
        has_rows = name != _SHARED and (name != _INDEX or is_prefilled)
        return cache_offset if has_rows else NO_ROWS

    return jax.tree_util.tree_map_with_path(axis, cache)


def as_search(decode_fn: Callable[..., Any], **decoder_params: Any) -> Search:
    """Makes a search of a decoding function with T5X's parameters, also of a user's own.

    Args:
      decode_fn: such as `temperature_sample`.
      decoder_params: more arguments for it, which override the arguments of the search.
    """

    def search(
        tokens_to_logits: TokensToLogits,
        cache: Any,
        prompts_BT: jax.Array,
        *,
        cache_axes: Any,
        end_token: int | None,
        num_decodes: int,
        key: jax.Array | None,
        start_index_B: jax.Array | None,
    ) -> Decoded:
        axes = [axis for axis in jax.tree.leaves(cache_axes) if axis != NO_ROWS]
        given = {
            'inputs': prompts_BT,
            'cache': cache,
            'tokens_to_logits': tokens_to_logits,
            'num_decodes': num_decodes,
            'cache_offset': min(axes, default=0),
            'eos_id': end_token,
            'decode_rng': key,
        }
        if start_index_B is not None:
            given['initial_index'] = start_index_B
        return Decoded(*decode_fn(**given | decoder_params))

    return search
