"""A cache that is sharded along what a product sums over is told to be sharded along its heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshwright import forecast


def ask(heads, *spec):
    """A step of decoding: keys of (rows, heads, length, size), of which one place is written."""
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ('data', 'model'))

    def step(w, cache, x, place):
        q = (x @ w).reshape(x.shape[0], heads, 32)
        keys = jax.lax.dynamic_update_slice(cache['keys'], q[:, :, None], (0, 0, place, 0))
        scores = jax.nn.softmax(jnp.einsum('bhd,bhtd->bht', q, keys))
        return jnp.einsum('bht,bhtd->bhd', scores, keys), {'keys': keys}

    def struct(shape, *spec, dtype='float32'):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    cache = {'keys': struct((8, heads, 256, 32), *spec)}
    args = struct((64, heads * 32), None, 'model'), cache, struct((8, 64), 'data')
    return forecast(jax.jit(step, donate_argnums=1), *args, struct((), dtype='int32'))


def changes(made):
    return [cause.change for _, cause in made.collectives if cause is not None and cause.change]


def test_the_heads_are_sharded_in_place_of_their_size():
    made = ask(8, 'data', None, None, 'model')
    mended = ask(8, 'data', 'model', None, None)
    text = "lay out cache/keys as PartitionSpec('data', 'model', None, None)"
    cause = next(c for _, c in made.collectives if c is not None and c.change.startswith(text))
    assert cause.effect.sent[0] == sum(c.total_bytes for c, _ in made.collectives)
    assert cause.effect.sent[1] == pytest.approx(sum(c.total_bytes for c, _ in mended.collectives))
    assert not changes(mended)


def test_heads_that_the_devices_do_not_divide():
    made = ask(2, 'data', None, None, 'model')
    assert not [text for text in changes(made) if 'lay out cache/keys' in text]
