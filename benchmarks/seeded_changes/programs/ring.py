"""A product whose weights travel around a ring, written by hand in a shard_map."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

ROWS, WIDTH, HIDDEN, DEVICES = 128, 512, 2048, 8


def build():
    mesh = jax.make_mesh((DEVICES,), ('x',), axis_types=(AxisType.Auto,))

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = {
        'up': array((WIDTH, HIDDEN), jnp.float32, None, 'x'),
        'down': array((HIDDEN, WIDTH), jnp.float32, 'x', None),
        'bias': array((HIDDEN,), jnp.float32, 'x'),
    }
    batch = array((ROWS, WIDTH), jnp.bfloat16, 'x', None)
    ring = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]

    def local(x, up, down, bias):
        up, down = up.astype(jnp.bfloat16), down.astype(jnp.bfloat16)
        total = jnp.zeros((x.shape[0], WIDTH), jnp.float32)
        for _ in range(DEVICES):
            hidden = jax.nn.relu(x @ up + bias.astype(jnp.bfloat16))
            total = total + jnp.dot(hidden, down, preferred_element_type=jnp.float32)
            up = jax.lax.ppermute(up, 'x', ring)
            down = jax.lax.ppermute(down, 'x', ring)
            bias = jax.lax.ppermute(bias, 'x', ring)
        return total

    def norm(total):
        mean = jax.lax.pmean(jnp.mean(total * total), 'x')
        return total * jax.lax.rsqrt(mean + 1e-6)

    def whole(x, up, down, bias):
        return norm(local(x, up, down, bias)).astype(jnp.bfloat16)

    forward = jax.shard_map(
        whole,
        mesh=mesh,
        in_specs=(P('x', None), P(None, 'x'), P('x', None), P('x')),
        out_specs=P('x', None),
    )

    def loss_of(params, batch):
        out = forward(batch, params['up'], params['down'], params['bias'])
        return jnp.mean((out - batch).astype(jnp.float32) ** 2)

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    states = jax.tree.map(lambda a: a.sharding, params)
    jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(states, NamedSharding(mesh, P())))
    return jitted, (params, batch)
