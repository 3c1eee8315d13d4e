"""Work that devices do alike or in parts too small: gathered rows, chains of products, tables."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from plain_steps import line_of, mesh_of, struct

from meshwright import explain, forecast, lint


def sent(made):
    return sum(c.total_bytes for c, _ in made.collectives)


def first_change(made):
    return next(cause for _, cause in made.collectives if cause is not None and cause.change)


def polar(x):
    x = x / jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True) + 1e-6)

    def iterate(_, x):
        return 1.5 * x - 0.5 * x @ (x.mT @ x)

    return jax.lax.fori_loop(0, 4, iterate, x)


def ask_polar(shape, *spec, lay=None):
    mesh = mesh_of(data=8)

    def step(w, g):
        g = g + 0.1 * w
        if lay is None:
            return w - 0.1 * polar(g)
        g = jax.lax.with_sharding_constraint(g, NamedSharding(mesh, lay))
        return w - 0.1 * jax.lax.with_sharding_constraint(polar(g), NamedSharding(mesh, lay))

    w = struct(mesh, shape, *spec)
    return forecast(jax.jit(step, donate_argnums=0, out_shardings=w.sharding), w, w)


@pytest.mark.parametrize(
    ('shape', 'spec', 'whole'),
    [((8, 64, 96), (None, None, 'data'), P('data')), ((64, 96), ('data',), P(None))],
    ids=['a stack', 'one matrix'],
)
def test_matrices_that_are_multiplied_with_themselves_are_gathered_once(shape, spec, whole):
    """A stack is divided between the matrices; of one matrix, each device needs all."""
    made, mended = ask_polar(shape, *spec), ask_polar(shape, *spec, lay=whole)
    cause = first_change(made)
    assert cause.confirmed and line_of(polar, 'x / jnp.sqrt') in cause.change
    assert f'PartitionSpec({whole[0]!r}, None' in cause.change
    assert cause.effect.sent == (sent(made), pytest.approx(sent(mended), rel=0.01))
    assert not any(cause is not None and cause.change for _, cause in mended.collectives)


def distances_of_all(x, w):
    """The spread of each cluster, of all rows on each device."""
    x = jax.lax.all_gather(x, 'data', tiled=True)
    w = jax.lax.all_gather(w, 'data', tiled=True)
    near = jax.nn.softmax(x @ w.T)
    return jnp.sum(near.max(1)) + jnp.sum(near.max(0))


def whiten_with_all(x, w):
    every = jax.lax.all_gather(x, 'data', tiled=True)
    scale = jnp.sqrt(jnp.mean(every * every, axis=0) + jnp.square(every.mean(0)))
    return jax.lax.psum(jnp.sum(x / scale), 'data')


def score_with_all(x, w):
    logits = jax.lax.all_gather(x, 'data', axis=1, tiled=True)
    picked = jnp.take_along_axis(logits, jnp.arange(64)[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, 1) - picked)


def smooth_from_all(x, w):
    field = jax.lax.all_gather(x, 'data', tiled=True)
    wide = jnp.concatenate([field[-1:], field, field[:1]])
    own = jax.lax.dynamic_slice_in_dim(wide, jax.lax.axis_index('data') * len(x), len(x) + 2)
    return jax.lax.psum(jnp.sum(own[:-2] * own[2:]), 'data')


ALIKE = {
    distances_of_all: ('leave out this all_gather', 'x = jax', 0.5),
    whiten_with_all: ('leave out the all_gather', 'every = jax', 1.0),
    score_with_all: ('leave out the all_gather', 'logits = jax', 1.0),
    smooth_from_all: ('send only the 2 elements of dimension 0', 'field = jax', 1 - 2 / 448),
}


@pytest.mark.parametrize('function', ALIKE, ids=lambda function: function.__name__)
def test_rows_that_are_gathered_for_what_their_devices_could_compute(function):
    """Of two equal gathers one can go, of one for sums all, of one for two edges all but these."""
    words, line, share = ALIKE[function]
    mesh = mesh_of(data=8)
    about = {'in_specs': (P('data'), P('data')), 'out_specs': P(), 'check_vma': False}
    mapped = jax.shard_map(function, mesh=mesh, **about)
    args = [struct(mesh, (512, 64), 'data')] * 2
    cause = first_change(forecast(jax.jit(mapped), *args, confirm=False))
    assert cause.change.startswith(words) and cause.avoidable
    (before, after), gathers = cause.effect.sent, (512 - 64) * 64 * 4
    whole = gathers * (2 if function is distances_of_all else 1)
    assert before - after == pytest.approx(share * whole, rel=0.01)
    assert cause.source.endswith(line_of(function, line))
    (finding,) = lint(jax.jit(mapped), *args, compile=False)
    assert finding.kind == 'needless exchange' and cause.change in finding.message


def attend_to_all(x, w):
    every = jax.lax.all_gather(x, 'data', tiled=True)
    return jnp.sum(jax.nn.softmax(x @ every.T) @ every)[None]


def test_rows_that_each_device_compares_with_its_own_are_gathered():
    mesh = mesh_of(data=8)
    about = {'in_specs': (P('data'), P()), 'out_specs': P('data')}
    mapped = jax.shard_map(attend_to_all, mesh=mesh, **about)
    args = struct(mesh, (512, 64), 'data'), struct(mesh, (64, 64))
    made = forecast(jax.jit(mapped), *args, confirm=False)
    assert not any(cause is not None and cause.change for _, cause in made.collectives)
    assert not lint(jax.jit(mapped), *args, compile=False)


def pool(x, near, w, narrow):
    if narrow:
        return jnp.mean(jax.nn.relu((x @ w)[near].mean(1)) ** 2)
    return jnp.mean(jax.nn.relu(x[near].mean(1) @ w) ** 2)


def ask_pool(narrow, width=16):
    mesh = mesh_of(data=8)
    step = jax.jit(jax.grad(lambda w, x, near: pool(x, near, w, narrow)))
    near = struct(mesh, (512, 4), 'data', dtype='int32')
    return forecast(step, struct(mesh, (256, width)), struct(mesh, (512, 256), 'data'), near)


def test_wide_rows_are_projected_before_they_are_looked_up():
    made, mended = ask_pool(False), ask_pool(True)
    cause = first_change(made)
    assert cause.change.startswith('project before the lookup at ')
    assert 'rows of 16 numbers move, and not of 256' in cause.change
    assert cause.source.endswith(line_of(pool, 'x[near]')) and cause.avoidable
    saved = cause.effect.sent[0] - cause.effect.sent[1]
    assert saved == pytest.approx(sent(made) - sent(mended), rel=0.1)
    assert not any(cause is not None and cause.change for _, cause in mended.collectives)
    wide = ask_pool(False, width=192)
    assert not any(cause is not None and cause.change for _, cause in wide.collectives)


def ask_table(rows, *spec):
    mesh = mesh_of(data=8)

    def loss(params, ids):
        return jnp.mean((params['words'][ids].mean(1) @ params['out']) ** 2)

    def step(params, ids):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, ids))

    params = {'words': struct(mesh, (rows, 32), *spec), 'out': struct(mesh, (32, 8))}
    shardings = jax.tree.map(lambda x: x.sharding, params)
    step = jax.jit(step, donate_argnums=0, out_shardings=shardings)
    return explain(step, params, struct(mesh, (64, 8), 'data', dtype='int32'))


def test_a_whole_table_of_which_few_rows_are_looked_up_is_sharded():
    """With as many lookups as rows, the whole gradient is needed anyway."""
    made, mended = ask_table(2**14), ask_table(2**14, 'data')
    wanted = "lay out the argument params/words as PartitionSpec('data', None)"
    assert made.suggestions[0].text.startswith(f'{wanted} (confirmed by compiling')
    cause = first_change(made.forecast)
    assert cause.effect.sent[1] == pytest.approx(sent(mended.forecast), rel=0.01)
    assert not mended.suggestions and not ask_table(2**10).suggestions
