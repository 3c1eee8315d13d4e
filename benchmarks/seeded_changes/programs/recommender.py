"""Tables of embeddings over all devices, and a small network over their rows."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

TABLES, ITEMS, SIZE, ROWS, HIDDEN = 4, 8192, 64, 256, 512


def build():
    mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)

    def layout(*spec):
        return NamedSharding(mesh, P(*spec))

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout(*spec))

    params = {
        'tables': array((TABLES, ITEMS, SIZE), jnp.float32, None, 'model', None),
        'first': array((TABLES * SIZE, HIDDEN), jnp.float32, None, 'model'),
        'second': array((HIDDEN, 1), jnp.float32, 'model', None),
    }
    moments = jax.tree.map(lambda a: a, params)
    items = array((ROWS, TABLES), jnp.int32, 'data', None)
    clicks = array((ROWS,), jnp.float32, 'data')

    def look_up(tables, items):
        found = [jnp.take(tables[i], items[:, i], axis=0) for i in range(TABLES)]
        rows = jnp.concatenate(found, axis=-1)
        return jax.lax.with_sharding_constraint(rows, layout('data', None))

    def score(params, items):
        rows = look_up(params['tables'], items).astype(jnp.bfloat16)
        hidden = jax.nn.relu(rows @ params['first'].astype(jnp.bfloat16))
        hidden = jax.lax.with_sharding_constraint(hidden, layout('data', 'model'))
        return (hidden @ params['second'].astype(jnp.bfloat16))[:, 0].astype(jnp.float32)

    def loss_of(params, items, clicks):
        scores = score(params, items)
        losses = jnp.maximum(scores, 0) - scores * clicks + jnp.log1p(jnp.exp(-jnp.abs(scores)))
        return jnp.mean(losses)

    def step(params, moments, items, clicks):
        loss, grads = jax.value_and_grad(loss_of)(params, items, clicks)
        moments = jax.tree.map(lambda m, g: m + g * g, moments, grads)
        params = jax.tree.map(
            lambda p, g, m: p - 0.1 * g * jax.lax.rsqrt(m + 1e-6), params, grads, moments
        )
        return params, moments, loss

    states = jax.tree.map(lambda a: a.sharding, (params, moments))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*states, layout()))
    return jitted, (params, moments, items, clicks)
