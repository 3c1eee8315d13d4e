"""One step of a decoder with a cache of keys and values, which it updates in place."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

LAYERS, VOCAB, EMBED, HEADS, SIZE, ROWS, LENGTH = 2, 2048, 256, 8, 32, 16, 512


def build():
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    weights = {
        'embedding': array((VOCAB, EMBED), jnp.bfloat16, 'model', None),
        'qkv': array((LAYERS, EMBED, 3, HEADS, SIZE), jnp.bfloat16, None, None, None, 'model'),
        'out': array((LAYERS, HEADS, SIZE, EMBED), jnp.bfloat16, None, 'model', None, None),
        'up': array((LAYERS, EMBED, 4 * EMBED), jnp.bfloat16, None, None, 'model'),
        'down': array((LAYERS, 4 * EMBED, EMBED), jnp.bfloat16, None, 'model', None),
    }
    cache = {
        name: array((LAYERS, ROWS, LENGTH, HEADS, SIZE), jnp.bfloat16, None, 'data', None, 'model')
        for name in ('keys', 'values')
    }
    tokens = array((ROWS,), jnp.int32, 'data')
    position = array((), jnp.int32)

    def attend(x, layer, keys, values, position):
        query, key, value = jnp.einsum('be,ethd->tbhd', x, layer['qkv'])
        keys = jax.lax.dynamic_update_slice(keys, key[:, None], (0, position, 0, 0))
        values = jax.lax.dynamic_update_slice(values, value[:, None], (0, position, 0, 0))
        scores = jnp.einsum('bhd,bthd->bht', query, keys).astype(jnp.float32) / SIZE**0.5
        scores = jnp.where(jnp.arange(LENGTH) <= position, scores, -1e9)
        shares = jax.nn.softmax(scores, axis=-1).astype(jnp.bfloat16)
        mixed = jnp.einsum('bht,bthd->bhd', shares, values)
        return jnp.einsum('bhd,hde->be', mixed, layer['out']), keys, values

    def decode(weights, cache, tokens, position):
        x = weights['embedding'][tokens]
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data', None)))

        def one(x, given):
            layer, keys, values = given
            added, keys, values = attend(x, layer, keys, values, position)
            x = x + added
            x = x + jax.nn.gelu(x @ layer['up']) @ layer['down']
            return x, (keys, values)

        layers = {name: weights[name] for name in ('qkv', 'out', 'up', 'down')}
        x, (keys, values) = jax.lax.scan(one, x, (layers, cache['keys'], cache['values']))
        logits = (x @ weights['embedding'].T).astype(jnp.float32)
        return jnp.argmax(logits, axis=-1), {'keys': keys, 'values': values}

    caches = jax.tree.map(lambda a: a.sharding, cache)
    jitted = jax.jit(
        decode, donate_argnums=(1,), out_shardings=(NamedSharding(mesh, P('data')), caches)
    )
    return jitted, (weights, cache, tokens, position)
