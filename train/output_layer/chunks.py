"""Scores targets on one device and computes the gradients, one chunk of its vocabulary at a time.

Nothing here communicates. A device has a part of the whole vocabulary: column c of its weights
belongs to the token `first_token + c`.

Suffixes of array names: B batch, L length, D embed, V vocabulary of the device, C chunk of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partitioning.products.flops import computed_again
from train.errors import ConfigError
from train.output_layer.logits import finish, multiply

# The most bytes that the float32 logits of one chunk may take.
CHUNK_BYTES = 2**28
# TPUs pad the last dimension of an array to a multiple of this size.
LANES = 128
# Stands for the logit of a column that does not count.
LEAST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunking:
    """How the vocabulary of a device is divided, and how a chunk of logits is computed.

    All chunks have the same size. If it does not divide the vocabulary, the last chunk overlaps the
    one before it, and only the columns that are new in it count.

    Attributes:
      size: the number of columns in each chunk.
      vocab_size: the size of the whole vocabulary. Columns of tokens beyond it are padding.
      is_padded: whether any device has columns of padding.
      dtype: the dtype of the operands of matrix products.
      logits_dtype: the dtype in which products are stored.
      gradient_dtype: the dtype of the gradient of the weights.
      divisor: what the products are divided by.
      soft_cap: the bound of the logits, or None.
    """

    num_chunks: int
    size: int
    vocab_size: int
    is_padded: bool
    dtype: Any
    logits_dtype: Any
    gradient_dtype: Any
    divisor: float
    soft_cap: float | None


class Partial(NamedTuple):
    """The scores over a part of the vocabulary, each [batch, length].

    Attributes:
      exp_sum_BL: the sum of exp(logit - greatest).
      logit_BL: the logit of the target, or 0 if it is in another part.
      argmax_BL: the token of the greatest logit.
    """

    greatest_BL: jax.Array
    exp_sum_BL: jax.Array
    logit_BL: jax.Array
    logit_sum_BL: jax.Array
    argmax_BL: jax.Array


def choose_chunks(tokens: Any, columns: int, num_chunks: int | None) -> tuple[int, int]:
    """Returns the number of chunks, and their size in columns.

    Raises a ConfigError if there are fewer columns than chunks.

    Args:
      tokens: the number of tokens of the batch on a device.
      columns: the number of columns of the vocabulary on a device.
      num_chunks: the number of chunks. None chooses the smallest that respects `CHUNK_BYTES`.
    """
    is_free = num_chunks is None
    if num_chunks is None:
        most = CHUNK_BYTES // (4 * tokens) if isinstance(tokens, int) else columns
        if most >= columns:
            return 1, columns
        num_chunks = -(-columns // (max(most // LANES, 1) * LANES))
    if num_chunks > columns:
        raise ConfigError(
            f'OutputSettings.num_chunks is {num_chunks}, but a device has {columns} columns of '
            f'the vocabulary: use at most {columns}'
        )
    size = -(-columns // num_chunks)
    # TPUs copy a chunk unless it fills whole vector registers.
    size = -(-size // LANES) * LANES if is_free or size > LANES else size
    return -(-columns // size), min(size, columns)


def score_chunks(
    c: Chunking, x_BLD: jax.Array, w_DV: jax.Array, targets_BL: jax.Array, first_token: Any
) -> tuple[Partial, jax.Array | None]:
    """Scores targets over the part of the vocabulary on this device.

    Returns the scores; and the logits, float32 [batch, length, vocab], if there is only one chunk.
    """
    shape = targets_BL.shape
    zeros = jnp.zeros(shape, jnp.float32)
    before = Partial(
        jnp.full(shape, LEAST), zeros, zeros, zeros, jnp.zeros(shape, jnp.int32) + first_token
    )

    def add(before: Partial, index: Any) -> tuple[Partial, jax.Array]:
        chunk = _take(c, w_DV, index, first_token)
        logits_BLC = _logits(c, x_BLD, chunk)
        kept_BLC = chunk.keep(logits_BLC, LEAST)
        logits_BLC = chunk.keep(logits_BLC, 0.0)
        greatest_BL = jnp.max(kept_BLC, axis=-1)
        argmax_BL = chunk.tokens_C[0] + jnp.argmax(kept_BLC, axis=-1).astype(jnp.int32)
        # Later chunks have later tokens. If logits are equal, the earliest token wins.
        is_new_BL = greatest_BL > before.greatest_BL
        greatest_BL = jnp.maximum(greatest_BL, before.greatest_BL)
        exp_sum_BL = before.exp_sum_BL * jnp.exp(before.greatest_BL - greatest_BL)
        is_target_BLC = targets_BL[..., None] == chunk.tokens_C
        return Partial(
            greatest_BL,
            exp_sum_BL + jnp.sum(jnp.exp(kept_BLC - greatest_BL[..., None]), axis=-1),
            before.logit_BL + jnp.sum(jnp.where(is_target_BLC, logits_BLC, 0.0), axis=-1),
            before.logit_sum_BL + jnp.sum(logits_BLC, axis=-1),
            jnp.where(is_new_BL, argmax_BL, before.argmax_BL),
        ), logits_BLC

    if c.num_chunks == 1:
        return add(before, 0)
    steps = jnp.arange(c.num_chunks)
    return jax.lax.scan(lambda carry, i: (add(carry, i)[0], None), before, steps)[0], None


class Cotangents(NamedTuple):
    """The cotangents of the scores that can be differentiated, float32 [batch, length]."""

    log_z_BL: jax.Array
    logit_BL: jax.Array
    logit_sum_BL: jax.Array


def differentiate_chunks(
    c: Chunking,
    x_BLD: jax.Array,
    w_DV: jax.Array,
    targets_BL: jax.Array,
    log_z_BL: jax.Array,
    logits_BLV: jax.Array | None,
    cotangents: Cotangents,
    first_token: Any,
    reduce: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the hidden states and the weights on this device.

    Returns the gradient of the hidden states, float32, from this device's part of the vocabulary
    only; and the reduced gradient of the weights, in the dtype that `reduce` returns.

    Args:
      log_z_BL: the logarithms of the normalizers over the whole vocabulary.
      logits_BLV: the logits that `score_chunks` returned, or None to compute them again.
      reduce: sums the weight gradient of a chunk over devices: [embed, chunk] to [part of embed,
        chunk].
    """

    def one(index: Any) -> tuple[_Chunk, jax.Array, jax.Array]:
        chunk = _take(c, w_DV, index, first_token)
        logits_BLC = logits_BLV
        if logits_BLC is None:
            with computed_again():
                logits_BLC = _logits(c, x_BLD, chunk)
        d_BLC = cotangents.log_z_BL[..., None] * jnp.exp(logits_BLC - log_z_BL[..., None])
        is_target_BLC = targets_BL[..., None] == chunk.tokens_C
        d_BLC += jnp.where(is_target_BLC, cotangents.logit_BL[..., None], 0.0)
        d_BLC += cotangents.logit_sum_BL[..., None]
        if c.soft_cap is not None:
            d_BLC *= 1 - jnp.square(logits_BLC / c.soft_cap)
        d_BLC = (chunk.keep(d_BLC, 0.0) / c.divisor).astype(c.dtype)
        dx_BLD = jnp.einsum('BLC,DC->BLD', d_BLC, chunk.w_DC, preferred_element_type=jnp.float32)
        dw_DC = jnp.einsum('BLD,BLC->DC', x_BLD, d_BLC, preferred_element_type=c.gradient_dtype)
        return chunk, dx_BLD, reduce(dw_DC)

    if c.num_chunks == 1:
        return one(0)[1:]

    def add(grads: tuple[jax.Array, jax.Array], index: Any) -> tuple[Any, None]:
        chunk, dx_BLD, dw_DC = one(index)
        # Where the last chunk overlaps the one before it, its gradient is 0.
        dw_DC += jax.lax.dynamic_slice_in_dim(grads[1], chunk.start, c.size, axis=1)
        dw_DV = jax.lax.dynamic_update_slice_in_dim(grads[1], dw_DC, chunk.start, axis=1)
        return (grads[0] + dx_BLD, dw_DV), None

    shapes = jax.eval_shape(one, 0)[1:]
    zeros_DV = jnp.zeros((shapes[1].shape[0], w_DV.shape[1]), shapes[1].dtype)
    zeros_BLD = jnp.zeros(shapes[0].shape, shapes[0].dtype)
    return jax.lax.scan(add, (zeros_BLD, zeros_DV), jnp.arange(c.num_chunks))[0]


class _Chunk(NamedTuple):
    """A chunk: its weights, first column, tokens, and which tokens count (None counts all)."""

    w_DC: jax.Array
    start: Any
    tokens_C: jax.Array
    counts_C: jax.Array | None

    def keep(self, values_BLC: jax.Array, other: float) -> jax.Array:
        """Replaces the values of columns that do not count by `other`."""
        return values_BLC if self.counts_C is None else jnp.where(self.counts_C, values_BLC, other)


def _take(c: Chunking, w_DV: jax.Array, index: Any, first_token: Any) -> _Chunk:
    columns, start, w_DC = w_DV.shape[1], jnp.int32(0), w_DV
    if c.num_chunks > 1:
        start = jnp.minimum(index * c.size, columns - c.size)
        w_DC = jax.lax.dynamic_slice_in_dim(w_DV, start, c.size, axis=1)
    column_C = start + jnp.arange(c.size, dtype=jnp.int32)
    tokens_C = first_token + column_C
    if c.num_chunks * c.size == columns and not c.is_padded:
        return _Chunk(w_DC, start, tokens_C, None)
    return _Chunk(w_DC, start, tokens_C, (column_C >= index * c.size) & (tokens_C < c.vocab_size))


def _logits(c: Chunking, x_BLD: jax.Array, chunk: _Chunk) -> jax.Array:
    products_BLC = multiply(x_BLD, chunk.w_DC, c.dtype, c.logits_dtype)
    return finish(products_BLC, c.divisor, c.soft_cap)
