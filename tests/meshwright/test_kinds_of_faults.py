"""One fault of each kind: the first change names its line or array, and its promise comes true."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from plain_steps import line_of

from meshwright import forecast, lint
from meshwright.calls.held import named_role
from meshwright.report.answers import answer_of

ROWS, LENGTH, WIDTH, HIDDEN, HEADS, SIZE = 16, 32, 64, 256, 4, 16
COLUMNS, INNER = P('data', 'model'), P('model', 'data')
SPECS = {'gate': COLUMNS, 'up': COLUMNS, 'down': INNER, 'q': COLUMNS, 'k': COLUMNS, 'o': INNER}
SHAPES = {
    **dict.fromkeys(['gate', 'up'], (WIDTH, HIDDEN)),
    'down': (HIDDEN, WIDTH),
    **dict.fromkeys(['q', 'k'], (WIDTH, HEADS * SIZE)),
    'o': (HEADS * SIZE, WIDTH),
}


@functools.cache
def make_mesh():
    types = (AxisType.Auto,) * 2
    return Mesh(np.reshape(jax.devices(), (2, 4)), ('data', 'model'), axis_types=types)


def lay(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(make_mesh(), P(*spec)))


def heads_first(x):
    return x.reshape(ROWS, LENGTH, HEADS, SIZE)


def heads_last(x):
    return x.reshape(ROWS, LENGTH, SIZE, HEADS).swapaxes(2, 3)


def attend(split, p, x):
    q, k = split(x @ p['q']), split(x @ p['k'])
    scores = jax.nn.softmax(jnp.einsum('bthd,bshd->bhts', q, k))
    y = jnp.einsum('bhts,bshd->bthd', scores, k)
    y = y.swapaxes(2, 3) if split is heads_last else y
    return x + y.reshape(ROWS, LENGTH, HEADS * SIZE) @ p['o']


def feed(p, x):
    return lay(x + (jax.nn.silu(x @ p['gate']) * (x @ p['up'])) @ p['down'], 'data', None, None)


def leave(gradient):
    return gradient


def whole(gradient):
    return {k: lay(g) for k, g in gradient.items()}


def make_step(split=None, constrain=leave, specs=SPECS, moments=None, returned=None):
    """A step with momentum, and its arguments."""
    mesh, names = make_mesh(), ('gate', 'up', 'down') if split is None else ('q', 'k', 'o')

    def step(params, opt, batch):
        def loss(params):
            x = batch if split is None else attend(split, params, batch)
            return jnp.mean((feed(params, x) if split is None else lay(x, 'data')) ** 2)

        gradient = constrain(jax.grad(loss)(params))
        opt = jax.tree.map(lambda m, g: 0.9 * m + g, opt, gradient)
        return jax.tree.map(lambda p, m: p - m, params, opt), opt

    def structs(specs):
        return {
            k: jax.ShapeDtypeStruct(SHAPES[k], 'float32', sharding=NamedSharding(mesh, specs[k]))
            for k in names
        }

    state = structs(specs), structs(moments or specs)
    rows = NamedSharding(mesh, P('data'))
    batch = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), 'float32', sharding=rows)
    out = jax.tree.map(lambda x: x.sharding, (state[0], structs(returned or moments or specs)))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out), (*state, batch)


def sent(made):
    return sum(c.total_bytes for c, _ in made.collectives)


MOVED = {'gate': INNER, 'up': INNER, 'down': COLUMNS}
FAULTS = {
    'gradients': ({'constrain': whole}, {}, 'with_sharding_constraint(x, ...) with the layout of'),
    'a split': (
        {'split': heads_last},
        {'split': heads_first},
        f'write reshape({ROWS}, {LENGTH}, {HEADS}, {SIZE}) in place of',
    ),
    'moments': ({'moments': MOVED}, {}, 'like its parameter params/'),
    'a result': ({'returned': dict.fromkeys(SPECS, P())}, {}, 'return opt/'),
    'a whole kernel': (
        {'specs': {**SPECS, 'gate': P()}},
        {},
        "lay out the argument params/gate as PartitionSpec('data', 'model')",
    ),
}


@pytest.mark.parametrize('kind', FAULTS)
def test_the_first_change_is_the_mend(kind):
    """Compiled with it, the program sends what it sends without the fault, to the byte."""
    fault, mended, text = FAULTS[kind]
    step, args = make_step(**fault)
    good, good_args = make_step(**mended)
    made, healthy = forecast(step, *args, confirm=True), forecast(good, *good_args)
    cause = next(cause for _, cause in made.collectives if cause.change)
    assert text in cause.change and cause.confirmed
    lines = {'gradients': line_of(whole, 'lay(g)'), 'a split': line_of(heads_last, 'reshape')}
    assert cause.source.endswith(lines.get(kind, ''))
    assert cause.effect.sent == (sent(made), pytest.approx(sent(healthy)))
    assert not any(cause.change or cause.avoidable for _, cause in healthy.collectives)
    assert not lint(good, *good_args, compile=False)


def test_findings_name_the_layout_of_a_peer_once():
    step, args = make_step(specs={**SPECS, 'gate': P()})
    (finding,) = lint(step, *args, compile=False)
    assert finding.where == 'params/gate' and "P('data', 'model')" in finding.message


def test_a_constraint_before_a_row_parallel_product_is_the_cause_and_not_its_kernel():
    def step(params, x):
        hidden = jnp.tanh(x @ params['up'])
        hidden = jax.lax.with_sharding_constraint(hidden, rows)
        return hidden @ params['down']

    mesh = make_mesh()
    specs = {'up': P(None, 'model'), 'down': P('model', None)}
    params = {
        k: jax.ShapeDtypeStruct(SHAPES[k], 'float32', sharding=NamedSharding(mesh, spec))
        for k, spec in specs.items()
    }
    rows = NamedSharding(mesh, P('data'))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), 'float32', sharding=rows)
    (finding,) = lint(jax.jit(step), params, x, compile=False)
    assert (
        finding.where.endswith(line_of(step, 'with_sharding'))
        and finding.kind == 'gathered activation'
    )
    assert "P('data', None, 'model')" in finding.message


def test_lookups_of_embeddings_are_not_picks_of_a_logit():
    """One row of a table for each token is not one element of each row."""
    mesh = make_mesh()

    def step(table, ids):
        return jnp.sum(lay(table[ids], 'data', None, None) ** 2)

    sharding = NamedSharding(mesh, P('model', 'data'))
    table = jax.ShapeDtypeStruct((1024, WIDTH), 'float32', sharding=sharding)
    rows = NamedSharding(mesh, P('data'))
    ids = jax.ShapeDtypeStruct((ROWS, LENGTH), 'int32', sharding=rows)
    made = forecast(jax.jit(jax.grad(step)), table, ids, confirm=False)
    assert made.collectives
    assert not any('one_hot' in cause.change or cause.avoidable for _, cause in made.collectives)


@pytest.mark.parametrize(
    ('path', 'shape', 'role'),
    [
        (('b',), (32, 8), 'other'),
        (('b',), (8,), 'parameters'),
        (('layer', 'b'), (4, 8), 'parameters'),
    ],
)
def test_an_argument_named_b_is_a_bias_only_if_it_is_a_vector(path, shape, role):
    assert named_role(path, jax.ShapeDtypeStruct(shape, 'float32')) == role


def test_a_forecast_has_the_findings_of_its_function():
    step, args = make_step(specs={**SPECS, 'gate': P()})
    made = forecast(step, *args, compile=False)
    (finding,) = answer_of(made).findings
    assert (finding.where, finding.kind) == ('params/gate', 'whole array')
    assert type(made).from_json(made.to_json()).findings == made.findings
