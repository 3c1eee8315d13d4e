"""What a change promises is what the mended program sends, by compiling that program, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from plain_steps import line_of, struct

from meshwright import forecast
from meshwright.report.suggestions import list_suggestions

ROWS, LENGTH, WIDTH, HIDDEN, WORDS, CHUNKS = 16, 256, 128, 512, 1024, 4


def make_mesh(*sizes):
    axes = ('data', 'model')[: len(sizes)]
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(np.reshape(jax.devices(), sizes), axes, axis_types=types)


def lay(mesh, x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def in_chunks(mended):
    """A head that is sharded over the rows' axis, and used in each chunk of the loss."""
    mesh = make_mesh(8)

    def step(p, x):
        def loss(p):
            head = lay(mesh, p['head'], None, None) if mended else p['head']
            chunks = (x @ p['w']).reshape(ROWS, CHUNKS, -1, WIDTH).swapaxes(0, 1)

            @jax.checkpoint
            def chunk(total, h):
                logits = lay(mesh, h @ head, 'data', None, None)
                return total + jax.nn.logsumexp(logits, -1).sum(), None

            return jax.lax.scan(chunk, 0.0, chunks)[0]

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    p = {'w': struct(mesh, (WIDTH, WIDTH)), 'head': struct(mesh, (WIDTH, WORDS), 'data')}
    out = {name: one.sharding for name, one in p.items()}
    step_at = line_of(in_chunks, 'lay(mesh, h' + ' @')
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    return jitted, (p, struct(mesh, (ROWS, LENGTH, WIDTH), 'data')), step_at, 'p/head once, before'


def make_layers(mesh, down, clip=lambda gradient: gradient, average=None):
    def step(p, a, x):
        def loss(p):
            y = x
            for layer in p:
                y = y + jax.nn.relu(y @ layer['up']) @ layer['down']
            return jnp.mean(y**2)

        p = jax.tree.map(lambda p, g: p - 0.1 * g, p, clip(jax.grad(loss)(p)))
        return p, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, a, p)

    def layers(up, down):
        shapes = {'up': ((WIDTH, HIDDEN), up), 'down': ((HIDDEN, WIDTH), down)}
        return [
            {name: struct(mesh, shape, *spec) for name, (shape, spec) in shapes.items()}
            for _ in range(2)
        ]

    up = P(None, 'model') if len(mesh.shape) > 1 else P('data')
    p = layers(up, down)
    a = layers(up, down) if average is None else layers(average, average)
    out = jax.tree.map(lambda one: one.sharding, (p, a))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
    return jitted, (p, a, struct(mesh, (ROWS, LENGTH, WIDTH), 'data'))


def on_a_wrong_axis(mended):
    down = P('model', None) if mended else P(None, 'model')
    return *make_layers(make_mesh(2, 4), down), '0/down', "PartitionSpec('model', None)"


def flat_gradients(mended):
    def clip(gradient):
        if mended:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
            return jax.tree.map(lambda g: g / norm, gradient)
        flat, restore = ravel_pytree(gradient)
        return restore(flat / jnp.linalg.norm(flat))

    made = make_layers(make_mesh(2, 4), P('model', None), clip)
    return *made, line_of(flat_gradients, 'restore = ' + 'ravel'), 'optax.global_norm'


def averages(mended):
    made = make_layers(make_mesh(8), P('data'), average=None if mended else P())
    return *made, 'a/0/down', "PartitionSpec('data', None)"


def in_microbatches(mended):
    """Rows that are split into microbatches, so that each of them is on a part of the devices."""
    mesh = make_mesh(8)

    def split(x):
        if mended:
            return jnp.moveaxis(x.reshape(-1, CHUNKS, *x.shape[1:]), 1, 0)
        return x.reshape(CHUNKS, -1, *x.shape[1:])

    def step(p, x):
        def loss(p, x):
            return jnp.mean((jax.nn.relu(x @ p['up']) @ p['down']) ** 2)

        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), split(x))
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, total)

    p = {'up': struct(mesh, (WIDTH, HIDDEN)), 'down': struct(mesh, (HIDDEN, WIDTH))}
    out = {name: one.sharding for name, one in p.items()}
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    x = struct(mesh, (32, LENGTH, WIDTH), 'data')
    return (
        jitted,
        (p, x),
        line_of(in_microbatches, 'return x.reshape(' + 'CHUNKS'),
        'jnp.moveaxis(x.reshape(',
    )


def merged_adapters(mended):
    """Frozen weights whose adapters are added to them, so that gradients of whole weights arise."""
    mesh = make_mesh(2, 4)

    def adapted(x, w, a, b):
        return x @ w + (x @ a) @ b if mended else x @ (w + a @ b)

    def step(p, frozen, x):
        def loss(p):
            y = jax.nn.relu(adapted(x, frozen['up'], p['up_a'], p['up_b']))
            return jnp.mean(adapted(y, frozen['down'], p['down_a'], p['down_b']) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    frozen = {
        'up': struct(mesh, (WIDTH, HIDDEN), None, 'model'),
        'down': struct(mesh, (HIDDEN, WIDTH), 'model'),
    }
    p = {
        'up_a': struct(mesh, (WIDTH, 4)),
        'up_b': struct(mesh, (4, HIDDEN), None, 'model'),
        'down_a': struct(mesh, (HIDDEN, 4), 'model'),
        'down_b': struct(mesh, (4, WIDTH)),
    }
    out = {name: one.sharding for name, one in p.items()}
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    x = struct(mesh, (ROWS, 16, WIDTH), 'data')
    return jitted, (p, frozen, x), line_of(merged_adapters, 'else x @ ' + '(w'), '(x @ a) @ b'


def sum_of_which_a_part_is_kept(mended):
    mesh = make_mesh(2, 4)

    def body(x, w):
        whole = jax.lax.all_gather(x, 'model', axis=1, tiled=True)
        if mended:
            return jax.lax.psum_scatter(whole @ w, 'model', scatter_dimension=1, tiled=True)
        total = jax.lax.psum(whole @ w, 'model')
        n = x.shape[1]
        return jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index('model') * n, n, 1)

    rows = P('data', 'model')
    specs = {'in_specs': (rows, P(None, None, 'model')), 'out_specs': rows}
    w = struct(mesh, (WIDTH, WIDTH, 4), None, None, 'model')
    args = struct(mesh, (ROWS, LENGTH, WIDTH), *rows), w
    step = jax.jit(jax.shard_map(lambda x, w: body(x, w[..., 0]), mesh=mesh, **specs))
    at = line_of(sum_of_which_a_part_is_kept, 'jax.lax.psum(' + 'whole')
    return step, args, at, 'scatter_dimension=1'


def gather_of_which_a_part_is_kept(mended):
    """Tokens are exchanged for heads."""
    mesh = make_mesh(2, 4)

    def body(x):
        if mended:
            return jax.lax.all_to_all(x, 'model', split_axis=2, concat_axis=1, tiled=True)
        whole = jax.lax.all_gather(x, 'model', axis=1, tiled=True)
        n = x.shape[2] // jax.lax.axis_size('model')
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index('model') * n, n, 2)

    specs = {'in_specs': P('data', 'model'), 'out_specs': P('data', None, 'model')}
    step = jax.jit(jax.shard_map(lambda x: jnp.tanh(body(jnp.tanh(x))), mesh=mesh, **specs))
    x = struct(mesh, (ROWS, LENGTH, WIDTH), 'data', 'model')
    at = line_of(gather_of_which_a_part_is_kept, 'jax.lax.all_gather(' + 'x')
    return step, (x,), at, 'split_axis=2, concat_axis=1'


def one_spec_in_two_places(mended):
    """Constraints that divide the sequence in place of the rows."""
    mesh = make_mesh(2, 4)
    spec = ('data', None, None) if mended else (None, 'data', None)

    def step(p, ids):
        def loss(p):
            y = lay(mesh, p['table'][ids], *spec)
            y = lay(mesh, y + jax.nn.relu(y @ p['up']) @ p['down'], *spec)
            return jnp.mean(jax.nn.logsumexp(lay(mesh, y @ p['head'], 'data', None, 'model'), -1))

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))

    p = {
        'table': struct(mesh, (WORDS, WIDTH)),
        'up': struct(mesh, (WIDTH, HIDDEN), None, 'model'),
        'down': struct(mesh, (HIDDEN, WIDTH), 'model'),
        'head': struct(mesh, (WIDTH, WORDS), None, 'model'),
    }
    out = {name: one.sharding for name, one in p.items()}
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    rows = NamedSharding(mesh, P('data'))
    ids = jax.ShapeDtypeStruct((ROWS, LENGTH), 'int32', sharding=rows)
    return jitted, (p, ids), 'test_promises.py', "PartitionSpec('data', None, None)) at"


def sent(made):
    return sum(collective.total_bytes for collective, _ in made.collectives)


FAULTS = [
    *(in_chunks, on_a_wrong_axis, flat_gradients, averages),
    *(in_microbatches, merged_adapters, sum_of_which_a_part_is_kept, one_spec_in_two_places),
    gather_of_which_a_part_is_kept,
]


@pytest.mark.parametrize('make', FAULTS)
def test_the_first_change_sends_what_it_promises(make):
    fn, args, where, text = make(mended=False)
    made = forecast(fn, *args)
    first = list_suggestions(made)[0]
    assert where in first.where and text in first.text, first
    fn, args, *_ = make(mended=True)
    mended = forecast(fn, *args)
    promised = (1 - first.saved) * sent(made)
    assert promised == pytest.approx(sent(mended), rel=0.1), (sent(made), first)
    assert not list_suggestions(mended)
