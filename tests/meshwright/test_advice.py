"""Changes that are tried: each fault is undone by the change that is shown, to the byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from plain_steps import line_of

from meshwright import explain, forecast, forecast_table
from meshwright.calls.call import read_call
from meshwright.calls.callers import named_by_caller
from meshwright.calls.roles import find_roles
from meshwright.jax_private import read_trace
from partitioning.amounts import bytes_strs

ROWS, WIDTH, HIDDEN = 512, 64, 512
WHOLE = {'up': P(), 'down': P()}
PARAMETERS = {'up': P('data', 'model'), 'down': P('model', 'data')}


@functools.cache
def make_mesh():
    return Mesh(
        np.reshape(jax.devices(), (4, 2)), ('data', 'model'), axis_types=(AxisType.Auto,) * 2
    )


def lay(x, spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(make_mesh(), spec))


def make_layer(hidden_spec, out_spec):
    def layer(w, x):
        hidden = jnp.tanh(x @ w['up'])
        hidden = lay(hidden, hidden_spec)
        out = x + hidden @ w['down']
        return lay(out, out_spec)

    return layer


def ask(
    hidden=('data', 'model'),
    out=('data', None),
    parameters=PARAMETERS,
    moments=PARAMETERS,
    rows=('data', None),
    **settings,
):
    """The forecast of two layers with momentum, whose arguments have unhelpful names."""
    layer = make_layer(P(*hidden), P(*out))

    def step(p, m, t):
        def loss(p):
            x = t
            for w in p:
                x = layer(w, x)
            return jnp.mean(x**2)

        gradient = jax.grad(loss)(p)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradient)
        return jax.tree.map(lambda p, m: p - m, p, m), m

    def structs(specs):
        shapes = {'up': (WIDTH, HIDDEN), 'down': (HIDDEN, WIDTH)}
        return [{k: struct(shapes[k], specs[k]) for k in shapes} for _ in range(2)]

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(make_mesh(), spec))

    state = structs(parameters), structs(moments)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    return forecast(jitted, *state, struct((ROWS, WIDTH), P(*rows)), **settings)


def sent(made):
    return sum(c.total_bytes for c, _ in made.collectives)


@functools.cache
def healthy():
    return ask()


def advice(made):
    """The exchanges with a change, the largest first."""
    return [(c, cause) for c, cause in made.collectives if cause is not None and cause.change]


def test_nothing_is_avoidable_and_nothing_is_advised_without_a_fault():
    """Gathers of parameters, sums of row-parallel products, sums of gradients over the rows."""
    kinds = {(c.kind, c.axes) for c, _ in healthy().collectives}
    assert {
        ('all-gather', ('data',)),
        ('all-reduce', ('model',)),
        ('all-reduce', ('data',)),
    } <= kinds
    assert not any(cause.avoidable for _, cause in healthy().collectives)
    assert not advice(healthy())
    fully_sharded = {'up': P('data', None), 'down': P(None, 'data')}
    made = ask(('data', None), parameters=fully_sharded, moments=fully_sharded)
    assert made.collectives and not advice(made)


@pytest.mark.parametrize(
    ('fault', 'text', 'at', 'avoidable'),
    [
        ({'hidden': ('model', 'data')}, "PartitionSpec('data', 'model')", 'hidden_spec)', True),
        ({'hidden': (None, 'model')}, "PartitionSpec('data', 'model')", 'hidden_spec)', True),
        ({'out': (None, 'data')}, "PartitionSpec('data', None)", 'lay(out, out_spec)', True),
        (
            {'moments': WHOLE},
            "lay out m/0/down as PartitionSpec('model', 'data'), like its parameter p/0/down, and "
            '3 more like their parameters',
            '',
            True,
        ),
        (
            {k: {**PARAMETERS, 'down': P('data', 'model')} for k in ('parameters', 'moments')},
            "lay out the argument p/0/down and 1 like it as PartitionSpec('model', 'data')",
            '',
            False,
        ),
    ],
    ids=['swapped', 'without rows', 'rows elsewhere', 'moments', 'kernel'],
)
def test_the_first_change_undoes_the_fault(fault, text, at, avoidable):
    """With the change, the program sends what it sends without the fault, as compiling shows."""
    made = ask(**fault, confirm=True)
    _, cause = advice(made)[0]
    assert text in cause.change and cause.avoidable == avoidable and cause.confirmed
    assert not at or cause.change.endswith(line_of(make_layer, at))
    assert cause.effect.sent == (sent(made), sent(healthy()))
    assert cause.effect.peak[1] <= made.memory.peak
    if 'moments' in fault and 'parameters' not in fault:
        said = 'm/0/down is laid out as PartitionSpec(None, None), and its parameter p/0/down as '
        assert said in cause.why
    shown = ' '.join(forecast_table([made]).split())
    assert 'confirmed by compiling: sends' in shown and ('(avoidable)' in shown) == avoidable


def test_changes_that_compile_quickly_are_confirmed_unless_that_is_declined():
    quick = ask(hidden=('model', 'data'))
    _, cause = advice(quick)[0]
    wide = ask(hidden=('data', 'model'))
    assert cause.confirmed and cause.effect.sent[1] == sum(
        c.total_bytes for c, _ in wide.collectives
    )
    made = ask(hidden=('model', 'data'), confirm=False)
    _, cause = advice(made)[0]
    assert cause.change.endswith(line_of(make_layer, 'hidden_spec)')) and cause.confirmed is None
    assert cause.effect.sent[1] < cause.effect.sent[0]
    assert '(not tried; by formula, it saves ' in ' '.join(forecast_table([made]).split())
    assert type(made).from_json(made.to_json()).to_json() == made.to_json()


def test_a_change_that_does_not_help_is_not_shown(monkeypatch):
    """As if the compiler made the same program again."""
    for room in ('searching', 'confirming'):
        target = f'meshwright.advice.{room}.with_change'
        monkeypatch.setattr(target, lambda subject, change: subject.call)
    made = ask(hidden=('model', 'data'), confirm=True)
    assert not advice(made) and not any(cause.avoidable for _, cause in made.collectives)


def test_a_batch_that_is_not_sharded_follows_the_constraints_on_its_rows():
    made = ask(rows=(None, 'data'), confirm=True)
    assert any('lay out t as PartitionSpec(' in cause.change for _, cause in advice(made))


def test_a_reason_names_the_product_its_operand_and_the_batch():
    line = line_of(make_layer, "w['down']")
    found = [cause.why for c, cause in healthy().collectives if c.axes == ('model',)]
    assert any(
        why.startswith('the product with p/0/down at')
        and line in why
        and "which is sharded over 'model'" in why
        and "the batch is sharded over 'data'" in why
        for why in found
    ), found


def test_a_shard_map_that_leaves_out_the_axis_of_the_rows():
    mesh = make_mesh()

    def step(w, x):
        inside = jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, 'model'),
            mesh=mesh,
            in_specs=(P(None, 'model'), P('model', None)),
            out_specs=P(None, None),
        )
        return lay(inside(x, w), P('data', None))

    w = jax.ShapeDtypeStruct((WIDTH, HIDDEN), 'float32', sharding=NamedSharding(mesh, P('model')))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), 'float32', sharding=NamedSharding(mesh, P('data')))
    collective, cause = advice(forecast(jax.jit(step), w, x, confirm=False))[0]
    assert (collective.kind, collective.axes) == ('all-gather', ('data',)) and cause.avoidable
    assert cause.source.endswith(line_of(step, 'jax.shard_map('))
    assert 'no spec of the shard_map' in cause.why and "'data'" in cause.change


def test_roles_follow_from_what_is_done_with_an_array():
    """A tuple of parameters and moments, tokens, a key, and weights of the loss."""

    def step(s, k, b):
        (w, m), count = s
        gradient = jax.grad(lambda w: ((w['table'][b[0]] * w['scale']).sum(-1) * b[1]).mean())(w)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradient)
        return (jax.tree.map(lambda w, m: w - m, w, m), m), count + 1

    w = {'table': jnp.zeros((32, 8)), 'scale': jnp.zeros(8)}
    args = (((w, w), 0), jax.random.PRNGKey(0), (jnp.zeros((4, 6), 'int32'), jnp.zeros((4, 6))))
    jaxpr = jax.jit(step).trace(*args).jaxpr
    paths = [('s', str(n)) for n in range(5)] + [('k',), ('b', '0'), ('b', '1')]
    assert find_roles(jaxpr, paths) == [
        *['parameters'] * 2,
        *['optimizer'] * 2,
        'other',
        'other',
        *['batch'] * 2,
    ]
    assert read_call(jax.jit(step), args).name == 'step'


@pytest.mark.parametrize('is_late', [True, False])
def test_a_cast_after_a_gather_is_found(is_late):
    mesh = make_mesh()

    def use(w):
        if is_late:
            return jax.lax.all_gather(w, 'data', tiled=True).astype('bfloat16')
        return jax.lax.all_gather(w.astype('bfloat16'), 'data', tiled=True)

    def step(w, x):
        specs = {'mesh': mesh, 'in_specs': (P('data'), P('data')), 'out_specs': P('data')}
        return jax.shard_map(lambda w, x: x @ use(w), **specs)(w, x)

    w = jax.ShapeDtypeStruct((WIDTH, HIDDEN), 'float32', sharding=NamedSharding(mesh, P('data')))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), 'bfloat16', sharding=NamedSharding(mesh, P('data')))
    found = [cause for _, cause in advice(forecast(jax.jit(step), w, x, confirm=False))]
    assert len(found) == is_late
    for cause in found:
        assert cause.change.startswith('cast to bfloat16 before all_gather at ')
        assert cause.source.endswith(line_of(use, "'data', tiled=True).astype"))


def test_arrays_are_named_by_the_call_of_a_library_that_flattens_its_arguments():
    """As `nnx.jit` and `eqx.filter_jit` do."""
    seen = []

    class Wrapped:
        def __init__(self, fun):
            functools.update_wrapper(self, fun)
            self.jitted = jax.jit(lambda states: jax.tree.map(jnp.sin, states))

        def __call__(self, *args):
            def lower(states):
                return seen.append(named_by_caller(read_trace(self.jitted.trace(states))))

            return lower(jax.tree.leaves(args))

    def step(model, x):
        return model, x

    Wrapped(step)({'layers': [{'kernel': jnp.zeros((2, 3))}]}, jnp.zeros(4))
    assert seen[0].argument_names == ('model.layers.0.kernel', 'x')


def test_layouts_over_explicit_axes_are_explained_and_not_changed():
    devices = np.reshape(jax.devices(), (4, 2))
    mesh = Mesh(devices, ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)

    def step(w, x):
        return jax.sharding.reshard(jnp.tanh(x), P(None, 'model')) * w

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        args = struct((WIDTH,), 'model'), struct((ROWS, WIDTH), 'data', 'model')
        made = forecast(jax.jit(step), *args, confirm=True)
    assert [c.kind for c, _ in made.collectives] == ['all-gather'] and not advice(made)


def prefill(cache_spec):
    """The last row and a cache of two arrays per layer, whose features are over 'model'."""

    def step(w, x):
        x = lay(x, P('data'))

        def layer(x, w):
            made = tuple(jnp.einsum('bd,df->bf', x, w[n]) for n in ('key', 'value'))
            return lay(jnp.tanh(made[0] * made[1]) @ w['out'], P('data')), made

        return jax.lax.scan(layer, x, w)

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(make_mesh(), P(*spec)))

    up = struct((3, WIDTH, HIDDEN), None, None, 'model')
    w = {'key': up, 'value': up, 'out': struct((3, HIDDEN, WIDTH), None, 'model')}
    out, cache = (NamedSharding(make_mesh(), spec) for spec in (P('data'), cache_spec))
    jitted = jax.jit(step, out_shardings=(out, (cache, cache)))
    return explain(jitted, w, struct((ROWS, WIDTH), 'data'))


def test_out_shardings_that_gather_are_named():
    """Each of two caches of 3 x 128 rows of 512 elements is gathered from 2 devices."""
    found, mended = prefill(P(None, 'data')), prefill(P(None, 'data', 'model'))
    [gathered] = [row for row in found.exchanges if row.kind == 'all-gather']
    assert gathered.nbytes == 2 * 4 * 3 * 128 * 512 / 2
    assert gathered.array == 'result[1][0]'
    assert 'out_shardings lay out result[1][0] and 1 more like it' in gathered.why
    assert "write PartitionSpec(None, 'data', 'model') for" in gathered.change
    sends = sum(row.nbytes for row in found.exchanges) - gathered.nbytes
    assert sum(row.nbytes for row in mended.exchanges) == sends
    assert not any('constraint at' in row.why for row in found.rows)
    assert not any('backward' in row.why for row in found.rows)


@pytest.mark.parametrize(
    'settings', [{}, {'rows': (None, None)}, {'out': ('data', 'model')}, {'moments': WHOLE}]
)
def test_what_a_buffer_says_to_write_was_tried(settings):
    """A change that lowers what is sent or held, and raises neither by more than 1%."""
    for _, cause in ask(**settings).memory.buffers:
        if cause is not None and cause.change:
            pairs = cause.effect.sent, cause.effect.peak
            assert any(after < before for before, after in pairs)
            assert all(after <= 1.01 * before for before, after in pairs)


def test_what_is_compared_has_one_unit():
    assert bytes_strs(1_793_000_000, 335_700_000) == ['1.67 GiB', '0.31 GiB']
    assert bytes_strs(1_793_000_000, 3_600_000) == ['1,793.0 MB', '3.6 MB']
    assert bytes_strs(3_600_000, 900) == ['3.6 MB', '900 bytes']


def test_two_constraints_that_only_help_together():
    """What is sent to the experts and what they return must both be laid out by experts."""
    mesh = make_mesh()
    groups, experts, slots = 16, 8, 4

    def ask(*spec):
        def moe(params, x):
            send = lay(jnp.einsum('gtec,gtd->gecd', x['plan'], x['rows']), P(*spec))
            hidden = jax.nn.relu(jnp.einsum('gecd,edf->gecf', send, params['up']))
            out = lay(jnp.einsum('gecf,efd->gecd', hidden, params['down']), P(*spec))
            return jnp.einsum('gtec,gecd->gtd', x['plan'], out)

        def struct(shape, *spec):
            return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

        params = {
            'up': struct((experts, WIDTH, HIDDEN), 'model'),
            'down': struct((experts, HIDDEN, WIDTH), 'model'),
        }
        both = ('data', 'model')
        x = {
            'rows': struct((groups, 32, WIDTH), both),
            'plan': struct((groups, 32, experts, slots), both),
        }
        return forecast(jax.jit(moe), params, x, confirm=True)

    made, mended = ask(('data', 'model')), ask('data', 'model')
    _, cause = advice(made)[0]
    assert cause.confirmed
    assert (
        cause.change.count("write with_sharding_constraint(x, PartitionSpec('data', 'model'") == 2
    )
    assert cause.effect.sent == (sent(made), sent(mended))
    assert not advice(mended)


def test_rows_that_come_second_are_sharded():
    """A batch of (time, rows) over 'data' is not called whole."""
    rows = jax.ShapeDtypeStruct(
        (16, ROWS, WIDTH), 'float32', sharding=NamedSharding(make_mesh(), P(None, 'data'))
    )
    down = NamedSharding(make_mesh(), P('model'))
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), 'float32', sharding=down)
    made = explain(
        jax.jit(lambda params, batch: jnp.tanh(batch) @ params['down']), {'down': w}, rows
    )
    assert made.exchanges
    assert not any('batch is not sharded' in row.why for row in made.rows)
