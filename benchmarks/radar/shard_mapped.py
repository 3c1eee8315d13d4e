"""Programs whose exchanges are written by hand in a shard_map, as public code writes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from placing import array, make_mesh, shardings_of

ROWS, LENGTH, EMBED, HEADS, SIZE = 4, 512, 256, 8, 32


def ring_attention() -> Any:
    """Keys and values travel around a ring in a loop; the softmax is corrected as they arrive."""
    mesh, devices = make_mesh(sp=8), 8
    ring = [(i, (i + 1) % devices) for i in range(devices)]

    def local(q, k, v):
        def turn(carry, _):
            k, v, best, total, out = carry
            scores = jnp.einsum('blhd,bmhd->bhlm', q, k).astype(jnp.float32) / SIZE**0.5
            new = jnp.maximum(best, scores.max(-1))
            scale, weights = jnp.exp(best - new), jnp.exp(scores - new[..., None])
            total = total * scale + weights.sum(-1)
            mixed = jnp.einsum('bhlm,bmhd->bhld', weights.astype(v.dtype), v)
            out = out * scale[..., None] + mixed.astype(jnp.float32)
            k, v = lax.ppermute(k, 'sp', ring), lax.ppermute(v, 'sp', ring)
            return (k, v, new, total, out), None

        rows, length, heads, size = q.shape
        zeros = lax.pcast(jnp.zeros((rows, heads, length), jnp.float32), 'sp', to='varying')
        out = jnp.zeros((rows, heads, length, size), jnp.float32)
        start = (k, v, zeros - 1e30, zeros, lax.pcast(out, 'sp', to='varying'))
        (_, _, _, total, out), _ = lax.scan(jax.checkpoint(turn), start, None, length=devices)
        return jnp.swapaxes(out / total[..., None], 1, 2).astype(q.dtype)

    spec = P(None, 'sp', None, None)
    attend = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)

    @jax.jit
    def step(params, x):
        def loss(params):
            q, k, v = (jnp.einsum('ble,ehd->blhd', x, params[n]) for n in ('q', 'k', 'v'))
            out = jnp.einsum('blhd,hde->ble', attend(q, k, v), params['o'])
            return jnp.mean((out - x).astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(params)

    half = {'dtype': jnp.bfloat16}
    params = {n: array(mesh, (EMBED, HEADS, SIZE), None, None, None, **half) for n in 'qkv'}
    params['o'] = array(mesh, (HEADS, SIZE, EMBED), None, None, None, **half)
    return step, (params, array(mesh, (ROWS, LENGTH, EMBED), None, 'sp', None, **half))


def experts_all_to_all() -> Any:
    """Tokens travel to the devices of their experts and back by all_to_all."""
    mesh, experts, slots, hidden = make_mesh(data=2, expert=4), 8, 32, 512

    def local(x, router, up, down):
        chance = jax.nn.softmax((x @ router).astype(jnp.float32))
        best = jnp.argmax(chance, axis=-1)
        hot = jax.nn.one_hot(best, experts)
        slot = (jnp.cumsum(hot, axis=0) * hot - 1).astype(jnp.int32)
        mask = hot[..., None] * jax.nn.one_hot(slot, slots)
        sent = jnp.einsum('tes,td->esd', mask, x.astype(jnp.float32)).astype(x.dtype)
        sent = lax.all_to_all(sent, 'expert', 0, 1, tiled=True)
        made = jnp.einsum('esd,edf->esf', sent, up)
        made = jnp.einsum('esf,efd->esd', jax.nn.gelu(made), down)
        back = lax.all_to_all(made, 'expert', 1, 0, tiled=True)
        gate = jnp.take_along_axis(chance, best[:, None], axis=1)
        load = lax.pmean(hot.mean(0), ('data', 'expert'))
        out = jnp.einsum('tes,esd->td', mask, back.astype(jnp.float32)) * gate
        return out.astype(x.dtype), jnp.sum(load**2)

    tokens, weights = P(('data', 'expert'), None), P('expert', None, None)
    layer = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(tokens, P(), weights, weights),
        out_specs=(tokens, P()),
    )

    def step(params, x):
        def loss(params):
            out, load = layer(x, params['router'], params['up'], params['down'])
            return jnp.mean((out - x).astype(jnp.float32) ** 2) + 0.01 * load

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    half = {'dtype': jnp.bfloat16}
    params = {
        'router': array(mesh, (EMBED, experts), None, None, **half),
        'up': array(mesh, (experts, EMBED, hidden), 'expert', None, None, **half),
        'down': array(mesh, (experts, hidden, EMBED), 'expert', None, None, **half),
    }
    x = array(mesh, (1024, EMBED), ('data', 'expert'), None, **half)
    return jax.jit(step, donate_argnums=0), (params, x)


def pipeline() -> Any:
    """Microbatches travel through stages by ppermute, in a scan."""
    mesh, stages, parts, rows = make_mesh(stage=4, data=2), 4, 8, 16

    def local(weights, x):
        up, down = weights['up'][0], weights['down'][0]
        index = lax.axis_index('stage')

        def tick(carry, i):
            current, done = carry
            fresh = lax.dynamic_index_in_dim(x, jnp.minimum(i, parts - 1), keepdims=False)
            current = jnp.where(index == 0, fresh, current)
            made = current + jax.nn.gelu(current @ up) @ down
            at = jnp.maximum(i - stages + 1, 0)
            kept = jnp.where((index == stages - 1) & (i >= stages - 1), made, done[at])
            done = lax.dynamic_update_index_in_dim(done, kept, at, 0)
            ring = [(j, (j + 1) % stages) for j in range(stages)]
            return (lax.ppermute(made, 'stage', ring), done), None

        start = lax.pcast((jnp.zeros_like(x[0]), jnp.zeros_like(x)), 'stage', to='varying')
        (_, done), _ = lax.scan(jax.checkpoint(tick), start, jnp.arange(parts + stages - 1))
        return lax.psum(jnp.where(index == stages - 1, done, 0), 'stage')

    spec = P(None, 'data', None)
    run = jax.shard_map(local, mesh=mesh, in_specs=(P('stage'), spec), out_specs=spec)

    def step(weights, x):
        def loss(weights):
            return jnp.mean((run(weights, x) - x) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, grads), value

    weights = {
        'up': array(mesh, (stages, EMBED, 2 * EMBED), 'stage', None, None),
        'down': array(mesh, (stages, 2 * EMBED, EMBED), 'stage', None, None),
    }
    return jax.jit(step, donate_argnums=0), (weights, array(mesh, (parts, rows, EMBED), *spec))


def vocabulary_loss() -> Any:
    """Cross entropy over a vocabulary that is sharded, as Megatron computes it."""
    mesh, vocab, rows = make_mesh(data=2, model=4), 8192, 512

    def local(x, table, labels):
        logits = jnp.dot(x, table.T, preferred_element_type=jnp.float32)
        top = lax.pmax(lax.stop_gradient(logits.max(-1)), 'model')
        shifted = logits - top[:, None]
        total = lax.psum(jnp.exp(shifted).sum(-1), 'model')
        first = lax.axis_index('model') * table.shape[0]
        at = labels - first
        mine = (at >= 0) & (at < table.shape[0])
        picked = jnp.take_along_axis(shifted, jnp.where(mine, at, 0)[:, None], axis=1)[:, 0]
        target = lax.psum(jnp.where(mine, picked, 0), 'model')
        return lax.pmean(jnp.mean(jnp.log(total) - target), 'data')

    loss = jax.shard_map(
        local, mesh=mesh, in_specs=(P('data', None), P('model', None), P('data')), out_specs=P()
    )

    def step(table, x, labels):
        value, grad = jax.value_and_grad(lambda t: loss(x, t.astype(jnp.bfloat16), labels))(table)
        return table - 0.1 * grad, value

    table = array(mesh, (vocab, EMBED), 'model', None)
    x = array(mesh, (rows, EMBED), 'data', None, dtype=jnp.bfloat16)
    labels = array(mesh, (rows,), 'data', dtype=jnp.int32)
    out = (shardings_of(table), None)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (table, x, labels)
