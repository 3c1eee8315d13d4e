"""The interface of searches, and the caches of keys and values that they change.

A cache is any pytree of arrays. Its `axes` is a tree of the same structure that gives, for each
array, the dimension of the rows, or `NO_ROWS` if all rows share the array.

Suffixes of array names: B batch, K decodes (or beams) of a row, N = B * K with the decodes of a row
next to each other, T tokens, V vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

NO_ROWS = -1
Cache = Any


def find_row_axes(make_cache: Callable[..., Cache], *arguments: Any) -> Any:
    """Finds which dimension of each array of a cache holds the rows.

    The function is traced for batches of two sizes, and nothing is computed: the dimension that
    grows with the batch holds the rows.

    Args:
      make_cache: the function that returns the cache of a batch.
      arguments: pytrees of arrays, each [batch, ...], or of their ShapeDtypeStructs.

    Returns:
      The dimension of each array, or `NO_ROWS`; a tree with the structure of the cache.

    Raises:
      ValueError: if several dimensions of an array depend on the size of the batch.
    """

    def trace(times: int) -> Any:  # a multiple, because the mesh divides the rows
        resized = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] * times, *x.shape[1:]), x.dtype), arguments
        )
        return jax.eval_shape(make_cache, *resized)

    def axis(small: Any, large: Any) -> int:
        sizes = zip(small.shape, large.shape, strict=True)
        grown = [i for i, (a, b) in enumerate(sizes) if a != b]
        if len(grown) > 1:
            raise ValueError(
                f'a cached array is {small.shape} for one batch and {large.shape} for one of twice '
                'the size: only one dimension may hold the rows'
            )
        return grown[0] if grown else NO_ROWS

    return jax.tree.map(axis, trace(1), trace(2))


def tile(x: jax.Array, num_decodes: int, axis: int = 0) -> jax.Array:
    """Repeats each row, so that the decodes of a row follow one another.

    Unlike `jnp.repeat`, which gathers, it keeps the sharding of the rows. `axis` is the dimension
    of the rows, or `NO_ROWS` to return the array as it is.
    """
    if num_decodes == 1 or axis == NO_ROWS:
        return x
    shape = (*x.shape[: axis + 1], num_decodes, *x.shape[axis + 1 :])
    return _merge(jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape), axis)


def tile_cache(cache: Cache, axes: Any, num_decodes: int) -> Cache:
    """Repeats the rows of every array of a cache; see `tile`."""
    return jax.tree.map(lambda x, axis: tile(x, num_decodes, axis), cache, axes)


def select_beams(cache: Cache, axes: Any, beams_BK: jax.Array) -> Cache:
    """Makes the cache of new beams from the cache of the beams that they continue.

    For each new beam, `beams_BK` has the index of the old beam in the row.
    """
    batch, num_beams = beams_BK.shape

    def select(x: jax.Array, axis: int) -> jax.Array:
        if axis == NO_ROWS:
            return x
        split = x.reshape(*x.shape[:axis], batch, num_beams, *x.shape[axis + 1 :])
        take = jax.vmap(lambda row, beams: jnp.take(row, beams, axis=axis), (axis, 0), axis)
        return _merge(take(split, beams_BK), axis)

    return jax.tree.map(select, cache, axes)


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Joins a dimension with the next one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


# Stands for a log-probability of minus infinity. Unlike infinity, it can be added and compared.
NEGATIVE = -1.0e7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingState:
    """What a model may read to compute the logits of the next tokens.

    Attributes:
      cur_index: the place of the current token, int32 [batch * num_decodes].
      cur_token: the current token, int32 [batch * num_decodes, 1].
      sequences: all tokens so far, int32 [batch * num_decodes, length + 1]. Place 0 holds the token
        that starts a sequence.
      cache: the keys and values of earlier tokens.
    """

    cur_index: jax.Array
    cur_token: jax.Array
    sequences: jax.Array
    cache: Cache


# Returns the logits of the next tokens, float [batch * num_decodes, vocab], and the cache with the
# keys and values of the current token.
TokensToLogits = Callable[[DecodingState], tuple[jax.Array, Cache]]


class Decoded(NamedTuple):
    """Decoded sequences, the best one of each row last.

    Attributes:
      tokens: int32 [batch, num_decodes, length], without the token that starts a sequence, with the
        end token, and zeros after it.
      scores: float32 [batch, num_decodes].
    """

    tokens: jax.Array
    scores: jax.Array


class Search(Protocol):
    """The signature of functions that decode a batch, such as `sample` and `beam_search`."""

    def __call__(
        self,
        tokens_to_logits: TokensToLogits,
        cache: Cache,
        prompts_BT: jax.Array,
        *,
        cache_axes: Any,
        end_token: int | None,
        num_decodes: int,
        key: jax.Array | None,
        start_index_B: jax.Array | None,
    ) -> Decoded:
        """Decodes each row of a batch.

        Args:
          cache: the cache of `batch` rows.
          prompts_BT: int32 [batch, length]. Place i is the input of the model that predicts the
            token i + 1, and 0 where it is not given. `length` is the number of tokens to decode,
            with the prompt.
          cache_axes: the row dimension of each array of the cache; see `find_row_axes`.
          end_token: the token that ends a sequence. None ends it only at the length.
          num_decodes: the number of sequences per row.
          key: the random key. None uses seed 0.
          start_index_B: the place of the first token that the model reads, int32 [batch]. The cache
            already holds the tokens before it. None starts at place 0, with the token 0.
        """


def first_index(prompts_BT: jax.Array, start_index_B: jax.Array | None) -> jax.Array:
    """The place where each row starts, int32 [batch]."""
    if start_index_B is None:
        return jnp.zeros(prompts_BT.shape[0], jnp.int32)
    return start_index_B.astype(jnp.int32)


def first_sequences(prompts_BT: jax.Array, start_index_B: jax.Array | None) -> jax.Array:
    """The sequences before the first step, int32 [batch, length + 1].

    There is one place more than inputs, for the token that the last input predicts.
    """
    sequences = jnp.pad(prompts_BT.astype(jnp.int32), ((0, 0), (0, 1)))
    return sequences.at[:, 0].set(0) if start_index_B is None else sequences


def at(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the element of each row at its index: [N, T], [N] -> [N, 1]."""
    return jnp.take_along_axis(x, index[:, None], axis=1)


def put(x: jax.Array, index: jax.Array, value: jax.Array, where: jax.Array) -> jax.Array:
    """Sets the element of each row at its index, if `where`: [N, T], [N], [N], [N] -> [N, T]."""
    is_place = (jnp.arange(x.shape[1]) == index[:, None]) & where[:, None]
    return jnp.where(is_place, value[:, None], x)
