"""Temperature sampling, greedy decoding, and the choice of one token.

Suffixes of array names: see `interface`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from train.decoding.interface import (
    NEGATIVE,
    Cache,
    Decoded,
    DecodingState,
    TokensToLogits,
    at,
    first_index,
    first_sequences,
    put,
    tile,
    tile_cache,
)
from train.errors import check_counts, check_number

# Lower temperatures decode greedily: the logits divided by them would overflow.
LEAST_TEMPERATURE = 1e-4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState(DecodingState):
    """The state of the loop.

    Attributes:
      step: the number of steps so far, an int32 scalar.
      ended: whether a sequence has its end token, bool [batch * num_decodes].
      log_prob: the sum of the log-probabilities, float32 [batch * num_decodes].
      rng: the random key of the steps to come.
    """

    step: jax.Array
    ended: jax.Array
    log_prob: jax.Array
    rng: jax.Array


def sample(
    tokens_to_logits: TokensToLogits,
    cache: Cache,
    prompts_BT: jax.Array,
    *,
    cache_axes: Any,
    end_token: int | None = None,
    num_decodes: int = 1,
    key: jax.Array | None = None,
    start_index_B: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    max_new_tokens: int | jax.Array | None = None,
    rescale_log_probs: bool = True,
    process_logits: Callable[[jax.Array, SamplingState], jax.Array] | None = None,
    process_state: Callable[[SamplingState], SamplingState] | None = None,
) -> Decoded:
    """Samples sequences token by token. For the other arguments, see `Search`.

    Tokens that the prompts give are forced, and do not count towards the scores.

    Args:
      temperature: the temperature of the softmax, a number or one per row, float [batch]. Below
        1e-4, the most likely token is taken.
      top_k: only the `top_k` most likely tokens are sampled. 0 allows all.
      top_p: only the most likely tokens whose probabilities add up to `top_p` are sampled. 0 allows
        all.
      max_new_tokens: the largest number of tokens after the prompt; by default, up to the length.
      rescale_log_probs: whether scores are log-probabilities under the distribution that is sampled
        from, after temperature, `top_k` and `top_p`. Then greedy sequences have the score 0. If
        False, they are the log-probabilities of the model.
      process_logits: changes the logits before each choice.
      process_state: changes the state before each step.

    Returns:
      The sequences of each row, sorted by their scores, which are sums of log-probabilities.

    Raises:
      ConfigError: if a setting is impossible.
    """
    check_sampling(temperature, top_k, top_p)
    check_counts(num_decodes=num_decodes)
    length, tiled = prompts_BT.shape[1], lambda x: tile(x, num_decodes)
    given_BT = first_sequences(prompts_BT, start_index_B)
    start_B = first_index(prompts_BT, start_index_B)
    last_B = jnp.full_like(start_B, length)
    if max_new_tokens is not None:
        prompt_B = start_B
        if start_index_B is None:
            prompt_B = jnp.sum(given_BT != 0, axis=1, dtype=jnp.int32)
        last_B = jnp.minimum(prompt_B + max_new_tokens, length)
    last_N = tiled(last_B)  # the place of the last token
    given_NT = tiled(given_BT)
    if isinstance(temperature, jax.Array) and temperature.ndim:
        temperature = tiled(temperature)[:, None]

    def step(state: SamplingState) -> SamplingState:
        if process_state is not None:
            state = process_state(state)
        logits_NV, cache = tokens_to_logits(state)
        if process_logits is not None:
            logits_NV = process_logits(logits_NV, state)
        choice_key, rng = jax.random.split(state.rng)
        chosen_N, log_prob_N = choose(
            choice_key, logits_NV, temperature, top_k, top_p, rescale_log_probs
        )
        changed = dataclasses.replace(state, step=state.step + 1, cache=cache, rng=rng)
        return _append(changed, given_NT, last_N, chosen_N, log_prob_N, end_token)

    first = _first_state(given_NT, tiled(start_B), tile_cache(cache, cache_axes, num_decodes), key)
    last = jax.lax.while_loop(lambda state: jnp.any(_is_open(state, last_N)), step, first)
    return _sort_by_score(last, num_decodes)


def _is_open(state: SamplingState, last_N: jax.Array) -> jax.Array:
    return (state.cur_index < last_N) & ~state.ended


def _append(
    state: SamplingState,
    given_NT: jax.Array,
    last_N: jax.Array,
    chosen_N: jax.Array,
    log_prob_N: jax.Array,
    end_token: int | None,
) -> SamplingState:
    """Appends the chosen tokens, or those that the prompts give. Rows that have ended wait."""
    index_N = jnp.minimum(state.cur_index + 1, given_NT.shape[1] - 1)
    forced_N = at(given_NT, index_N)[:, 0]
    is_free_N = forced_N == 0
    counts_N = _is_open(state, last_N) & is_free_N
    token_N = jnp.where(is_free_N, jnp.where(state.ended, 0, chosen_N), forced_N)
    ended_N = state.ended
    if end_token is not None:
        ended_N |= counts_N & (chosen_N == end_token)
    return dataclasses.replace(
        state,
        cur_index=jnp.where(state.cur_index < last_N, index_N, state.cur_index),
        cur_token=token_N[:, None],
        sequences=put(state.sequences, index_N, token_N, counts_N),
        ended=ended_N,
        log_prob=state.log_prob + jnp.where(counts_N, log_prob_N, 0.0),
    )


def _first_state(
    given_NT: jax.Array, start_N: jax.Array, cache: Cache, key: jax.Array | None
) -> SamplingState:
    return SamplingState(
        step=jnp.int32(0),
        cur_index=start_N,
        cur_token=at(given_NT, start_N),
        sequences=given_NT,
        cache=cache,
        ended=jnp.zeros(given_NT.shape[0], bool),
        log_prob=jnp.zeros(given_NT.shape[0], jnp.float32),
        rng=jax.random.PRNGKey(0) if key is None else key,
    )


def _sort_by_score(state: SamplingState, num_decodes: int) -> Decoded:
    """The sequences of each row in the order of their scores, the best one last."""
    places = state.sequences.shape[1]
    tokens_BKT = state.sequences[:, 1:].reshape(-1, num_decodes, places - 1)
    scores_BK = state.log_prob.reshape(-1, num_decodes)
    order_BK = jnp.argsort(scores_BK, axis=1)
    return Decoded(
        jnp.take_along_axis(tokens_BKT, order_BK[:, :, None], axis=1),
        jnp.take_along_axis(scores_BK, order_BK, axis=1),
    )


def choose(
    key: jax.Array,
    logits_NV: jax.Array,
    temperature: float | jax.Array,
    top_k: int = 0,
    top_p: float = 0.0,
    rescale_log_probs: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Chooses tokens, int32 [rows], and returns them and their log-probabilities, float32 [rows].

    Args:
      logits_NV: the logits, float [rows, vocab].
      temperature: see `sample`; a number, or float [rows, 1].
      top_k, top_p, rescale_log_probs: see `sample`.
    """

    def log_prob(logits_NV: jax.Array, token_N: jax.Array) -> jax.Array:
        return at(jax.nn.log_softmax(logits_NV), token_N)[:, 0]

    def greedy() -> tuple[jax.Array, jax.Array]:
        token_N = jnp.argmax(logits_NV, axis=-1).astype(jnp.int32)
        zeros = jnp.zeros(token_N.shape, logits_NV.dtype)
        return token_N, zeros if rescale_log_probs else log_prob(logits_NV, token_N)

    def sampled() -> tuple[jax.Array, jax.Array]:
        scaled_NV = logits_NV / jnp.maximum(temperature, LEAST_TEMPERATURE)
        scaled_NV = keep_top_p(keep_top_k(scaled_NV, top_k), top_p)
        token_N = jax.random.categorical(key, scaled_NV).astype(jnp.int32)
        return token_N, log_prob(scaled_NV if rescale_log_probs else logits_NV, token_N)

    if not isinstance(temperature, jax.Array):
        return greedy() if temperature < LEAST_TEMPERATURE else sampled()
    if not temperature.ndim:
        return jax.lax.cond(temperature < LEAST_TEMPERATURE, greedy, sampled)
    is_greedy_N = temperature[:, 0] < LEAST_TEMPERATURE
    return jax.tree.map(lambda a, b: jnp.where(is_greedy_N, a, b), greedy(), sampled())


def keep_top_k(logits_NV: jax.Array, top_k: int) -> jax.Array:
    """Masks all but the `top_k` greatest logits, and those that equal the least of them."""
    if not top_k or top_k >= logits_NV.shape[-1]:
        return logits_NV
    least_N1 = jax.lax.top_k(logits_NV, top_k)[0][:, -1:]
    return jnp.where(logits_NV < least_N1, NEGATIVE, logits_NV)


def keep_top_p(logits_NV: jax.Array, top_p: float) -> jax.Array:
    """Masks all but the fewest most likely tokens whose probabilities add up to `top_p`."""
    if not top_p:
        return logits_NV
    sorted_NV = jnp.flip(jnp.sort(logits_NV, axis=-1), axis=-1)
    probs_NV = jax.nn.softmax(sorted_NV)
    # A token is needed if those before it do not reach the sum.
    is_needed_NV = jnp.cumsum(probs_NV, axis=-1) - probs_NV < top_p
    least_N1 = jnp.min(jnp.where(is_needed_NV, sorted_NV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_NV < least_N1, NEGATIVE, logits_NV)


def check_sampling(temperature: Any, top_k: int, top_p: float) -> None:
    """Checks the settings of sampling."""
    if not isinstance(temperature, jax.Array):
        check_number('temperature', temperature, '[0, inf]')
    check_counts(0, top_k=top_k)
    check_number('top_p', top_p, '[0, 1]')
