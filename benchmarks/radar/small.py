"""Small programs, each with one pattern of public code."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from placing import array, make_mesh, shardings_of

ROWS, EMBED, HIDDEN = 256, 512, 2048


def scattered_product() -> Any:
    """A product whose partial sums are scattered by hand, and then gathered."""
    mesh = make_mesh(data=2, model=4)

    def local(x, up, down):
        hidden = jax.nn.relu(x @ up)
        part = lax.psum_scatter(hidden @ down, 'model', scatter_dimension=0, tiled=True)
        part = part * lax.rsqrt(jnp.mean(part**2, axis=-1, keepdims=True) + 1e-6)
        return lax.all_gather(part, 'model', axis=0, tiled=True)

    forward = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P('data', None), P(None, 'model'), P('model', None)),
        out_specs=P('data', None),
        check_vma=False,
    )

    @jax.jit
    def step(x, up, down):
        return jax.grad(lambda w: jnp.mean(forward(x, *w) ** 2))((up, down))

    weights = array(mesh, (EMBED, HIDDEN), None, 'model'), array(mesh, (HIDDEN, EMBED), 'model')
    return step, (array(mesh, (ROWS, EMBED), 'data', None), *weights)


def recurrent() -> Any:
    """An LSTM that is scanned over time, with tensor parallelism."""
    mesh = make_mesh(data=4, model=2)

    def step(weights, xs):
        def cell(carry, x):
            h, c = carry
            gates = x @ weights['x'] + h @ weights['h']
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((xs.shape[1], EMBED))
        return lax.scan(cell, (zeros, zeros), xs)[1]

    weights = {n: array(mesh, (EMBED, 4 * EMBED), None, 'model') for n in 'xh'}
    out = NamedSharding(mesh, P(None, 'data', None))
    xs = array(mesh, (32, 64, EMBED), None, 'data', None)
    return jax.jit(step, out_shardings=out), (weights, xs)


def ensemble() -> Any:
    """Networks of an ensemble, mapped over an axis of the mesh by vmap."""
    mesh = make_mesh(member=4, data=2)

    def step(weights, x, y):
        def loss(w):
            out = jnp.tanh(x @ w['in']) @ w['out']
            return jnp.mean((out - y) ** 2)

        grads = jax.vmap(jax.grad(loss), spmd_axis_name='member')(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    weights = {
        'in': array(mesh, (8, EMBED, EMBED), 'member', None, None),
        'out': array(mesh, (8, EMBED, EMBED), 'member', None, None),
    }
    batch = array(mesh, (ROWS, EMBED), 'data', None)
    return jax.jit(step, donate_argnums=0, out_shardings=shardings_of(weights)), (
        weights,
        batch,
        batch,
    )


def low_rank() -> Any:
    """Adapters of low rank on frozen weights, which are sharded."""
    mesh = make_mesh(fsdp=8)

    def step(adapters, frozen, x):
        def loss(adapters):
            y = x
            for w, (a, b) in zip(frozen, adapters, strict=True):
                y = jax.nn.gelu(y @ w + (y @ a) @ b)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        grads = jax.grad(loss)(adapters)
        return jax.tree.map(lambda p, g: p - 0.1 * g, adapters, grads)

    half = {'dtype': jnp.bfloat16}
    frozen = [array(mesh, (EMBED, EMBED), 'fsdp', None, **half)] * 3
    adapters = [
        (array(mesh, (EMBED, 16), **half), array(mesh, (16, EMBED), **half)) for _ in range(3)
    ]
    x = array(mesh, (ROWS, EMBED), 'fsdp', None, **half)
    out = shardings_of(adapters)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (adapters, frozen, x)


def clusters() -> Any:
    """An iteration of k-means over rows that are sharded."""
    mesh = make_mesh(data=8)

    @jax.jit
    def step(centers, points):
        far = jnp.sum(points**2, 1)[:, None] - 2 * points @ centers.T + jnp.sum(centers**2, 1)
        nearest = jnp.argmin(far, axis=1)
        total = jax.ops.segment_sum(points, nearest, num_segments=centers.shape[0])
        number = jax.ops.segment_sum(jnp.ones(points.shape[0]), nearest, centers.shape[0])
        return total / jnp.maximum(number, 1)[:, None]

    return step, (array(mesh, (64, 128)), array(mesh, (8192, 128), 'data', None))


def sorted_rows() -> Any:
    """Rows that are sorted along a sharded dimension, and their running sums."""
    mesh = make_mesh(data=8)

    @jax.jit
    def step(scores):
        best = jnp.sort(scores, axis=1, descending=True)
        return jnp.cumsum(jax.nn.softmax(best), axis=1), jnp.argsort(scores, axis=0)

    return step, (array(mesh, (1024, 512), 'data', None),)


def spectrum() -> Any:
    """Two-dimensional Fourier transforms of a field whose rows are sharded."""
    mesh = make_mesh(data=8)
    rows = NamedSharding(mesh, P('data', None))

    def step(field):
        waves = jnp.fft.rfft2(field)
        return jnp.fft.irfft2(waves * jnp.exp(-jnp.abs(waves)))

    return jax.jit(step, out_shardings=rows), (array(mesh, (512, 512), 'data', None),)


def prefill() -> Any:
    """Attention over a prompt with grouped queries and tensor parallelism, without gradients."""
    mesh = make_mesh(data=2, model=4)
    heads, groups, size, length = 16, 4, 32, 256

    def step(w, x):
        q = jnp.einsum('ble,ehd->blhd', x, w['q'])
        k = jnp.einsum('ble,egd->blgd', x, w['k'])
        v = jnp.einsum('ble,egd->blgd', x, w['v'])
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jnp.einsum('blhd,hde->ble', mixed, w['o']), (k, v)

    half = {'dtype': jnp.bfloat16}
    weights = {
        'q': array(mesh, (EMBED, heads, size), None, 'model', None, **half),
        'k': array(mesh, (EMBED, groups, size), None, 'model', None, **half),
        'v': array(mesh, (EMBED, groups, size), None, 'model', None, **half),
        'o': array(mesh, (heads, size, EMBED), 'model', None, None, **half),
    }
    return jax.jit(step), (weights, array(mesh, (8, length, EMBED), 'data', None, None, **half))
