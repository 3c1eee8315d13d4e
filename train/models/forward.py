"""The built-in transformer as a pure function of its parameters, with or without a cache.

Suffixes of array names: B batch, L length, S slots of keys and values, D embed, V vocab.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.errors import ConfigError
from train.models.attention import Cache, Places, cached_names
from train.models.config import TransformerConfig
from train.models.elementary import cast_matrices, normalize
from train.models.embedding import look_up
from train.models.layers import Sown, apply_layer
from train.models.parameters import Params, list_parameters
from train.models.pipeline import find_stages, run_pipeline
from train.models.remat import Remat, recompute, with_input
from train.models.residual import lay_out_residual, residual_names
from train.models.rotary import find_rotation
from train.output_layer import DeferredLogits


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

    Args:
      config: the settings of the model.
      params: its parameters, see `list_parameters`.
      tokens_BL: int tokens, [batch, length].
      positions_BL: int positions, [batch, length]. By default, they are 0, 1, 2, ...
      segments_BL: int segments, [batch, length]. A token attends only to its own segment. By
        default, a row is one segment. To experts, tokens of segment 0 are padding.
      dropout_key: the random key of the dropout. None disables dropout.
      cache: the tokens before these. It needs the positions and segments of these.

    Returns:
      What computes the logits [batch, length, vocab], and None; or with a cache, what computes the
      logits of the last token, [batch, 1, vocab], and the cache with the new tokens. The third
      entry is what the layers sow, as means over all layers.

    Raises:
      ConfigError: if there are more tokens than learned positions.
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
        remats, carry, sown = _remats(c, cache), (x_BLD, cache), list[Sown]()
        for i in range(c.num_layers):
            layer, remat = params[f'layer_{i}'], remats[i % len(remats)]
            carry, one = _step(c, layer, i, carry, places, dropout_key, remat, in_loop=False)
            sown.append(one)
        return *carry, _average(sown)

    # Cast here, the gradients of all layers are stacked in the dtype of the computation, too.
    early = c.gradient_dtype in (None, c.dtype)
    cast = functools.partial(cast_matrices, dtype=c.dtype if early else c.param_dtype)
    indices = jnp.arange(c.num_layers)
    stages = find_stages(c.pipeline, c.num_layers) if cache is None else None
    if stages is None:
        layers = cast(params['layers'])
        return _scan(c, layers, indices, (x_BLD, cache), places, dropout_key)

    def apply(layers: Params, indices: jax.Array, x_BLD: Any, places: Places, key: Any) -> Any:
        return _scan(c, layers, indices, (x_BLD, None), places, key)[0]

    names = jax.tree.map(lambda p: p.names, list_parameters(c)['layers'])
    stages.check_blocks(c.layers_per_iteration)
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
    remats = _remats(c, carry[1])
    # Of a loop with one iteration, XLA makes straight-line code.
    in_loop = c.layers_per_iteration < len(indices)

    def step_block(carry: Any, block: list[tuple[Params, Any]]) -> tuple[Any, Sown]:
        sown = list[Sown]()
        for (p, index), remat in zip(block, remats, strict=True):
            carry, one = _step(c, p, index, carry, places, dropout_key, remat, in_loop)
            sown.append(one)
        return carry, _average(sown)

    # The arrays of a layer are arguments of the loop: of others, the loop would keep copies.
    def every(first: int) -> tuple[Params, Any]:
        return jax.tree.map(lambda x: x[first :: len(remats)], (layers, indices))

    blocks = [every(first) for first in range(len(remats))]
    unroll = c.layers_per_iteration // len(remats)
    carry, sown = jax.lax.scan(step_block, carry, blocks, unroll=unroll)
    return *carry, jax.tree.map(jnp.mean, sown)


def _average(sown: list[Sown]) -> Sown:
    """The means of what some layers have sown."""
    return jax.tree.map(lambda *values: sum(values) / len(values), *sown)


def _step(
    c: TransformerConfig,
    params: Params,
    index: Any,
    carry: tuple[jax.Array, Cache | None],
    places: Places,
    dropout_key: jax.Array | None,
    remat: Remat | None,
    in_loop: bool,
) -> tuple[tuple[jax.Array, Cache | None], Sown]:
    def apply(p: Params, x_BLD: jax.Array, cache: Cache | None) -> Any:
        # XLA would gather slices of the stacked layers before it drops their first dimension, and
        # then copy what it has gathered into another order.
        p = jax.lax.optimization_barrier(p)
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
        return apply_layer(c, p, x_BLD, places, index, key, cache)

    applied = recompute(apply, remat, prevent_cse=not in_loop)
    x_BLD, cache, sown = applied(params, *carry)
    return (x_BLD, cache), sown


def _remats(c: TransformerConfig, cache: Cache | None) -> tuple[Remat | None, ...]:
    return c.remats if cache is None else (None,) * len(c.remats)
