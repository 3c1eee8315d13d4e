"""Why a watched function is compiled again. The expected counts are jax's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import meshwright as mw

MESH = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
SHARDED, WHOLE = NamedSharding(MESH, P('data')), NamedSharding(MESH, P())


def make_update():
    def update(state, x):
        return {'w': state['w'] + x.sum(), 'n': state['n'] + 1}

    return update


def state_of(w=SHARDED):
    return {'w': jax.device_put(jnp.zeros(8), w), 'n': jax.device_put(np.int32(0), WHOLE)}


ROWS = np.ones(8, 'float32')
CHANGES = {
    'a shape': (lambda s: (s, np.ones(16, 'float32')), 'x was float32[8] and is float32[16]'),
    'a type': (lambda s: (s, np.ones(8, 'int32')), 'x was float32[8] and is int32[8]'),
    'a layout': (
        lambda s: (s | {'w': jax.device_put(s['w'], WHOLE)}, ROWS),
        "state['w'] was laid out by P('data') and is laid out by P(None)",
    ),
    'a number': (
        lambda s: (s | {'n': 3}, ROWS),
        "state['n'] was int32[] and is weakly typed int32[]",
    ),
}


@pytest.mark.parametrize('name', CHANGES)
def test_the_argument_that_changed(name):
    change, expected = CHANGES[name]
    lines = []
    step = mw.watch(jax.jit(make_update()), report=lines.append)
    state = step(state_of(), ROWS)
    step(state, ROWS)
    assert step.compilations == 1 and not lines
    step.assert_compiled_once()
    step(*change(state))
    step(state, ROWS)
    assert lines == step.recompilations == [f'update was compiled again: {expected}']
    assert step.compilations == 2 == step._cache_size()
    with pytest.raises(AssertionError, match='update was compiled again'):
        step.assert_compiled_once()


def test_a_nearer_compilation_is_compared_and_others_are_counted():
    step = mw.watch(jax.jit(make_update()), report=lambda line: None)
    step(state_of(), ROWS)
    step(state_of(w=WHOLE), np.ones(16, 'float32'))
    step(state_of(w=WHOLE), np.ones(24, 'float32'))
    first, second = step.recompilations
    assert first.endswith('(and 1 more)')
    assert second == 'update was compiled again: x was float32[16] and is float32[24]'


def test_static_arguments_and_cleared_caches():
    @functools.partial(jax.jit, static_argnums=1)
    def scale(x, by):
        return x * by

    watched = mw.watch(scale, report=lambda line: None)
    for by in (2, 3):
        watched(ROWS, by)
    jax.clear_caches()
    watched(ROWS, 3)
    assert watched.recompilations[0].endswith('the static argument 1 was 2 and is 3')
    assert 'a cleared cache has changed' in watched.recompilations[1]


def test_functions_of_nnx_and_equinox():
    eqx = pytest.importorskip(
        'equinox', reason='equinox is not installed; the extra clients has it'
    )

    @functools.partial(mw.watch, report=lambda line: None)
    @nnx.jit
    def double(model, x):
        model.kernel[...] = model.kernel[...] * 2
        return model(x)

    @functools.partial(mw.watch, report=lambda line: None)
    @eqx.filter_jit
    def apply(model, x, name):
        return model(x)

    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    for rows in (2, 2, 3):
        double(linear, np.ones((rows, 8), 'float32'))
    assert double.recompilations == [
        'double was compiled again: x was float32[2,8] and is float32[3,8]'
    ]
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    for name in ('a', 'a', 'b'):
        apply(model, ROWS, name)
    assert apply.recompilations == [
        "apply was compiled again: the static argument 2 was 'a' and is 'b'"
    ]


def test_all_functions_inside_of_a_context(capsys):
    update, other = jax.jit(make_update()), jax.jit(lambda x: x * 2)
    with mw.watch() as seen:
        state = update({'w': jax.device_put(jnp.zeros(8), SHARDED), 'n': 0}, ROWS)
        update(state, jnp.arange(8.0))  # functions of jax itself are not reported
        other(ROWS)
    other(np.ones(16))
    [line] = seen.recompilations
    assert line.startswith("update was compiled again: state['n'] was ")
    assert capsys.readouterr().err.splitlines() == seen.recompilations
    with pytest.raises(AssertionError, match='update was compiled again'):
        seen.assert_compiled_once()


def test_a_watched_function_is_traced_once_and_keeps_its_name_and_methods():
    traced = []

    def step(x):
        """Doubles."""
        traced.append(1)
        return x * 2

    watched = mw.watch(jax.jit(step))
    for _ in range(3):
        watched(ROWS)
    assert (watched.__name__, watched.__doc__, len(traced)) == ('step', 'Doubles.', 1)
    x = jax.ShapeDtypeStruct((8,), 'float32', sharding=SHARDED)
    assert mw.forecast(watched, x).function == 'step'


@pytest.mark.parametrize(
    ('misuse', 'error', 'message'),
    [
        (
            lambda: mw.watch(make_update()),
            ValueError,
            r'^update is not jitted, .*jax.jit\(update\)',
        ),
        (lambda: mw.watch()(1), ValueError, r'^this watch has no function: write watch\(fn\)'),
        (
            lambda: mw.watch(jax.jit(make_update())).assert_compiled_once(),
            AssertionError,
            '^update was not compiled while it was watched: call',
        ),
    ],
)
def test_misuses_say_in_one_line_what_to_write(misuse, error, message):
    with pytest.raises(error, match=message) as caught:
        misuse()
    assert '\n' not in str(caught.value)
