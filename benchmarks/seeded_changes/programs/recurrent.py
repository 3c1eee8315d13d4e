"""A linear recurrence over time, with an update by hand: devices update parts of the weights."""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

LAYERS, WIDTH, STATE, BATCH, TIME, STEPS = 2, 512, 1024, 32, 64, 2


def recur(decay, inputs):
    """Runs h[t] = decay[t] * h[t - 1] + inputs[t] in a logarithmic number of steps."""

    def join(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    return lax.associative_scan(join, (decay, inputs), axis=1)[1]


@jax.remat
def cell(x, weights):
    a, b, c = weights
    x16 = x.astype(jnp.bfloat16)
    decay = jax.nn.sigmoid((x16 @ a.astype(jnp.bfloat16)).astype(jnp.float32))
    inputs = (x16 @ b.astype(jnp.bfloat16)).astype(jnp.float32)
    state = recur(decay, (1 - decay) * inputs)
    return x + (state.astype(jnp.bfloat16) @ c.astype(jnp.bfloat16)).astype(x.dtype), None


def error(weights, signal):
    out, _ = lax.scan(cell, signal[:, :-1], weights)
    return jnp.mean(jnp.square(out - signal[:, 1:]))


def device_step(parts, energy, signal):
    """The weights come in parts; gradients of all devices are summed and shared out."""
    weights = jax.tree.map(lambda w: lax.all_gather(w, 'dev', axis=1, tiled=True), parts)
    slices = signal.reshape(STEPS, -1, *signal.shape[1:])

    def accumulate(total, rows):
        loss, slopes = jax.value_and_grad(error)(weights, rows)
        return jax.tree.map(jnp.add, total, slopes), loss

    nothing = jax.tree.map(jnp.zeros_like, weights)
    total, losses = lax.scan(accumulate, nothing, slices)
    mine = jax.tree.map(
        lambda g: lax.psum_scatter(g, 'dev', scatter_dimension=1, tiled=True) / (8 * STEPS), total
    )
    energy = jax.tree.map(lambda e, g: 0.99 * e + 0.01 * g * g, energy, mine)
    parts = jax.tree.map(lambda w, g, e: w - 1e-3 * g / jnp.sqrt(e + 1e-8), parts, mine, energy)
    return parts, energy, lax.pmean(jnp.mean(losses), 'dev')


def describe(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def build():
    mesh = jax.make_mesh((8,), ('dev',), axis_types=(AxisType.Auto,))
    divided, over_rows, alone = P(None, 'dev'), P('dev'), P()

    spell = ft.partial(describe, mesh)
    parts = (
        spell((LAYERS, WIDTH, STATE), divided),
        spell((LAYERS, WIDTH, STATE), divided),
        spell((LAYERS, STATE, WIDTH), divided),
    )
    energy = tuple(parts)
    signal = spell((BATCH, TIME + 1, WIDTH), over_rows)
    run = jax.shard_map(
        device_step,
        mesh=mesh,
        in_specs=(divided, divided, over_rows),
        out_specs=(divided, divided, alone),
        check_vma=False,
    )
    return jax.jit(run, donate_argnums=(0, 1)), (parts, energy, signal)
