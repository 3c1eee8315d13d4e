"""A layer of experts: tokens go to their experts by one-hot products, and experts over an axis."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

LAYERS, EXPERTS, EMBED, HIDDEN, GROUPS, TOKENS, CAPACITY = 2, 8, 256, 512, 8, 64, 16


def build():
    mesh = jax.make_mesh((2, 4), ('data', 'expert'), axis_types=(AxisType.Auto,) * 2)

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def lay_out(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    params = {
        'router': array((LAYERS, EMBED, EXPERTS), None, None, None),
        'wi': array((LAYERS, EXPERTS, EMBED, HIDDEN), None, 'expert', None, None),
        'wo': array((LAYERS, EXPERTS, HIDDEN, EMBED), None, 'expert', None, None),
    }
    tokens = array((GROUPS, TOKENS, EMBED), ('data', 'expert'), None, None)

    def route(x, router):
        logits = x.astype(jnp.float32) @ router
        gates = jax.nn.softmax(logits, axis=-1)
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), EXPERTS)
        place = jnp.cumsum(chosen, axis=1) * chosen - chosen
        slots = jax.nn.one_hot(jnp.sum(place, axis=-1).astype(jnp.int32), CAPACITY)
        dispatch = chosen[..., None] * slots[..., None, :]
        return dispatch.astype(jnp.bfloat16), jnp.sum(gates * chosen, axis=-1)

    def layer(x, weights):
        dispatch, gate = route(x, weights['router'])
        inputs = jnp.einsum('gtec,gtm->egcm', dispatch, x)
        inputs = lay_out(inputs, 'expert', 'data', None, None)
        hidden = jax.nn.relu(jnp.einsum('egcm,emh->egch', inputs, weights['wi'].astype(x.dtype)))
        outputs = jnp.einsum('egch,ehm->egcm', hidden, weights['wo'].astype(x.dtype))
        outputs = lay_out(outputs, 'expert', 'data', None, None)
        mixed = jnp.einsum('gtec,egcm->gtm', dispatch, outputs)
        x = x + mixed * gate[..., None].astype(x.dtype)
        return lay_out(x, ('data', 'expert'), None, None), None

    def loss_of(params, tokens):
        x = lay_out(tokens.astype(jnp.bfloat16), ('data', 'expert'), None, None)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params, tokens):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    states = jax.tree.map(lambda a: a.sharding, params)
    jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(states, NamedSharding(mesh, P())))
    return jitted, (params, tokens)
