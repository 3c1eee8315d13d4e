"""What a product sums over is sharded, and a dimension that it only maps could be: it is told.

A cache is sharded along its heads in place of their size, and matrices by layers in an optimizer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from plain_steps import line_of

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


@pytest.mark.parametrize(
    ('heads', 'fault', 'spec'),
    [
        (8, ('data', None, None, 'model'), ('data', 'model', None, None)),
        (2, ('data', None, None, 'model'), ('data', None, 'model', None)),
        (8, (('data', 'model'),), ('data', 'model', None, None)),
    ],
    ids=['heads', 'heads that the devices do not divide', 'heads in place of rows'],
)
def test_another_dimension_of_a_cache_is_sharded(heads, fault, spec):
    """The heads are, or else the length. The change does what the program with it does."""
    made, mended = ask(heads, *fault), ask(heads, *spec)
    text = f'lay out the argument cache/keys as PartitionSpec{spec!r}'
    cause = next(c for _, c in made.collectives if c is not None and c.change == text)
    assert cause.effect.sent[0] == sum(c.total_bytes for c, _ in made.collectives)
    assert cause.effect.sent[1] == pytest.approx(sum(c.total_bytes for c, _ in mended.collectives))
    assert not changes(mended)


def orthogonalize(g, lay=lambda x: x):
    """Three iterations on the matrices of all layers, as in Muon."""
    norm = jnp.linalg.norm(g, axis=(-2, -1), keepdims=True)
    x = lay(g / (norm + 1e-7))
    for _ in range(3):
        x = 2 * x - jnp.einsum('lij,lkj,lkm->lim', x, x, x)
    return x


def ask_optimizer(layers, *, by_layers=False):
    """An optimizer of matrices (layers, 64, 256), whose columns are sharded over 8 devices."""
    mesh = Mesh(np.array(jax.devices()), ('fsdp',))

    def lay(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('fsdp')))

    def step(params, m, batch):
        def loss(p):
            return jnp.mean(jnp.tanh(jnp.einsum('bi,lij->lbj', batch, p)) ** 2)

        m = 0.9 * m + jax.grad(loss)(params)
        return params - orthogonalize(m, lay if by_layers else lambda x: x), m

    columns = NamedSharding(mesh, P(None, None, 'fsdp'))
    p = jax.ShapeDtypeStruct((layers, 64, 256), 'float32', sharding=columns)
    batch = jax.ShapeDtypeStruct((64, 64), 'float32', sharding=NamedSharding(mesh, P('fsdp')))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(columns, columns))
    return forecast(jitted, p, p, batch, confirm=True)


def test_matrices_of_an_optimizer_are_laid_out_by_layers():
    """The change is the constraint of the mended program, with its figures."""
    made, mended = ask_optimizer(16), ask_optimizer(16, by_layers=True)
    cause = next(cause for _, cause in made.collectives if cause is not None and cause.change)
    assert "with_sharding_constraint(x, PartitionSpec('fsdp', None, None))" in cause.change
    assert line_of(orthogonalize, 'x = lay(g /') in cause.change and cause.confirmed
    totals = [sum(c.total_bytes for c, _ in one.collectives) for one in (made, mended)]
    assert cause.effect.sent == (totals[0], pytest.approx(totals[1], rel=0.01))
    assert not changes(mended)


def test_layers_that_the_devices_do_not_divide():
    assert not changes(ask_optimizer(12))


def make_features(w, x, lay=lambda h: h):
    h = lay(jnp.einsum('bld,df->blf', x, w))
    return jnp.mean(jnp.cumsum(jnp.sort(h, -1), -1) ** 2)


def ask_sorted(*, by_length=False):
    """A loss of sorted features (16, 64, 512), which 4 devices of 'model' divide."""
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ('data', 'model'))

    def lay(h):
        return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P('data', 'model')))

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

    step = jax.jit(lambda w, x: make_features(w, x, lay if by_length else lambda h: h))
    args = struct((32, 512), None, 'model'), struct((16, 64, 32), 'data')
    return forecast(step, *args, confirm=True)


def test_an_array_that_an_operation_needs_whole_is_sharded_along_another_dimension():
    made, mended = ask_sorted(), ask_sorted(by_length=True)
    cause = next(cause for _, cause in made.collectives if cause is not None and cause.change)
    assert "with_sharding_constraint(x, PartitionSpec('data', 'model', None))" in cause.change
    assert line_of(make_features, 'jnp.einsum') in cause.change and cause.confirmed
    totals = [sum(c.total_bytes for c, _ in one.collectives) for one in (made, mended)]
    assert cause.effect.sent == (totals[0], pytest.approx(totals[1], rel=0.01))
    assert totals[1] < 0.5 * totals[0] and not changes(mended)
