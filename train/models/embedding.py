"""The lookup of embeddings in a table that is sharded over the mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax.core import spmd

from partitioning import constrain
from partitioning.rules import resolve_axes, sharding_axes


def look_up(table_VD: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """Returns a row of a table for each token, laid out as ('batch', 'length', 'embed').

    Over mesh axes that shard both the batch and the columns of the table, each device looks up its
    columns for the tokens of all shards. The results then move to the devices of their rows, which
    moves less than the table would. Compilers need to be told this order.

    Args:
      table_VD: [vocab, embed].
      tokens_BL: int tokens, [batch, length].
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), spmd.get_logical_axis_rules()
    if mesh.empty or not rules:
        return constrain(jnp.take(table_VD, tokens_BL, axis=0), ('batch', 'length', 'embed'))

    def axes(names: tuple[str, str], x: jax.Array, but: tuple[str, ...] = ()) -> list:
        resolved = resolve_axes(names, rules, mesh=mesh, shape=x.shape)
        found = (sharding_axes(dimension.mesh_axes) for dimension in resolved)
        return [tuple(axis for axis in each if axis not in but) or None for each in found]

    _, columns = axes(('vocab', 'embed'), table_VD)
    batch, length = axes(('batch', 'length'), tokens_BL, but=columns or ())
    vocab, _ = axes(('vocab', 'embed'), table_VD, but=(*(batch or ()), *(length or ())))
    tokens_BL = constrain(tokens_BL, (batch, length))
    rows_BLD = jnp.take(constrain(table_VD, (vocab, columns)), tokens_BL, axis=0)
    rows_BLD = constrain(rows_BLD, (batch, length, columns))
    _, whole_length = axes(('batch', 'length'), tokens_BL)
    if columns and whole_length:
        # Compilers move axes between two dimensions at a time: first to the length, then to rows.
        columns = tuple(axis for axis in columns if axis not in whole_length)
        rows_BLD = constrain(rows_BLD, (batch, whole_length, columns or None))
    return constrain(rows_BLD, ('batch', 'length', 'embed'))
