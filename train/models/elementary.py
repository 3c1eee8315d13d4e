"""What all layers of the built-in transformer are made of: norms and products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from partitioning import products
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
      config: the settings of the model.
      equation: the einsum of rows and matrix, by the letters of NAMES and P.
      x: the rows.
      params: the parameters of the layer.
      name: the name of the matrix; the name of its bias, if it has one, ends with '_bias'.
    """
    inputs = equation.partition('->')[0].split(',')
    known = NAMES | {'P': length_name('projection')}
    x_names, w_names = ([known[letter] for letter in letters] for letters in inputs)
    dtype = config.gradient_dtype
    y = products.multiply(equation, x, params[name], x_names, w_names, gradient_dtype=dtype)
    bias = params.get(f'{name}_bias')
    return y if bias is None else y + bias.astype(x.dtype)


def cast_matrices(params: Params, dtype: str) -> Params:
    """Casts the parameters of layers to the dtype of their products.

    Norms and routers, which compute in float32, stay as they are.
    """

    def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        names = [str(getattr(entry, 'key', '')) for entry in path]
        is_kept = any(name.endswith('norm') or name == 'router' for name in names)
        return x if is_kept else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
