"""A transformer and its train step in plain JAX, without this library: the peer of train_step.py.

It is the built-in transformer with its default settings, written as one would by hand: a scan over
stacked layers, rotary positions, a gated MLP, and no names, rules or settings beyond the sizes. The
arrays have the same names and shapes, so that both can start from the same parameters.

Suffixes of array names: B batch, L length, D embed, H heads, N head_dim, F mlp, V vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the model. The computation has `dtype`; parameters are float32.

    `remat` is 'none', or 'full': the backward pass computes each layer again.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    dtype: str
    remat: str = 'none'

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.embed_dim // self.num_heads


def init_params(sizes: Sizes, key: jax.Array) -> dict[str, Any]:
    """Makes float32 parameters; the parameters of the layers are stacked."""
    layers, d, h, n, f = (
        *(sizes.num_layers, sizes.embed_dim, sizes.num_heads),
        *(sizes.head_dim, sizes.mlp_dim),
    )
    shapes = {
        ('embedding',): (sizes.vocab_size, d),
        ('output',): (d, sizes.vocab_size),
        ('layers', 'attention', 'query'): (layers, d, h, n),
        ('layers', 'attention', 'key'): (layers, d, h, n),
        ('layers', 'attention', 'value'): (layers, d, h, n),
        ('layers', 'attention', 'out'): (layers, h, n, d),
        ('layers', 'mlp', 'gate'): (layers, d, f),
        ('layers', 'mlp', 'up'): (layers, d, f),
        ('layers', 'mlp', 'down'): (layers, f, d),
    }
    params: dict[str, Any] = {'final_norm': {'scale': jnp.ones(d)}, 'layers': {}}
    for name in ('attention_norm', 'mlp_norm'):
        params['layers'][name] = {'scale': jnp.ones((layers, d))}
    keys = jax.random.split(key, len(shapes))
    for (path, shape), one in zip(shapes.items(), keys, strict=True):
        inner = params
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = jax.random.normal(one, shape) * d**-0.5
    return params


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def _rotate(x_BLHN: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    first, second = jnp.split(x_BLHN.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLHN.dtype)


def compute_logits(
    sizes: Sizes,
    params: dict[str, Any],
    tokens_BL: jax.Array,
    kernel: Literal['cudnn'] | None = None,
) -> jax.Array:
    """Returns the float32 logits of the next tokens, [batch, length, vocab].

    `kernel` is the implementation of `jax.nn.dot_product_attention`.
    """
    half = sizes.head_dim // 2
    frequency_N = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_LN = jnp.arange(tokens_BL.shape[1])[:, None] * frequency_N
    sin, cos = (f(angle_LN)[None, :, None, :] for f in (jnp.sin, jnp.cos))

    def layer(x_BLD: jax.Array, p: dict[str, Any]) -> tuple[jax.Array, None]:
        a, m = p['attention'], p['mlp']
        normed = _norm(x_BLD, p['attention_norm']['scale'])
        q, k, v = (
            jnp.einsum('BLD,DHN->BLHN', normed, a[name].astype(sizes.dtype))
            for name in ('query', 'key', 'value')
        )
        attended = jax.nn.dot_product_attention(
            _rotate(q, sin, cos), _rotate(k, sin, cos), v, is_causal=True, implementation=kernel
        )
        x_BLD += jnp.einsum('BLHN,HND->BLD', attended, a['out'].astype(sizes.dtype))
        normed = _norm(x_BLD, p['mlp_norm']['scale'])
        gate, up = (normed @ m[name].astype(sizes.dtype) for name in ('gate', 'up'))
        return x_BLD + (jax.nn.silu(gate) * up) @ m['down'].astype(sizes.dtype), None

    x_BLD = params['embedding'].astype(sizes.dtype)[tokens_BL] * sizes.embed_dim**0.5
    body = jax.checkpoint(layer) if sizes.remat == 'full' else layer
    x_BLD, _ = jax.lax.scan(body, x_BLD.astype(sizes.dtype), params['layers'])
    x_BLD = _norm(x_BLD, params['final_norm']['scale'])
    logits = jnp.einsum('BLD,DV->BLV', x_BLD, params['output'].astype(sizes.dtype))
    return logits.astype(jnp.float32)


def make_step(
    sizes: Sizes, tx: optax.GradientTransformation, kernel: Literal['cudnn'] | None = None
) -> Callable[..., Any]:
    """Returns the function ((params, opt_state), batch) -> ((params, opt_state), metrics)."""

    def loss_of(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = compute_logits(sizes, params, batch['decoder_input_tokens'], kernel)
        targets, weights = batch['decoder_target_tokens'], batch['decoder_loss_weights']
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = (logits.argmax(-1) == targets) * weights
        return jnp.sum(nats * weights) / jnp.sum(weights), jnp.sum(right) / jnp.sum(weights)

    def step(state: tuple[Any, Any], batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        params, opt_state = state
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        norms = optax.tree.norm(grads), optax.tree.norm(params)
        return (params, opt_state), (loss, accuracy, *norms)

    return step
