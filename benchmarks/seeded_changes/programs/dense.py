"""A regression network whose layers are gathered when they are needed (FSDP), with momentum."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

LAYERS, WIDTH, HIDDEN, ROWS = 2, 512, 1024, 64


def build():
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = {
        'up': array((LAYERS, WIDTH, HIDDEN), jnp.float32, None, 'data', None),
        'down': array((LAYERS, HIDDEN, WIDTH), jnp.float32, None, 'data', None),
        'scale': array((LAYERS, WIDTH), jnp.float32),
        'head': array((WIDTH, WIDTH), jnp.float32, 'data', None),
    }
    momentum = dict(params)
    batch = {
        'x': array((ROWS, WIDTH), jnp.float32, 'data', None),
        'y': array((ROWS, WIDTH), jnp.float32, 'data', None),
    }

    def rows(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data', None)))

    def norm(x, scale):
        x = x.astype(jnp.float32)
        return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)) * scale

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(x, weights):
        h = norm(x, weights['scale']).astype(jnp.bfloat16)
        h = jax.nn.gelu(h @ weights['up'].astype(jnp.bfloat16))
        h = h @ weights['down'].astype(jnp.bfloat16)
        return rows(x + h), None

    def loss_of(params, batch):
        x = rows(batch['x'].astype(jnp.bfloat16))
        layers = {name: params[name] for name in ('up', 'down', 'scale')}
        x, _ = jax.lax.scan(layer, x, layers)
        out = x @ params['head'].astype(jnp.bfloat16)
        return jnp.mean((out.astype(jnp.float32) - batch['y']) ** 2)

    def step(params, momentum, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum)
        return params, momentum, loss

    shardings = jax.tree.map(lambda a: a.sharding, (params, momentum))
    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=(*shardings, NamedSharding(mesh, P())),
    )
    return jitted, (params, momentum, batch)
