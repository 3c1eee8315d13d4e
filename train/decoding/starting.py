"""Predicts a batch with any objective that can decode: fills its cache, and makes its steps.

Suffixes of array names: see `interface`; S length of the encoder, E embed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.decoding.interface import (
    NO_ROWS,
    Cache,
    DecodingState,
    Search,
    TokensToLogits,
    find_row_axes,
    tile,
)
from train.decoding.sampling import sample
from train.errors import ConfigError, check_counts

Batch = Mapping[str, jax.Array]

# The logical axes of cached arrays, after the dimension of scanned layers. Others have only rows.
_NAMES = dict.fromkeys(('cached_key', 'cached_value'), ('batch', 'heads', 'kv', None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a search needs to decode a batch.

    Attributes:
      make_step: the function num_decodes -> the model's decoding step.
      cache_axes: the row dimension of each array of the cache; see `find_row_axes`.
      prompts_BT, start_index_B: see `Search`.
      finish: takes the decoded tokens [batch, num_decodes, length] to those to return.
    """

    make_step: Callable[[int], TokensToLogits]
    cache: Cache
    cache_axes: Any
    prompts_BT: jax.Array
    start_index_B: jax.Array | None = None
    finish: Callable[[jax.Array], jax.Array] = lambda tokens: tokens


def start_encoder_decoder(
    model: Any,
    variables: Mapping[str, Any],
    batch: Batch,
    *,
    prompt_with_targets: bool = False,
    end_token: int | None = None,
) -> Start:
    """Encodes the inputs of a batch, once for all decodes, and creates an empty cache.

    Args:
      model: a linen module with the methods `encode` and `decode` of `train.models.t5.T5`.
      variables: its variables, without the cache.
      batch: 'encoder_input_tokens' [batch, input length] and 'decoder_input_tokens' [batch,
        length], the targets shifted right. `length` tokens are decoded.
      prompt_with_targets: whether the targets of the batch are forced and only continued.
      end_token: the token that is removed from the prompts.

    Raises:
      ConfigError: if rows are packed.
    """
    _check_unpacked(batch)
    inputs_BS, given_BT = batch['encoder_input_tokens'], batch['decoder_input_tokens']
    encoded_BSE = model.apply(variables, inputs_BS, deterministic=True, method='encode')

    def make_cache(encoded_BSE: jax.Array, inputs_BS: jax.Array, given_BT: jax.Array) -> Cache:
        ones = jnp.ones_like(given_BT)
        options = {'deterministic': True, 'decode': True, 'method': 'decode', 'mutable': ['cache']}
        return model.apply(variables, encoded_BSE, inputs_BS, ones, ones, **options)[1]['cache']

    def make_step(num_decodes: int) -> TokensToLogits:
        encoder = (tile(encoded_BSE, num_decodes), tile(inputs_BS, num_decodes))
        return _make_step(model, variables, given_BT.shape[1], *encoder, method='decode')

    cache, axes = _make_cache(make_cache, encoded_BSE, inputs_BS, given_BT)
    prompts_BT = jnp.zeros_like(given_BT)
    if prompt_with_targets:
        prompts_BT = jnp.where(given_BT == end_token, 0, given_BT)
    return Start(make_step=make_step, cache=cache, cache_axes=axes, prompts_BT=prompts_BT)


def start_decoder_only(
    model: Any,
    variables: Mapping[str, Any],
    batch: Batch,
    *,
    bidirectional_prefix: bool = True,
    prompt_with_targets: bool = False,
    end_token: int | None = None,
) -> Start:
    """Fills a cache with the prefix of each row, in one call of the model.

    Args:
      model: a linen module that is called like `train.models.t5.DecoderOnly`.
      variables: its variables, without the cache.
      batch: 'decoder_input_tokens' [batch, length], the prefix and the targets shifted right, and
        'decoder_causal_attention', 1 in the prefix and at the first target.
      bidirectional_prefix: whether positions of the prefix see each other in both directions.
      prompt_with_targets: must be False, because the prefix is the prompt.
      end_token: is not used.

    Returns:
      The start. Its `finish` removes the prefix: it moves each row to the left, and fills it up
      with zeros.

    Raises:
      ConfigError: if rows are packed or have no prefix, or if `prompt_with_targets` is set.
    """
    del end_token
    _check_unpacked(batch)
    if prompt_with_targets:
        raise ConfigError(
            'prompt_with_targets is True, but a decoder-only model continues the prefix of a row: '
            'leave it out, and write the prompt at the end of the inputs'
        )
    if 'decoder_causal_attention' not in batch:
        raise ConfigError(
            "the rows have no 'decoder_causal_attention', which says where their prefix ends: use "
            'a task with inputs and targets'
        )
    prefix_BT = batch['decoder_causal_attention']
    inputs_BT = batch['decoder_input_tokens'] * prefix_BT
    length_B = jnp.sum(inputs_BT[:, 1:] != 0, axis=1, dtype=jnp.int32)

    def make_cache(inputs_BT: jax.Array, prefix_BT: jax.Array, length_B: jax.Array) -> Cache:
        ones = jnp.ones_like(inputs_BT)
        options = {'deterministic': True, 'mutable': ['cache']}
        empty = model.apply(variables, ones, ones, decode=True, **options)[1]['cache']
        # With the prefix as targets, the mask covers the first position, whose token is 0, too.
        filled = model.apply(
            {**variables, 'cache': empty},
            inputs_BT,
            prefix_BT,
            decoder_causal_attention=prefix_BT if bidirectional_prefix else None,
            prefill=True,
            prefill_lengths=length_B,
            **options,
        )
        return filled[1]['cache']

    def make_step(num_decodes: int) -> TokensToLogits:
        return _make_step(model, variables, inputs_BT.shape[1])

    cache, axes = _make_cache(make_cache, inputs_BT, prefix_BT, length_B)
    return Start(
        make_step=make_step,
        cache=cache,
        cache_axes=axes,
        prompts_BT=inputs_BT,
        start_index_B=length_B,
        finish=lambda tokens: _shift_left(tokens, length_B),
    )


def _make_cache(make_cache: Callable[..., Cache], *arguments: jax.Array) -> tuple[Cache, Any]:
    """Returns a cache, laid out by the logical axes of its arrays, and its row dimensions.

    Dimensions that the mesh does not divide are replicated.
    """

    def place(path: Any, x: jax.Array, axis: int) -> jax.Array:
        if axis == NO_ROWS:
            return x
        names = _NAMES.get(getattr(path[-1], 'key', ''), ('batch',))
        names = (*[None] * axis, *names, *[None] * x.ndim)[: x.ndim]
        return constrain(x, names, on_indivisible='replicate')

    axes = find_row_axes(make_cache, *arguments)
    return jax.tree_util.tree_map_with_path(place, make_cache(*arguments), axes), axes


def _shift_left(tokens_BKT: jax.Array, by_B: jax.Array) -> jax.Array:
    """Moves each row to the left, and fills it up with zeros."""
    length = tokens_BKT.shape[2]
    places_BT = jnp.arange(length) + by_B[:, None]
    moved = jnp.take_along_axis(tokens_BKT, jnp.minimum(places_BT, length - 1)[:, None], axis=2)
    return jnp.where(places_BT[:, None] < length, moved, 0)


def _check_unpacked(batch: Batch) -> None:
    packed = sorted(name for name in batch if name.endswith('segment_ids'))
    if packed:
        raise ConfigError(
            f'the rows have {", ".join(packed)}: packed rows cannot be decoded; write pack = False'
        )


def _make_step(
    model: Any,
    variables: Mapping[str, Any],
    length: int,
    *before: jax.Array,
    method: str | None = None,
) -> TokensToLogits:
    """The model's side of a step: one token for each row of a cache of `length` places.

    The method of the model gets the arguments `before` and then the tokens.
    """

    def step(state: DecodingState) -> tuple[jax.Array, Cache]:
        logits, changed = model.apply(
            {**variables, 'cache': state.cache},
            *(*before, state.cur_token, state.cur_token),
            deterministic=True,
            decode=True,
            max_decode_length=length,
            method=method,
            mutable=['cache'],
        )
        return logits[:, 0], changed['cache']

    return step


# Always takes the most likely token.
greedy: Search = functools.partial(sample, temperature=0.0)


@runtime_checkable
class CanDecode(Protocol):
    """An objective whose model decodes with a cache."""

    def start_decoding(
        self,
        variables: Mapping[str, Any],
        batch: Batch,
        *,
        prompt_with_targets: bool,
        end_token: int | None,
    ) -> Start:
        """Starts the decoding of a batch, see `start_encoder_decoder`."""


class Predictions(NamedTuple):
    """The predictions of a batch.

    Attributes:
      tokens: int32 [batch, length], with the end token, and zeros after it. With all decodes,
        [batch, num_decodes, length], the best one last.
      scores: float32 [batch], or [batch, num_decodes].
    """

    tokens: jax.Array
    scores: jax.Array


def predict(
    objective: Any,
    params: Any,
    batch: Batch,
    rng: jax.Array | None = None,
    *,
    decode_fn: Search = greedy,
    num_decodes: int = 1,
    return_all_decodes: bool = False,
    prompt_with_targets: bool = False,
    end_token: int | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Predictions:
    """Decodes the targets of each row of a batch. It is a pure function, to be compiled.

    Args:
      objective: an objective with a method `start_decoding`, such as `EncoderDecoder`.
      batch: the arrays of the batch. Only the inputs count, and the length of the targets.
      rng: the random key of sampling. None uses seed 0.
      decode_fn: the search: `sample` or `beam_search`, with settings of `functools.partial`. By
        default, the most likely token is always taken.
      num_decodes: the number of sequences per row.
      return_all_decodes: whether all of them are returned, or only the best one.
      prompt_with_targets: whether the targets of the batch are forced and only continued.
      end_token: the token that ends a sequence.
      variables: the other variables of the model.

    Raises:
      ConfigError: if the objective cannot decode, or if a setting is impossible.
    """
    check_counts(num_decodes=num_decodes)
    check_can_decode(objective)
    start = objective.start_decoding(
        {**(variables or {}), 'params': params},
        batch,
        prompt_with_targets=prompt_with_targets,
        end_token=end_token,
    )
    decoded = decode_fn(
        start.make_step(num_decodes),
        start.cache,
        start.prompts_BT,
        cache_axes=start.cache_axes,
        end_token=end_token,
        num_decodes=num_decodes,
        key=rng,
        start_index_B=start.start_index_B,
    )
    tokens, scores = start.finish(decoded.tokens), decoded.scores
    if return_all_decodes:
        return Predictions(tokens, scores)
    return Predictions(tokens[:, -1], scores[:, -1])


def check_can_decode(objective: Any) -> None:
    """Checks that an objective has a model that decodes. Raises a ConfigError if it does not."""
    if not isinstance(objective, CanDecode):
        raise ConfigError(
            f'{type(objective).__name__} cannot predict targets: use the objective EncoderDecoder '
            'or PrefixLanguageModel, or add a method start_decoding to your own'
        )
