"""The mesh axes of the output layer, and what devices exchange along them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax.core import spmd
from jax.sharding import PartitionSpec

from partitioning.rules import drop_axes_of_names, resolve_axes, sharding_axes

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The mesh axes that shard hidden states [batch, length, embed] and weights [embed, vocab].

    Each device computes the logits of its tokens for its part of the vocabulary. It needs whole
    columns of the weights and whole hidden states. Devices that differ only along the axes of the
    vocabulary need the same tokens.

    Attributes:
      batch: the axes of the rows of tokens.
      length: the axes of the length of the hidden states.
      hidden: the axes of the width of the hidden states, which are also axes of the vocabulary.
      embed: the axes of the rows of the weights, which are also axes of the tokens.
      vocab_shards: the number of parts of the vocabulary.
    """

    batch: Axes = ()
    length: Axes = ()
    hidden: Axes = ()
    embed: Axes = ()
    vocab: Axes = ()
    vocab_shards: int = 1

    @property
    def shared_length(self) -> Axes:
        """The axes that shard both length and vocabulary. Tokens are gathered along them."""
        return tuple(axis for axis in self.length if axis in self.vocab)

    @property
    def tokens(self) -> Axes:
        """The axes along which devices have different tokens when they compute logits."""
        return (*self.batch, *(axis for axis in self.length if axis not in self.vocab))

    @property
    def sharded(self) -> bool:
        """Whether any axis shards tokens, vocabulary or weights."""
        return bool(self.tokens or self.vocab or self.embed)

    def spec(self, *dimensions: Axes) -> PartitionSpec:
        """Returns the spec of an array, given the axes of each dimension."""
        return PartitionSpec(*(axes or None for axes in dimensions))


def find_placement(
    x_shape: Sequence[int], x_names: Sequence[str], w_shape: Sequence[int]
) -> Placement:
    """Finds the placement from the current mesh and the current logical axis rules.

    Raises a ValueError if the rules do not fit the arrays, as in `partitioning.constrain`.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), spmd.get_logical_axis_rules()
    if mesh.empty or not rules:
        return Placement()
    manual = {*mesh.manual_axes}
    sizes = {a: n for a, n in mesh.shape.items() if n > 1 and a not in manual}

    def resolve(names: Sequence[str], shape: Sequence[int]) -> list[Axes]:
        kept, given = drop_axes_of_names(names, rules, mesh, manual) if manual else (names, rules)
        found = resolve_axes(kept, given, mesh=mesh, shape=shape)
        axes = (d.wanted if d.policy == 'pad' else d.mesh_axes for d in found)
        return [tuple(a for a in sharding_axes(each) if a in sizes) for each in axes]

    def dividing(size: int, axes: Axes) -> Axes:
        return axes if axes and size % math.prod(sizes[a] for a in axes) == 0 else ()

    batch, length, hidden = resolve(x_names, x_shape)
    embed, vocab = resolve(('embed', 'vocab'), w_shape)
    batch, length = dividing(x_shape[0], batch), dividing(x_shape[1], length)
    # Tokens differ along the axes of the batch, so these cannot shard the vocabulary.
    vocab = tuple(axis for axis in vocab if axis not in batch)
    tokens = {*batch, *length} - {*vocab}
    return Placement(
        batch=batch,
        length=length,
        hidden=dividing(x_shape[2], tuple(axis for axis in hidden if axis in vocab)),
        embed=dividing(w_shape[0], tuple(axis for axis in embed if axis in tokens)),
        vocab=vocab,
        vocab_shards=math.prod(sizes[axis] for axis in vocab),
    )


# For use inside a shard_map. Without axes, a dimension has one part: all of it.


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Returns an array with a whole dimension, joined from the parts on all devices."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def take_part(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Returns this device's part of a dimension; the inverse of `gather`."""
    if not axes:
        return x
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis=dim)


def index_along(axes: Axes) -> jax.Array:
    """Returns the index of this device's part of a dimension, an int32 scalar."""
    return jax.lax.axis_index(axes).astype(jnp.int32) if axes else jnp.int32(0)
