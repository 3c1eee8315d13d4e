"""Attention over sequences that are sharded between layers and gathered inside of them."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

LAYERS, BATCH, LENGTH, EMBED, HEADS, SIZE = 2, 4, 256, 256, 8, 32
KEPT = ('mixed',)


def build():
    mesh = jax.make_mesh((2, 4), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2)

    def lay_out(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    params = {
        'query': array((LAYERS, EMBED, HEADS, SIZE), None, None, 'tensor', None),
        'key': array((LAYERS, EMBED, HEADS, SIZE), None, None, 'tensor', None),
        'content': array((LAYERS, EMBED, HEADS, SIZE), None, None, 'tensor', None),
        'out': array((LAYERS, HEADS, SIZE, EMBED), None, 'tensor', None, None),
        'scale': array((LAYERS, EMBED), None, None),
    }
    x = array((BATCH, LENGTH, EMBED), 'data', 'tensor', None)

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return wide.astype(x.dtype) * scale

    def attend(h, weights):
        query = jnp.einsum('ble,ehs->blhs', h, weights['query'])
        key = jnp.einsum('ble,ehs->blhs', h, weights['key'])
        content = jnp.einsum('ble,ehs->blhs', h, weights['content'])
        scores = jnp.einsum('blhs,bmhs->bhlm', query, key, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores * SIZE**-0.5, axis=-1)
        mixed = jnp.einsum('bhlm,bmhs->blhs', shares.astype(h.dtype), content)
        mixed = checkpoint_name(lay_out(mixed, 'data', None, 'tensor', None), 'mixed')
        return jnp.einsum('blhs,hse->ble', mixed, weights['out'])

    def layer(x, weights):
        h = norm(x, weights['scale'])
        h = lay_out(h, 'data', None, None)
        out = attend(h, weights)
        out = lay_out(out, 'data', 'tensor', None)
        return x + out, None

    policy = jax.checkpoint_policies.save_only_these_names(*KEPT)

    def loss_of(params, x):
        y, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), params, grads), loss

    states = jax.tree.map(lambda a: a.sharding, params)
    jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(states, NamedSharding(mesh, P())))
    return jitted, (params, x)
