"""Models and optimizers in the style of public code, laid out with PartitionSpecs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from placing import array, make_mesh, place, shardings_of

ROWS, LENGTH, EMBED, HEADS, SIZE, VOCAB = 16, 128, 256, 8, 32, 2048


class Block(nnx.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(EMBED, rngs=rngs), nnx.RMSNorm(EMBED, rngs=rngs)
        self.qkv = nnx.Linear(EMBED, 3 * EMBED, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(EMBED, EMBED, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(EMBED, 4 * EMBED, rngs=rngs)
        self.down = nnx.Linear(4 * EMBED, EMBED, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], HEADS, SIZE) for a in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    """A language model whose loss is over a tied embedding."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def nnx_fsdp() -> Any:
    """An nnx decoder whose parameters and Adam's moments are sharded over all devices."""
    mesh = make_mesh(fsdp=8)
    optimizer = optax.adamw(1e-3)

    def init() -> Any:
        graph, params = nnx.split(Decoder(nnx.Rngs(0)), nnx.Param)
        return graph, params, optimizer.init(params)

    graph = nnx.eval_shape(lambda: nnx.split(Decoder(nnx.Rngs(0)))[0])
    params, opt_state = jax.eval_shape(lambda: init()[1:])

    def spec_of(shape: tuple[int, ...]) -> P:
        dims = [i for i, size in enumerate(shape) if size % 8 == 0]
        if len(shape) < 2 or not dims:
            return P()
        largest = max(dims, key=lambda i: shape[i])
        return P(*('fsdp' if i == largest else None for i in range(len(shape))))

    state = place(mesh, (params, opt_state), spec_of)

    def step(state, tokens):
        params, opt_state = state

        def loss(params):
            logits = nnx.merge(graph, params)(tokens).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    tokens = array(mesh, (ROWS, LENGTH), 'fsdp', None, dtype=jnp.int32)
    out = (shardings_of(state), None)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (state, tokens)


def adafactor() -> Any:
    """Adafactor, clipping and decay over matrices that are sharded over two axes."""
    mesh = make_mesh(data=4, model=2)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adafactor(1e-3, min_dim_size_to_factor=64)
    )
    params = {
        'in': jax.ShapeDtypeStruct((EMBED, 8 * EMBED), jnp.float32),
        'out': jax.ShapeDtypeStruct((8 * EMBED, EMBED), jnp.float32),
        'scale': jax.ShapeDtypeStruct((EMBED,), jnp.float32),
    }

    def spec_of(shape: tuple[int, ...]) -> P:
        if len(shape) == 2:
            return P('data', 'model') if shape[0] < shape[1] else P('model', 'data')
        return P()

    opt_state = place(mesh, jax.eval_shape(optimizer.init, params), spec_of)
    params = place(mesh, params, spec_of)

    def step(params, opt_state, x):
        def loss(params):
            hidden = jax.nn.gelu((x * params['scale']) @ params['in'])
            return jnp.mean((hidden @ params['out'] - x) ** 2)

        grads = jax.grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    out = shardings_of((params, opt_state))
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
    return step, (params, opt_state, array(mesh, (256, EMBED), 'data', None))


def generation() -> Any:
    """A loop that samples tokens from the best k, with a cache of keys and values."""
    mesh, length = make_mesh(data=2, model=4), 64

    def layer(x, w, cache, at):
        q, k, v = (jnp.einsum('be,ehd->bhd', x, w[n]) for n in 'qkv')
        keys = lax.dynamic_update_slice_in_dim(cache['k'], k[:, None], at, axis=1)
        values = lax.dynamic_update_slice_in_dim(cache['v'], v[:, None], at, axis=1)
        scores = jnp.einsum('bhd,blhd->bhl', q, keys).astype(jnp.float32)
        scores = jnp.where(jnp.arange(length) <= at, scores, -1e9)
        mixed = jnp.einsum('bhl,blhd->bhd', jax.nn.softmax(scores).astype(x.dtype), values)
        return x + jnp.einsum('bhd,hde->be', mixed, w['o']), {'k': keys, 'v': values}

    def generate(weights, tokens, cache, key):
        def body(carry):
            at, tokens, cache = carry
            current = lax.dynamic_index_in_dim(tokens, at, axis=1, keepdims=False)
            x, cache = layer(weights['embed'][current], weights, cache, at)
            logits = jnp.einsum('be,ve->bv', x, weights['embed']).astype(jnp.float32)
            best, ids = lax.top_k(logits, 40)
            pick = jax.random.categorical(jax.random.fold_in(key, at), best)
            new = jnp.take_along_axis(ids, pick[:, None], axis=1)
            return at + 1, lax.dynamic_update_slice(tokens, new, (0, at + 1)), cache

        start = (jnp.int32(0), tokens, cache)
        _, tokens, cache = lax.while_loop(lambda carry: carry[0] < length - 1, body, start)
        return tokens, cache

    half = {'dtype': jnp.bfloat16}
    weights = {n: array(mesh, (EMBED, HEADS, SIZE), None, 'model', None, **half) for n in 'qkv'}
    weights['o'] = array(mesh, (HEADS, SIZE, EMBED), 'model', None, None, **half)
    weights['embed'] = array(mesh, (VOCAB, EMBED), 'model', None, **half)
    shape = (ROWS, length, HEADS, SIZE)
    cache = {n: array(mesh, shape, 'data', None, 'model', None, **half) for n in 'kv'}
    tokens = array(mesh, (ROWS, length), 'data', None, dtype=jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.jit(generate, donate_argnums=(1, 2)), (weights, tokens, cache, key)


class Dropped(nn.Module):
    """A linen network with dropout and rematerialized layers."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for _ in range(2):
            y = nn.Dense(4 * EMBED)(nn.LayerNorm()(x))
            y = nn.Dropout(0.1, deterministic=not train)(nn.gelu(y))
            x = x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(EMBED)(y))
        return x


def dropout() -> Any:
    """Dropout under data and tensor parallelism, where random bits are made in shards."""
    mesh, model = make_mesh(data=4, model=2), Dropped()
    x = array(mesh, (256, EMBED), 'data', None)

    def spec_of(shape: tuple[int, ...]) -> P:
        if len(shape) < 2:
            return P()
        return P(None, 'model') if shape[0] < shape[1] else P('model', None)

    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(x.shape), train=False))
    params = place(mesh, params, spec_of)

    def step(params, x, key):
        def loss(params):
            out = model.apply(params, x, train=True, rngs={'dropout': key})
            return jnp.mean((out - x) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    out = shardings_of(params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.jit(step, donate_argnums=0, out_shardings=out), (params, x, key)


def slices() -> Any:
    """Data parallelism between slices, and fully sharded layers inside of them."""
    mesh = make_mesh(replica=2, fsdp=4)
    layers = NamedSharding(mesh, P(None, 'fsdp', None))

    def step(weights, x, y):
        def loss(weights):
            def layer(x, w):
                return x + jax.nn.gelu(x @ w.astype(jnp.bfloat16)), None

            out, _ = lax.scan(jax.checkpoint(layer), x, weights)
            return jnp.mean((out.astype(jnp.float32) - y) ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    weights = jax.ShapeDtypeStruct((4, 512, 512), jnp.float32, sharding=layers)
    x = array(mesh, (256, 512), ('replica', 'fsdp'), None, dtype=jnp.bfloat16)
    y = array(mesh, (256, 512), ('replica', 'fsdp'), None)
    return jax.jit(step, donate_argnums=0, out_shardings=layers), (weights, x, y)
