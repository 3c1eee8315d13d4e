"""One layer of the built-in transformer: attention and MLP, each after a norm.

Suffixes of array names: B batch, L length, D embed, F mlp; of experts G groups, T tokens of a
group, E experts, M embed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.models.attention import Cache, Places, apply_attention
from train.models.config import TransformerConfig
from train.models.elementary import multiply, normalize
from train.models.experts.mixture import Mixture, mix
from train.models.experts.mlp import Mlps
from train.models.parameters import Params
from train.models.remat import Name, named
from train.models.residual import gather_length, lay_out_residual, length_name

# What the layers of a model sow besides their results: 'losses' and 'metrics', each with scalars by
# name. Layers without experts sow nothing.
Sown = dict[str, dict[str, jax.Array]]


def apply_layer(
    config: TransformerConfig,
    params: Params,
    x_BLD: jax.Array,
    places: Places,
    index: Any,
    dropout_key: jax.Array | None = None,
    cache: Cache | None = None,
) -> tuple[jax.Array, Cache | None, Sown]:
    """Adds attention and MLP, each after a norm, to the residual stream.

    The number of the layer, `index`, is an integer or a scalar array. The cache has the earlier
    tokens with the segments of all, and gets all keys and values.

    Returns:
      The residual stream, the cache, and what the experts sow.
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
    if config.experts is None:
        return add(x_BLD, _apply_mlp(config, params['mlp'], normed_BLD), 'mlp', 1), cache, {}
    decode = cache is not None
    mixture = _apply_experts(config, params['mlp'], normed_BLD, places.segments_BL, decode)
    metrics = {f'experts/{name}': value for name, value in mixture.metrics.items()}
    sown = {'losses': mixture.losses, 'metrics': metrics}
    return add(x_BLD, mixture.y_BLM, 'mlp', 1), cache, sown


def _apply_mlp(c: TransformerConfig, p: Params, x_BLD: jax.Array) -> jax.Array:
    def part(name: Name) -> jax.Array:
        product = multiply(c, 'BLD,DF->BLF', x_BLD, p, name.removeprefix('mlp_'))
        return named(product, name)

    hidden_BLF = _ACTIVATIONS[c.activation](part('mlp_gate' if c.gated_mlp else 'mlp_up'))
    if c.gated_mlp:
        hidden_BLF *= part('mlp_up')
    return multiply(c, 'BLF,FD->BLD', constrain(hidden_BLF, ('batch', 'length', 'mlp')), p, 'down')


def _apply_experts(
    c: TransformerConfig, p: Params, x_BLD: jax.Array, segments_BL: Any, decode: bool
) -> Mixture:
    """Applies the router and the experts of a layer. Tokens of segment 0 are padding."""
    assert c.experts is not None

    def find_logits(x_GTM: jax.Array) -> jax.Array:
        x_GTM, router_ME = (x.astype(jnp.float32) for x in (x_GTM, p['router']))
        return jnp.einsum('GTM,ME->GTE', x_GTM, router_ME, precision='float32')

    is_token_BL = None if segments_BL is None else segments_BL != 0
    parts = ('gate', 'up') if c.gated_mlp else ('up',)
    activations = (_ACTIVATIONS[c.activation], *[_ACTIVATIONS['linear']] * c.gated_mlp)
    mlps = Mlps(
        into_hidden=tuple(p[name].astype(c.dtype) for name in parts),
        out=p['down'].astype(c.dtype),
        activations=activations,
        dropout_rate=0.0,
        dropout_key=None,
    )
    return mix(c.experts, mlps, x_BLD, is_token_BL, find_logits, training=True, decode=decode)


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    'silu': jax.nn.silu,
    'gelu': functools.partial(jax.nn.gelu, approximate=False),
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
    'relu': jax.nn.relu,
    'relu2': lambda x: jax.nn.relu(x) ** 2,
    'linear': lambda x: x,  # of the half that is not a gate
}
