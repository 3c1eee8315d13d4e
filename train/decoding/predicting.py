"""Predicts the targets of a batch with any objective that can decode."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from train.decoding.interface import Search
from train.decoding.sampling import sample
from train.decoding.starting import Batch, Start
from train.errors import ConfigError, check_counts

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
      params: its parameters.
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
