"""Layers of experts in plain jax: PartitionSpecs, mesh axes 'dp' and 'tp', Adam written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint as lay_out
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

MESH = {'dp': 2, 'tp': 4}
LAYOUT = {
    'table': P('tp', 'dp'),
    'unembed': P('dp', 'tp'),
    'query': P(None, 'dp', 'tp', None),
    'key': P(None, 'dp', 'tp', None),
    'value': P(None, 'dp', 'tp', None),
    'merge': P(None, 'tp', None, 'dp'),
    'router': P(None, None, None),
    'grow': P(None, 'tp', 'dp', None),
    'shrink': P(None, 'tp', None, 'dp'),
}
DIM, HIDDEN, HEADS, KV, VOCAB, LAYERS, EXPERTS = 256, 512, 8, 32, 8192, 3, 8
BATCH, LENGTH = 16, 128
SLOTS = 2 * BATCH * LENGTH // EXPERTS // 8  # of an expert, for each of 8 groups of rows


def shapes():
    return {
        'table': (VOCAB, DIM),
        'unembed': (DIM, VOCAB),
        'query': (LAYERS, DIM, HEADS, KV),
        'key': (LAYERS, DIM, HEADS, KV),
        'value': (LAYERS, DIM, HEADS, KV),
        'merge': (LAYERS, HEADS, KV, DIM),
        'router': (LAYERS, DIM, EXPERTS),
        'grow': (LAYERS, EXPERTS, DIM, HIDDEN),
        'shrink': (LAYERS, EXPERTS, HIDDEN, DIM),
    }


def attend(w, x):
    q = lay_out(jnp.einsum('bld,dhk->blhk', x, w['query']), P('dp', None, 'tp', None))
    k = lay_out(jnp.einsum('bld,dhk->blhk', x, w['key']), P('dp', None, 'tp', None))
    v = lay_out(jnp.einsum('bld,dhk->blhk', x, w['value']), P('dp', None, 'tp', None))
    weights = jax.nn.softmax(jnp.einsum('blhk,bmhk->bhlm', q, k) / KV**0.5)
    mixed = lay_out(jnp.einsum('bhlm,bmhk->blhk', weights, v), P('dp', None, 'tp', None))
    return jnp.einsum('blhk,hkd->bld', mixed, w['merge'])


def send(w, x):
    """Each row of a group goes to a slot of its best expert, if one is free."""
    groups = lay_out(x.reshape(8, -1, DIM), P('dp', None, None))
    chance = jax.nn.softmax(groups @ w['router'])
    best = jax.nn.one_hot(jnp.argmax(chance, axis=-1), EXPERTS)
    slot = jnp.cumsum(best, axis=1) * best - 1
    sent = best[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), SLOTS)
    sent = lay_out(sent, P('dp', None, 'tp', None))
    rows = lay_out(jnp.einsum('gtd,gtes->gesd', groups, sent), P('dp', 'tp', None, None))
    hidden = jax.nn.relu(jnp.einsum('gesd,edf->gesf', rows, w['grow']))
    hidden = lay_out(hidden, P('dp', 'tp', None, None))
    made = lay_out(jnp.einsum('gesf,efd->gesd', hidden, w['shrink']), P('dp', 'tp', None, None))
    back = jnp.einsum('gesd,gtes,gte->gtd', made, sent, chance)
    return lay_out(back, P('dp', None, None)).reshape(x.shape)


def layer(x, w):
    x = lay_out(x + attend(w, x), P('dp', None, None))
    x = lay_out(x + send(w, x), P('dp', None, None))
    return x, None


def loss_of(params, batch):
    x = lay_out(params['table'][batch['inputs']], P('dp', None, None))
    stacked = {n: a for n, a in params.items() if n not in ('table', 'unembed')}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, stacked)
    logits = lay_out(x @ params['unembed'], P('dp', None, 'tp'))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    hot = jax.nn.one_hot(batch['targets'], VOCAB)
    return jnp.mean(log_z - jnp.sum(logits * hot, axis=-1))


def step(params, first, second, batch):
    value, gradient = jax.value_and_grad(loss_of)(params, batch)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, gradient)
    params = jax.tree.map(
        lambda p, m, v: p - 0.01 * m / (jnp.sqrt(v) + 1e-8), params, first, second
    )
    return params, first, second, value


def build(layout):
    """The mesh, the jitted step, its arguments, and their layouts."""
    sizes = tuple(MESH.values())
    mesh = Mesh(np.reshape(jax.devices()[: int(np.prod(sizes))], sizes), tuple(MESH))

    def shardings(of):
        specs = {n: layout.get(f'{of}/{n}', layout[n]) for n in shapes()}
        return {n: NamedSharding(mesh, spec) for n, spec in specs.items()}

    state = shardings('params'), shardings('first'), shardings('second')
    rows = NamedSharding(mesh, layout.get('batch', P('dp', None)))
    jitted = jax.jit(
        step,
        in_shardings=(*state, {'inputs': rows, 'targets': rows}),
        out_shardings=(*state, NamedSharding(mesh, P())),
        donate_argnums=(0, 1, 2),
    )
    arrays = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes().items()}
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    batch = {'inputs': tokens, 'targets': tokens}
    return mesh, jitted, (arrays, dict(arrays), dict(arrays), batch)
