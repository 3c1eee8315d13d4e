"""One layer of the built-in transformer: attention and MLP, each after a norm.

Suffixes of array names: B batch, L length, D embed, F mlp.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.models.attention import Cache, Places, apply_attention
from train.models.config import TransformerConfig
from train.models.elementary import multiply, normalize
from train.models.parameters import Params
from train.models.remat import Name, named
from train.models.residual import gather_length, lay_out_residual, length_name


def apply_layer(
    config: TransformerConfig,
    params: Params,
    x_BLD: jax.Array,
    places: Places,
    index: Any,
    dropout_key: jax.Array | None = None,
    cache: Cache | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Adds attention and MLP, each after a norm, to the residual stream.

    Args:
      config: the settings of the model.
      params: the parameters of the layer.
      x_BLD: the residual stream.
      places: where the tokens are.
      index: the number of the layer, an integer or a scalar array.
      dropout_key: the random key of the dropout, or None.
      cache: the earlier tokens, with the segments of all. The result has all keys and values.
    """

    def add(x_BLD: jax.Array, branch_BLD: jax.Array, name: str, number: int) -> jax.Array:
        # Laid out before it is kept, so that sums over devices are not recomputed.
        out: Name = 'attention_out' if name == 'attention' else 'mlp_out'
        branch_BLD = named(lay_out_residual(branch_BLD), out)
        if config.post_norms:
            branch_BLD = normalize(config, params[f'{name}_post_norm'], branch_BLD)
        if dropout_key is not None:
            kept, key = 1 - config.dropout_rate, jax.random.fold_in(dropout_key, number)
            is_kept = jax.random.bernoulli(key, kept, branch_BLD.shape)
            branch_BLD = jnp.where(is_kept, branch_BLD / kept, 0)
        return lay_out_residual(x_BLD + branch_BLD)

    x_BLD = named(lay_out_residual(x_BLD), 'residual')
    normed_BLD = normalize(config, params['attention_norm'], x_BLD)
    normed_BLD = constrain(normed_BLD, ('batch', length_name('projection'), 'embed'))
    branch_BLD, cache = apply_attention(
        config, params['attention'], normed_BLD, places, index, cache
    )
    x_BLD = add(x_BLD, branch_BLD, 'attention', 0)
    normed_BLD = gather_length(normalize(config, params['mlp_norm'], x_BLD))
    return add(x_BLD, _apply_mlp(config, params['mlp'], normed_BLD), 'mlp', 1), cache


def _apply_mlp(c: TransformerConfig, p: Params, x_BLD: jax.Array) -> jax.Array:
    hidden_BLF = _named_product(c, x_BLD, p, 'gate' if c.gated_mlp else 'up')
    if c.activation.startswith('gelu'):
        hidden_BLF = jax.nn.gelu(hidden_BLF, approximate=c.activation == 'gelu_tanh')
    elif c.activation == 'silu':
        hidden_BLF = jax.nn.silu(hidden_BLF)
    else:
        hidden_BLF = jax.nn.relu(hidden_BLF)
        hidden_BLF = hidden_BLF**2 if c.activation == 'relu2' else hidden_BLF
    if c.gated_mlp:
        hidden_BLF *= _named_product(c, x_BLD, p, 'up')
    return multiply(c, 'BLF,FD->BLD', constrain(hidden_BLF, ('batch', 'length', 'mlp')), p, 'down')


def _named_product(
    c: TransformerConfig, x_BLD: jax.Array, p: Params, name: Literal['gate', 'up']
) -> jax.Array:
    names: dict[str, Name] = {'gate': 'mlp_gate', 'up': 'mlp_up'}
    return named(multiply(c, 'BLD,DF->BLF', x_BLD, p, name), names[name])
