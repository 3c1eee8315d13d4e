"""Permuted rows of a batch, and scans over sharded stacks: the first suggestion is the mend.

Each mended program, and each that needs the same exchange, gets no such suggestion.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from plain_steps import line_of

from meshwright import forecast

ROWS, WIDTH, LAYERS = 256, 64, 8


@functools.cache
def make_mesh():
    return Mesh(np.array(jax.devices()), ('data',))


def struct(shape, *spec, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(make_mesh(), P(*spec)))


def changes(made):
    return [cause.change for _, cause in made.collectives if cause is not None and cause.change]


def sent(made):
    return sum(c.total_bytes for c, _ in made.collectives)


def cut_out(key, x, w):
    """Half of each row is another row's."""
    order = jax.random.permutation(key, ROWS)
    other = jnp.take(x, order, axis=0)
    return jnp.concatenate([x[:, :32], other[:, 32:]], 1) @ w


def roll_rows(key, x, w):
    shift = jax.random.randint(key, (), 1, ROWS // 8)
    other = jnp.roll(x.reshape(8, -1, WIDTH), shift, 1).reshape(x.shape)
    return jnp.concatenate([x[:, :32], other[:, 32:]], 1) @ w


def sort_rows(key, x, w):
    """The rows decide on their order, as the experts of tokens do."""
    return x[jnp.argsort(x @ w[:, 0])] @ w


def look_up(key, x, w):
    """A table of as many rows as the batch."""
    return jnp.take(w, jax.random.permutation(key, ROWS) % WIDTH, axis=0) + x


def ask(function):
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = struct((), dtype=key.dtype)
    loss = jax.jit(lambda key, x, w: jnp.mean(function(key, x, w) ** 2))
    return forecast(loss, key, struct((ROWS, WIDTH), 'data'), struct((WIDTH, WIDTH)))


def test_rows_in_a_random_order():
    made, mended = ask(cut_out), ask(roll_rows)
    (text,) = set(changes(made))
    assert f'reshape to (8, {ROWS // 8}, {WIDTH})' in text
    assert line_of(cut_out, 'jnp.take') in text
    cause = next(cause for _, cause in made.collectives if cause and cause.change)
    before, after = cause.effect.sent
    assert before == sent(made) and cause.confirmed is None
    # A ring sends the rows of a device 7 times. The sum of the loss is all that is left.
    assert before - after == 7 * ROWS // 8 * WIDTH * 4
    assert after == pytest.approx(sent(mended), abs=64)
    assert not changes(mended)


def split_up(key, x, w):
    """Microbatches of rows in a random order, one after the other."""
    parts = x[jax.random.permutation(key, ROWS)].reshape(4, ROWS // 4, WIDTH)
    return jax.lax.scan(lambda _, part: (None, part @ w), None, parts)[1]


def test_rows_in_a_random_order_that_are_split():
    made = ask(split_up)
    (text,) = set(changes(made))
    assert f'reshape to (8, {ROWS // 8}, {WIDTH})' in text and line_of(split_up, 'x[jax') in text


@pytest.mark.parametrize('function', [sort_rows, look_up])
def test_orders_that_are_needed(function):
    assert not [text for text in changes(ask(function)) if 'rows of the same device' in text]


def train(spec):
    """A step over a stack of layers, which it returns as it takes it."""

    def loss(stack, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0] ** 2)

    def step(params, x):
        gradient = jax.grad(lambda p: loss(p['stack'], x))(params)
        params = jax.tree.map(lambda p, g: p - g, params, gradient)
        return jax.lax.with_sharding_constraint(params, NamedSharding(make_mesh(), P(*spec)))

    args = {'stack': struct((LAYERS, 512, 512), *spec)}, struct((64, 512), 'data')
    return forecast(jax.jit(step, donate_argnums=0), *args, confirm=True)


def test_a_scan_over_the_dimension_that_is_sharded():
    made, mended = train(('data', None, None)), train((None, 'data', None))
    cause = next(cause for _, cause in made.collectives if cause and cause.change)
    assert "lay out params/stack as PartitionSpec(None, 'data', None)" in cause.change
    assert line_of(train, 'jax.lax.scan') in cause.change
    assert cause.confirmed and cause.effect.peak == (made.memory.peak, mended.memory.peak)
    assert mended.memory.peak < 0.7 * made.memory.peak
    assert not changes(mended)
