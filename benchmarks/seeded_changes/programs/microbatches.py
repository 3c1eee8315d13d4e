"""Gradients that are added up over microbatches, with state that is sharded over data (ZeRO)."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

LAYERS, WIDTH, ROWS, PARTS = 2, 512, 64, 4


def build():
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))

    def layout(*spec):
        return NamedSharding(mesh, P(*spec))

    params = {
        f'layer{i}': jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=layout())
        for i in range(LAYERS)
    }
    state = {
        name: {
            part: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=layout('data', None))
            for part in ('master', 'mu', 'nu')
        }
        for name, a in params.items()
    }
    batch = jax.ShapeDtypeStruct(
        (PARTS, ROWS, WIDTH), jnp.bfloat16, sharding=layout(None, 'data', None)
    )

    def loss_of(params, x):
        y = x
        for name in sorted(params):
            y = jnp.tanh(y @ params[name])
        return jnp.mean((y - x).astype(jnp.float32) ** 2)

    def accumulate(params, batch):
        def add(total, x):
            grads = jax.grad(loss_of)(params, x)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            total = jax.tree.map(jnp.add, total, grads)
            return jax.lax.with_sharding_constraint(total, layout('data', None)), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        total, _ = jax.lax.scan(add, zeros, batch)
        return jax.tree.map(lambda g: g / PARTS, total)

    def update(state, grad):
        mu = 0.9 * state['mu'] + 0.1 * grad
        nu = 0.99 * state['nu'] + 0.01 * grad * grad
        master = state['master'] - 1e-3 * mu * jax.lax.rsqrt(nu + 1e-8)
        return {'master': master, 'mu': mu, 'nu': nu}

    def step(params, state, batch):
        grads = accumulate(params, batch)
        state = {name: update(state[name], grads[name]) for name in params}
        params = {name: state[name]['master'].astype(jnp.bfloat16) for name in params}
        return params, state

    shardings = jax.tree.map(lambda a: a.sharding, (params, state))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings), (params, state, batch)
