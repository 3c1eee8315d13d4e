"""The parts of T5's networks, except attention: parameters have T5X's paths, shapes and names.

Suffixes of array names: B batch, L length, E embed, M mlp, V vocab, H heads,
D distances, N buckets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from partitioning.products import multiply
from train.models.elementary import look_up
from train.models.experts import ExpertMlp
from train.models.remat import name_of_part, named
from train.models.residual import lay_out
from train.models.t5.config import MAX_DISTANCE, NUM_BUCKETS, T5Config, activation

EMBED = ('batch', 'length', 'embed')


def parameter(
    module: nn.Module, name: str, create: Any, names: Sequence[str], shape: Sequence[int]
) -> jax.Array:
    """Returns a float32 parameter of a module, and creates it with its logical axes in `init`."""
    boxed: Any = nn.with_logical_partitioning(create, tuple(names))
    return module.param(name, boxed, tuple(shape), jnp.float32)


def dropout(config: T5Config, x: jax.Array, deterministic: bool, name: str | None) -> jax.Array:
    """Applies dropout whose mask is shared along the length."""
    return nn.Dropout(config.dropout_rate, broadcast_dims=(-2,), name=name)(x, deterministic)


class Dense(nn.Module):
    """A linear map without bias, over the last dimensions of its input.

    Attributes:
      shape: the shape of the kernel as it is used, [inputs..., outputs...].
      num_in: the number of input dimensions.
      names: the logical axes of the kernel. If they are two, the kernel is stored as a matrix.
      distribution: the distribution of the initial kernel, of variance 1 / inputs.
      divisor: what the initial kernel is divided by.
    """

    shape: tuple[int, ...]
    num_in: int
    names: tuple[str, ...]
    dtype: Any
    distribution: Literal['normal', 'truncated_normal'] = 'truncated_normal'
    divisor: float = 1.0

    @nn.compact
    def get_kernel(self) -> jax.Array:
        """Returns the float32 kernel as it is stored, and creates it in `init`."""
        rank, num_in = len(self.shape), self.num_in
        stored, in_axes, out_axes = self.shape, range(num_in), range(num_in, rank)
        if len(self.names) == 2:
            stored = (math.prod(self.shape[:num_in]), math.prod(self.shape[num_in:]))
            in_axes, out_axes = range(1), range(1, 2)
        scaling = nn.initializers.variance_scaling(
            1.0, 'fan_in', self.distribution, tuple(in_axes), tuple(out_axes)
        )

        def create(*arguments: Any) -> jax.Array:
            return scaling(*arguments) / self.divisor

        return parameter(self, 'kernel', create, self.names, stored)

    def __call__(self, x: jax.Array) -> jax.Array:
        # The kernel is multiplied as it is stored, because its names describe its dimensions.
        kernel, rows = self.get_kernel(), x.shape[: x.ndim - self.num_in]
        stored_in = 1 if len(self.names) == 2 else self.num_in
        x = x.astype(self.dtype).reshape(*rows, *kernel.shape[:stored_in])
        row, ins, outs = 'BL'[: len(rows)], 'IJ'[:stored_in], 'OP'[: kernel.ndim - stored_in]
        x_names = ('batch', 'length')[: len(rows)] + self.names[:stored_in]
        y = multiply(f'{row}{ins},{ins}{outs}->{row}{outs}', x, kernel, x_names, self.names)
        return y.reshape(*rows, *self.shape[self.num_in :])


class Norm(nn.Module):
    """RMSNorm in float32."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale_E = parameter(self, 'scale', nn.initializers.ones, ('embed',), x.shape[-1:])
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x.astype(self.dtype) * scale_E.astype(self.dtype)


class Mlp(nn.Module):
    """The hidden layer: the product of its activations, and a linear map."""

    config: T5Config
    deterministic: bool
    decode: bool = False

    @nn.compact
    def __call__(self, x_BLE: jax.Array) -> jax.Array:
        c, count = self.config, len(self.config.mlp_activations)
        parts = []
        for i, function in enumerate(c.mlp_activations):
            name = 'wi' if count == 1 else f'wi_{i}'
            dense = Dense((c.emb_dim, c.mlp_dim), 1, ('embed', 'mlp'), c.dtype, name=name)
            parts.append(activation(function)(named(dense(x_BLE), name_of_part(i, count))))
        hidden_BLM = functools.reduce(jnp.multiply, parts)
        hidden_BLM = dropout(c, hidden_BLM, self.deterministic, None)
        hidden_BLM = lay_out(hidden_BLM, ('batch', 'length', 'mlp'), self.decode)
        out = Dense((c.mlp_dim, c.emb_dim), 1, ('mlp', 'embed'), c.dtype, name='wo')
        return named(out(hidden_BLM), 'mlp_out')


def apply_mlp(
    config: T5Config,
    x_BLE: jax.Array,
    mask: jax.Array | None,
    deterministic: bool,
    decode: bool = False,
) -> jax.Array:
    """Applies the MLP of a layer, or its experts, in a compact method of it.

    Args:
      mask: where a position sees another, bool [batch, 1, length, length], or None. A position that
        does not see itself is padding, which experts do not take.
      decode: whether tokens are decoded, so that experts take all of them.
    """
    c, experts = config, config.experts
    if experts is None:
        return Mlp(c, deterministic, decode, name='mlp')(x_BLE)
    rate = c.dropout_rate if experts.dropout_rate is None else experts.dropout_rate
    functions = tuple(map(activation, c.mlp_activations))
    mlp = ExpertMlp(experts, experts.mlp_dim or c.mlp_dim, functions, rate, c.dtype, name='mlp')
    is_token_BL = None if mask is None else jnp.diagonal(mask[:, 0], axis1=1, axis2=2)
    out_BLE = mlp(x_BLE, is_token_BL, deterministic=deterministic, decode=decode)
    return named(out_BLE, 'mlp_out')


class Embed(nn.Module):
    """The table of embeddings, which can also be the output layer."""

    config: T5Config

    def setup(self) -> None:
        c = self.config
        shape, normal = (c.vocab_size, c.emb_dim), nn.initializers.normal(1.0)
        self.embedding = parameter(self, 'embedding', normal, ('vocab', 'embed'), shape)

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        # The table is cast after the lookup, so that gradients are summed in float32.
        return look_up(self.embedding, tokens_BL.astype(jnp.int32)).astype(self.config.dtype)


class RelativeBias(nn.Module):
    """A learned bias for each head and each bucket of distances between query and key.

    Attributes:
      bidirectional: whether keys after the query have buckets.
      cache: whether the biases are cached while decoding.
    """

    config: T5Config
    bidirectional: bool
    cache: bool = False

    @nn.compact
    def __call__(self, length: int, decode: bool = False) -> jax.Array:
        """Returns the biases, [1, heads, length, length]."""
        c, uniform = self.config, nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')
        shape, names = (c.num_heads, NUM_BUCKETS), ('heads', 'relpos_buckets')
        table = parameter(self, 'rel_embedding', uniform, names, shape)

        def compute() -> jax.Array:
            distances_D = jnp.arange(1 - length, length)
            one_hot_DN = jax.nn.one_hot(buckets(distances_D, self.bidirectional), NUM_BUCKETS)
            # A product, because its gradient is faster than the gradient of a lookup.
            by_distance_HD = jnp.einsum(
                'hn,dn->hd', table, one_hot_DN, precision=jax.lax.Precision.HIGHEST
            )
            return spread(by_distance_HD, length).astype(c.dtype)[None]

        if not (decode and self.cache):
            return compute()
        return self.variable('cache', 'cached_bias', compute).value


def spread(by_distance_HD: jax.Array, length: int) -> jax.Array:
    """Returns values of distances, key minus query, as matrices of queries and keys.

    It copies, and neither looks up nor multiplies, so that it and its gradient are fast.
    `by_distance_HD` has the values of distances from 1 - length to length - 1. Returns [heads,
    length, length].
    """
    # Repeated rows of 2 * length values, read as rows of one less, are each shifted by one more.
    heads, width = by_distance_HD.shape
    rows = jnp.tile(jnp.pad(by_distance_HD, ((0, 0), (0, 1))), (1, length))
    rows = rows[:, : length * width].reshape(heads, length, width)
    return rows[:, :, length - 1 :]


def buckets(distances: jax.Array, bidirectional: bool) -> jax.Array:
    """Returns the buckets of distances, key minus query: exact up to a point, then logarithmic.

    They are counted against integer bounds, so that they do not depend on a device's logarithm.
    """
    bounds = _bucket_bounds(NUM_BUCKETS // 2 if bidirectional else NUM_BUCKETS)
    far = jnp.abs(distances) if bidirectional else jnp.maximum(-distances, 0)
    found = jnp.sum(far[..., None] >= bounds, axis=-1)
    return found + jnp.where(distances > 0, NUM_BUCKETS // 2, 0) if bidirectional else found


def _bucket_bounds(count: int) -> np.ndarray:
    """Returns the first distance of each bucket but the first, for `count` buckets."""
    exact = count // 2
    distances = np.arange(MAX_DISTANCE + 1)
    with np.errstate(divide='ignore'):
        logs = np.log(distances.astype(np.float32) / exact + np.finfo(np.float32).eps)
    logs = logs / np.log(MAX_DISTANCE / exact) * (count - exact)
    large = np.minimum(exact + np.maximum(logs, 0).astype(np.int32), count - 1)
    return np.searchsorted(np.where(distances < exact, distances, large), np.arange(1, count))
