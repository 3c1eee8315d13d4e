"""What the built-in transformer is made of: lookups of embeddings, norms and products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.core import spmd

from partitioning import constrain, products
from partitioning.rules import resolve_axes, sharding_axes
from train.models.config import TransformerConfig
from train.models.parameters import Params
from train.models.residual import length_name

# The logical axis that each letter of an equation stands for. P is the length in the projections of
# attention, which can have its own rule.
NAMES = {
    'B': 'batch',
    'L': 'length',
    'D': 'embed',
    'F': 'mlp',
    'H': 'heads',
    'K': 'kv_heads',
    'N': 'kv',
}


def look_up(table_VD: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """Returns a row of a table for each token, laid out as ('batch', 'length', 'embed').

    Over mesh axes that shard both the batch and the columns of the table, each device looks up its
    columns for the tokens of all shards. The results then move to the devices of their rows, which
    moves less than the table would. Compilers need to be told this order.
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


def normalize(config: TransformerConfig, params: Params, x: jax.Array) -> jax.Array:
    """Applies RMSNorm or LayerNorm to the last dimension, in float32."""
    y = x.astype(jnp.float32)
    if config.norm == 'layer':
        y -= jnp.mean(y, axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + config.norm_epsilon)
    y *= params['scale'] + 1.0 if config.norm_scale_offset else params['scale']
    return (y + params['bias'] if 'bias' in params else y).astype(config.dtype)


def multiply(
    config: TransformerConfig, equation: str, x: jax.Array, params: Params, name: str
) -> jax.Array:
    """Applies a matrix and its bias.

    Args:
      equation: the einsum of rows and matrix, by the letters of NAMES and P.
      name: the name of the matrix; the name of its bias, if it has one, ends with '_bias'.
    """
    inputs = equation.partition('->')[0].split(',')
    known = NAMES | {'P': length_name('projection')}
    x_names, w_names = ([known[letter] for letter in letters] for letters in inputs)
    y = products.multiply(
        equation,
        x,
        params[name],
        x_names,
        w_names,
        gradient_dtype=config.gradient_dtype,
        rounding=_rounding_of(config, name),
    )
    bias = params.get(f'{name}_bias')
    return y if bias is None else y + bias.astype(x.dtype)


def _rounding_of(config: TransformerConfig, name: str) -> products.Rounding | None:
    """How the operands of a matrix's products are rounded; None if they stay as they are."""
    part = 'mlp' if name in ('gate', 'up', 'down') else 'attention'
    found = config.products
    return found if found is not None and found.covers(f'{part}/{name}') else None


def cast_matrices(params: Params, dtype: str) -> Params:
    """Casts the parameters of layers to the dtype of their products.

    Norms and routers, which compute in float32, stay as they are.
    """

    def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        names = [str(getattr(entry, 'key', '')) for entry in path]
        is_kept = any(name.endswith('norm') or name == 'router' for name in names)
        return x if is_kept else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
