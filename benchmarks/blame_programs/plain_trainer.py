"""A trainer of one's own in plain jax: a dict of parameters, PartitionSpecs, no logical axes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint as lay_out
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

MESH = {'data': 4, 'model': 2}
LAYOUT = {
    'embedding': P('model', None),
    'head': P(None, 'model'),
    'down': P(None, 'model', None),
    'out': P(None, 'model', None),
    'qkv': P(None, None, None, 'model', None),
    'scale': P(None, None),
    'up': P(None, None, 'model'),
}
ROWS = P('data', None)
DIM, HIDDEN, HEADS, KV, VOCAB, LAYERS = 512, 2048, 8, 64, 8192, 4
BATCH, LENGTH = 32, 256


def shapes():
    return {
        'embedding': (VOCAB, DIM),
        'head': (DIM, VOCAB),
        'down': (LAYERS, HIDDEN, DIM),
        'out': (LAYERS, HEADS * KV, DIM),
        'qkv': (LAYERS, 3, DIM, HEADS, KV),
        'scale': (LAYERS, DIM),
        'up': (LAYERS, DIM, HIDDEN),
    }


def attend(w, x):
    qkv = jnp.einsum('bld,cdhk->cblhk', x, w['qkv'])
    q, k, v = lay_out(qkv, P(None, 'data', None, 'model', None))
    weights = jax.nn.softmax(jnp.einsum('blhk,bmhk->bhlm', q, k) / KV**0.5)
    mixed = jnp.einsum('bhlm,bmhk->blhk', weights, v)
    mixed = lay_out(mixed.reshape(*mixed.shape[:2], HEADS * KV), P('data', None, 'model'))
    return mixed @ w['out']


def layer(x, w):
    normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * w['scale']
    normed = lay_out(normed, P('data', None, None))
    x = lay_out(x + attend(w, normed), P('data', None, None))
    hidden = lay_out(jax.nn.relu(x @ w['up']), P('data', None, 'model'))
    x = lay_out(x + hidden @ w['down'], P('data', None, None))
    return x, None


def logits_of(params, tokens):
    x = lay_out(params['embedding'][tokens], P('data', None, None))
    scanned = {name: params[name] for name in ('down', 'out', 'qkv', 'scale', 'up')}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, scanned)
    return lay_out(x @ params['head'], P('data', None, 'model'))


def loss_of(params, batch):
    logits = logits_of(params, batch['inputs'])
    log_z = jax.nn.logsumexp(logits, axis=-1)
    hot = jax.nn.one_hot(batch['targets'], VOCAB)
    found = jnp.sum(logits * hot, axis=-1)
    return jnp.mean(log_z - found)


def step(params, momentum, batch):
    value, gradient = jax.value_and_grad(loss_of)(params, batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum)
    return params, momentum, value


def build(layout):
    """The mesh, the jitted step, its arguments, and their layouts."""
    sizes = tuple(MESH.values())
    mesh = Mesh(np.reshape(jax.devices()[: int(np.prod(sizes))], sizes), tuple(MESH))
    parameters = {name: NamedSharding(mesh, layout[name]) for name in shapes()}
    momentum = {
        name: NamedSharding(mesh, layout.get(f'momentum/{name}', layout[name])) for name in shapes()
    }
    rows = NamedSharding(mesh, layout.get('batch', ROWS))
    batch = {'inputs': rows, 'targets': rows}
    jitted = jax.jit(
        step,
        in_shardings=(parameters, momentum, batch),
        out_shardings=(parameters, momentum, NamedSharding(mesh, P())),
        donate_argnums=(0, 1),
    )
    arrays = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes().items()}
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return mesh, jitted, (arrays, dict(arrays), {'inputs': tokens, 'targets': tokens})
