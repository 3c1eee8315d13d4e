"""The built-in transformer as a pure function of its parameters, with or without a cache.

Suffixes of array names: B batch, L length, S slots of keys and values, D embed, F mlp,
V vocab; of experts G groups, T tokens of a group, E experts, M embed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.errors import ConfigError
from train.models.attention import Cache, Places, apply_attention, cached_names, find_rotation
from train.models.config import TransformerConfig
from train.models.elementary import cast_matrices, look_up, multiply, normalize
from train.models.experts.dropless import Mlps
from train.models.experts.layer import Mixture, mix
from train.models.parameters import Params, list_parameters
from train.models.pipeline import find_stages, run_pipeline
from train.models.remat import Name, named, recompute, with_input
from train.models.residual import gather_length, lay_out_residual, length_name, residual_names
from train.output_layer import DeferredLogits

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
    """Adds attention and MLP, each after a norm. Returns the stream, the cache, and what is sown.

    The number of the layer, `index`, is an integer or a scalar array. The cache has the earlier
    tokens with the segments of all, and gets all keys and values.
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


def empty_cache(config: TransformerConfig, batch: int, slots: int) -> Cache:
    """Returns a cache without tokens for `batch` rows of up to `slots` tokens."""
    shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
    keys, values = (
        constrain(jnp.zeros(shape, config.dtype), cached_names(config)) for _ in range(2)
    )
    segments_BS = constrain(jnp.zeros((batch, slots), jnp.int32), ('batch', None))
    return Cache(keys, values, segments_BS, jnp.int32(0))


def compute_logits(
    config: TransformerConfig, params: Params, tokens_BL: jax.Array, **settings: Any
) -> tuple[jax.Array, Cache | None]:
    """Computes the float32 logits of the next tokens, see `defer_logits`."""
    deferred, cache, _ = defer_logits(config, params, tokens_BL, **settings)
    return deferred.logits(), cache


def defer_logits(
    config: TransformerConfig,
    params: Params,
    tokens_BL: jax.Array,
    *,
    positions_BL: jax.Array | None = None,
    segments_BL: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    cache: Cache | None = None,
) -> tuple[DeferredLogits, Cache | None, Sown]:
    """Computes the hidden states from which the output layer computes the next tokens' logits.

    Returns what computes the logits [batch, length, vocab], and None; or with a cache, what
    computes the logits of the last token, [batch, 1, vocab], and the cache with the new tokens. The
    third entry is what the layers sow, as means over all layers. Raises a ConfigError if there are
    more tokens than learned positions.

    Args:
      params: its parameters, see `list_parameters`.
      tokens_BL: int tokens, [batch, length].
      positions_BL: int positions, [batch, length]. By default, they are 0, 1, 2, ...
      segments_BL: int segments, [batch, length]. A token attends only to its own segment. By
        default, a row is one segment. To experts, tokens of segment 0 are padding.
      dropout_key: the random key of the dropout. None disables dropout.
      cache: the tokens before these. It needs the positions and segments of these.
    """
    c, length = config, tokens_BL.shape[1]
    if c.positions == 'learned' and length > c.max_positions:
        raise ConfigError(
            f'a row has {length} tokens, but max_positions is {c.max_positions}: use shorter rows, '
            'or raise TransformerConfig.max_positions'
        )
    if cache is not None and segments_BL is not None:
        held = jax.lax.dynamic_update_slice(cache.segments_BS, segments_BL, (0, cache.used))
        cache = cache._replace(segments_BS=constrain(held, ('batch', None)))
    positions_BL = jnp.arange(length)[None] if positions_BL is None else positions_BL

    embedding_VD = params['embedding'].astype(c.dtype)
    x_BLD = look_up(embedding_VD, tokens_BL)
    if c.scale_embeddings:
        x_BLD = x_BLD * c.embed_dim**0.5
    if c.positions == 'learned':
        places = Places(segments_BL, None, None)
        table = constrain(params['position_embedding'].astype(c.dtype), (None, None))
        x_BLD += jnp.take(table, positions_BL, axis=0)
    else:
        find = functools.partial(find_rotation, positions_BL, c.head_dim)
        rotation = local_rotation = find(c.rope_max_wavelength, c.rope_scaling)
        if c.local_rope_max_wavelength is not None:
            local_rotation = find(c.local_rope_max_wavelength)
        places = Places(segments_BL, rotation, local_rotation)

    x_BLD = lay_out_residual(x_BLD)
    x_BLD, cache, sown = _apply_layers(c, params, x_BLD, places, dropout_key, cache)
    if cache is not None:
        cache, x_BLD = cache._replace(used=cache.used + length), x_BLD[:, -1:]
    x_BLD = normalize(c, params['final_norm'], x_BLD)
    output_DV = params['embedding'].T if c.tie_embeddings else params['output']
    deferred = DeferredLogits(
        x_BLD=x_BLD,
        w_DV=output_DV,
        dtype=c.dtype,
        names=residual_names(),
        soft_cap=c.logit_soft_cap,
    )
    return deferred, cache, sown


def _apply_layers(
    c: TransformerConfig,
    params: Params,
    x_BLD: jax.Array,
    places: Places,
    dropout_key: jax.Array | None,
    cache: Cache | None,
) -> tuple[jax.Array, Cache | None, Sown]:
    if not c.scan_layers:
        block = [(params[f'layer_{i}'], i) for i in range(c.num_layers)]
        carry, sown = _step_block(c, (x_BLD, cache), block, places, dropout_key, in_loop=False)
        return *carry, sown

    # Cast here, the gradients of all layers are stacked in the dtype of the computation, too.
    early = c.gradient_dtype in (None, c.dtype)
    cast = functools.partial(cast_matrices, dtype=c.dtype if early else c.param_dtype)
    indices = jnp.arange(c.num_layers)
    stages = None
    if cache is None:
        stages = find_stages(c.pipeline, c.num_layers, c.layers_per_iteration)
    if stages is None:
        layers = cast(params['layers'])
        return _scan(c, layers, indices, (x_BLD, cache), places, dropout_key)

    def apply(layers: Params, indices: jax.Array, x_BLD: Any, places: Places, key: Any) -> Any:
        return _scan(c, layers, indices, (x_BLD, None), places, key)[0]

    names = jax.tree.map(lambda p: p.names, list_parameters(c)['layers'])
    remat = c.remats[0]
    policy = None if remat is None else with_input(remat).policy
    layers = params['layers']
    done_BLD = run_pipeline(stages, apply, layers, names, cast, x_BLD, places, dropout_key, policy)
    return done_BLD, None, {}


def _scan(
    c: TransformerConfig,
    layers: Params,
    indices: jax.Array,
    carry: tuple[jax.Array, Cache | None],
    places: Places,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, Cache | None, Sown]:
    """Applies stacked layers with these numbers; the first of them has the first entry of remat."""
    # Of a loop with one iteration, XLA makes straight-line code.
    in_loop, count = c.layers_per_iteration < len(indices), len(c.remats)

    def step(carry: Any, block: list[tuple[Params, Any]]) -> tuple[Any, Sown]:
        return _step_block(c, carry, block, places, dropout_key, in_loop)

    # The arrays of a layer are arguments of the loop: of others, the loop would keep copies.
    blocks = [
        jax.tree.map(lambda x, first=first: x[first::count], (layers, indices))
        for first in range(count)
    ]
    carry, sown = jax.lax.scan(step, carry, blocks, unroll=c.layers_per_iteration // count)
    return *carry, jax.tree.map(jnp.mean, sown)


def _step_block(
    c: TransformerConfig,
    carry: tuple[jax.Array, Cache | None],
    block: list[tuple[Params, Any]],
    places: Places,
    dropout_key: jax.Array | None,
    in_loop: bool,
) -> tuple[tuple[jax.Array, Cache | None], Sown]:
    """Applies layers, each with its number, and returns the means of what they have sown."""
    all_sown = list[Sown]()
    for number, (params, index) in enumerate(block):

        def apply(p: Params, x_BLD: jax.Array, cache: Cache | None, index: Any = index) -> Any:
            # XLA would gather slices of the stacked layers before it drops their first dimension,
            # and then copy what it has gathered into another order.
            p = jax.lax.optimization_barrier(p)
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
            return apply_layer(c, p, x_BLD, places, index, key, cache)

        remat = c.remats[number % len(c.remats)] if carry[1] is None else None
        x_BLD, cache, sown = recompute(apply, remat, prevent_cse=not in_loop)(params, *carry)
        carry = x_BLD, cache
        all_sown.append(sown)
    return carry, jax.tree.map(lambda *values: sum(values) / len(values), *all_sown)
