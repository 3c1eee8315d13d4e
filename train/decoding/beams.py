"""Beam search: the most likely sequences, with a penalty for short ones.

Suffixes of array names: see `interface`. K is the number of beams; the beams of a row are sorted by
their log-probabilities, the best one last.
"""

from __future__ import annotations

import dataclasses
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
    select_beams,
    tile,
    tile_cache,
)
from train.errors import check_counts, check_number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _BeamState:
    """The state of the loop: live beams, which have no end token yet, and the best finished ones.

    A place for a finished sequence that is not filled yet has the score `NEGATIVE`.
    """

    index_B: jax.Array
    live_log_probs_BK: jax.Array
    live_BKT: jax.Array
    cache: Cache
    finished_scores_BK: jax.Array
    finished_BKT: jax.Array


def beam_search(
    tokens_to_logits: TokensToLogits,
    cache: Cache,
    prompts_BT: jax.Array,
    *,
    cache_axes: Any,
    end_token: int | None,
    num_decodes: int = 4,
    key: jax.Array | None = None,
    start_index_B: jax.Array | None = None,
    alpha: float = 0.6,
) -> Decoded:
    """Searches for the sequences with the best scores. For the other arguments, see `Search`.

    The score of a sequence of n tokens is log-probability / ((5 + n) / 6) ** alpha. n counts the
    prompt and the end token. Each step continues every live beam by every token and keeps the
    best 2 * num_decodes of all: even if half of them end, enough live beams remain.

    Args:
      num_decodes: the number of beams per row.
      key: is not used.
      alpha: the exponent of the penalty for short sequences. 0 compares log-probabilities.

    Returns:
      The finished sequences of each row, sorted by their scores. A place that no sequence fills has
      the score -1e7 and zeros. A row where nothing finishes has its live beams, with their
      log-probabilities as scores. As in T5X, a row that reaches the length before the others, from
      a later start, is continued until they do: its log-probabilities count tokens after its end.

    Raises:
      ConfigError: if a setting is impossible.
    """
    del key
    check_number('alpha', alpha, '[0, inf)')
    check_counts(num_decodes=num_decodes)
    (batch, length), beams = prompts_BT.shape, num_decodes
    # Rows that reach the length before others write to one more place, which is cut off.
    given_BT = jnp.pad(first_sequences(prompts_BT, start_index_B), ((0, 0), (0, 1)))

    def penalty(size: jax.Array | int) -> jax.Array:
        return jnp.power((5.0 + size) / 6.0, alpha)

    def is_searching(state: _BeamState) -> jax.Array:
        best_live_B = state.live_log_probs_BK[:, -1] / penalty(length + 1)
        can_improve_B = state.finished_scores_BK[:, 0] <= best_live_B
        return jnp.any(can_improve_B) & jnp.any(state.index_B < length)

    def step(state: _BeamState) -> _BeamState:
        index_B = state.index_B + 1
        logits_NV, cache = tokens_to_logits(_flat(state))
        log_probs_BKV = jax.nn.log_softmax(logits_NV).reshape(batch, beams, -1)
        place_B = jnp.minimum(index_B, length + 1)
        given_B1 = at(given_BT, place_B)
        log_probs_BC, token_BC, beams_BC = _best_continuations(state, log_probs_BKV, given_B1)
        is_place = jnp.arange(length + 2) == place_B[:, None, None]
        sequences_BCT = _take(state.live_BKT, beams_BC)
        sequences_BCT = jnp.where(is_place, token_BC[:, :, None], sequences_BCT)
        ends_BC = jnp.zeros(token_BC.shape, bool)
        if end_token is not None:
            ends_BC = (token_BC == end_token) & (given_B1 == 0)

        live_BK, live_log_probs_BK = _best(log_probs_BC + ends_BC * NEGATIVE, beams)
        scores_BC = log_probs_BC / penalty(index_B)[:, None] + ~ends_BC * NEGATIVE
        scores = jnp.concatenate([state.finished_scores_BK, scores_BC], axis=1)
        sequences = jnp.concatenate([state.finished_BKT, sequences_BCT], axis=1)
        finished_BK, finished_scores_BK = _best(scores, beams)
        old_beams_BK = jnp.take_along_axis(beams_BC, live_BK, axis=1)
        return _BeamState(
            index_B=index_B,
            cache=select_beams(cache, cache_axes, old_beams_BK),
            live_log_probs_BK=live_log_probs_BK,
            live_BKT=_take(sequences_BCT, live_BK),
            finished_scores_BK=finished_scores_BK,
            finished_BKT=_take(sequences, finished_BK),
        )

    start_B, cache = first_index(prompts_BT, start_index_B), tile_cache(cache, cache_axes, beams)
    first = _first_state(given_BT, start_B, cache, beams)
    return _finish(jax.lax.while_loop(is_searching, step, first))


def _finish(state: _BeamState) -> Decoded:
    any_finished_B1 = state.finished_scores_BK[:, -1:] > NEGATIVE
    return Decoded(
        jnp.where(any_finished_B1[:, :, None], state.finished_BKT, state.live_BKT)[:, :, 1:-1],
        jnp.where(any_finished_B1, state.finished_scores_BK, state.live_log_probs_BK),
    )


def _first_state(given_BT: jax.Array, index_B: jax.Array, cache: Cache, beams: int) -> _BeamState:
    """All beams of a row hold its prompt, and one of them is live: so they become different."""
    batch, places = given_BT.shape
    first_live = jnp.where(jnp.arange(beams) == beams - 1, 0.0, NEGATIVE)
    live_BKT = tile(given_BT, beams).reshape(batch, beams, places)
    return _BeamState(
        index_B=index_B,
        live_log_probs_BK=jnp.broadcast_to(first_live, (batch, beams)),
        live_BKT=live_BKT,
        cache=cache,
        finished_scores_BK=jnp.full((batch, beams), NEGATIVE, jnp.float32),
        finished_BKT=jnp.zeros_like(live_BKT),
    )


def _best_continuations(
    state: _BeamState, log_probs_BKV: jax.Array, given_B1: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The best 2K continuations of the live beams of each row (C of them), best first.

    Where a token is given, it is certain, and all others are impossible. Returns their
    log-probabilities, last tokens, and the beams that they continue, each [B, C].
    """
    batch, num_beams, vocab = log_probs_BKV.shape
    forced = jnp.where(jnp.arange(vocab) == given_B1[:, :, None], 0.0, NEGATIVE)
    log_probs_BKV = jnp.where(given_B1[:, :, None] == 0, log_probs_BKV, forced)
    total = (log_probs_BKV + state.live_log_probs_BK[:, :, None]).reshape(batch, -1)
    log_probs_BC, flat_BC = jax.lax.top_k(total, min(2 * num_beams, total.shape[1]))
    return log_probs_BC, flat_BC % vocab, flat_BC // vocab


def _best(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The indices and the values of the greatest scores of each row, the best one last."""
    values, indices = jax.lax.top_k(scores, count)
    return jnp.flip(indices, axis=1), jnp.flip(values, axis=1)


def _take(sequences: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take_along_axis(sequences, indices[:, :, None], axis=1)


def _flat(state: _BeamState) -> DecodingState:
    """What the model sees of the live beams."""
    _, beams, places = state.live_BKT.shape
    sequences, index = state.live_BKT.reshape(-1, places), tile(state.index_B, beams)
    return DecodingState(
        cur_index=index,
        cur_token=at(sequences, jnp.minimum(index, places - 1)),
        sequences=sequences,
        cache=state.cache,
    )
