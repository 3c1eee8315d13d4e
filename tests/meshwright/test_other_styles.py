"""Faults in programs of other styles than the models of this project, and how they are told."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from plain_steps import line_of, mesh_of, struct

from meshwright import explain, forecast, lint
from meshwright.advice.advising import next_to_compiled
from meshwright.advice.trials import Trials
from meshwright.calls.call import read_call
from meshwright.calls.roles import find_roles
from meshwright.causes.cause import Cause, Effect
from meshwright.report.explained import ExplainedRow
from meshwright.user_lines import CONSTRAINING, array_at

HEADS, SIZE, WIDTH, LENGTH = 8, 16, 64, 32


def make_step(loss):
    def step(params, batch):
        gradients = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return jax.jit(step, donate_argnums=0)


def attend(params, x):
    for p in params:
        q, k, v = (jnp.einsum('btd,dhk->bthk', x, p[name]) for name in 'qkv')
        scores = jax.nn.softmax(jnp.einsum('bqhk,bshk->bhqs', q, k))
        x = x + jnp.einsum('bhqs,bshk,hkd->bqd', scores, v, p['o'])
    return jnp.mean(x**2)


def ask_attention(spec):
    mesh = mesh_of(data=2, model=4)
    heads = {name: struct(mesh, (WIDTH, HEADS, SIZE), None, 'model') for name in 'qv'}
    heads |= {'k': struct(mesh, (WIDTH, HEADS, SIZE), *spec)}
    layer = {**heads, 'o': struct(mesh, (HEADS, SIZE, WIDTH), 'model')}
    return forecast(make_step(attend), [layer, layer], struct(mesh, (8, LENGTH, WIDTH), 'data'))


def test_a_parameter_gets_the_layout_of_most_of_its_shape():
    """Sharding what a head sums over costs little by formula, so only its peers speak for it."""
    made, mended = ask_attention((None, None, 'model')), ask_attention((None, 'model'))
    cause = next(cause for _, cause in made.collectives if cause is not None and cause.change)
    wanted = "lay out the argument params/0/k and 1 like it as PartitionSpec(None, 'model', None)"
    assert cause.change == wanted and cause.confirmed
    totals = [sum(c.total_bytes for c, _ in one.collectives) for one in (made, mended)]
    assert cause.effect.sent == (totals[0], pytest.approx(totals[1], rel=0.01))
    assert not any(cause is not None and cause.change for _, cause in mended.collectives)


def feed(params, x):
    for p in params.values():
        x = x + (jax.nn.silu(x @ p['gate']) * (x @ p['up'])) @ p['down']
    return jnp.mean(x**2)


def test_parameters_of_blocks_with_names_change_together():
    """The layout of one block alone saves little, as the other one still sends as much."""
    mesh = mesh_of(data=2, model=4)

    def block():
        up, down = struct(mesh, (WIDTH, 256), None, 'model'), struct(mesh, (256, WIDTH), 'model')
        return {'gate': struct(mesh, (WIDTH, 256), 'model'), 'up': up, 'down': down}

    params = {'encoder': block(), 'decoder': block()}
    made = forecast(make_step(feed), params, struct(mesh, (64, LENGTH, WIDTH), 'data'))
    cause = next(cause for _, cause in made.collectives if cause is not None and cause.change)
    wanted = (
        "lay out the argument params/decoder/gate and 1 like it as PartitionSpec(None, 'model')"
    )
    assert cause.change == wanted and cause.confirmed


def rotate(x):
    ring = [(i, (i + 1) % 8) for i in range(8)]
    for _ in range(2):
        x = jnp.tanh(x)
        x = jax.lax.ppermute(x, 'seq', ring)
    return x


def test_an_exchange_in_a_shard_map_is_told_at_its_own_line():
    mesh = mesh_of(seq=8)
    mapped = jax.shard_map(rotate, mesh=mesh, in_specs=P('seq'), out_specs=P('seq'))
    step = jax.jit(jax.grad(lambda x: jnp.sum(mapped(2 * x) ** 2)))
    rows = explain(step, struct(mesh, (64, 32), 'seq'), confirm=False).exchanges
    permutes = [row for row in rows if row.kind == 'collective-permute']
    assert {row.line.rpartition('/')[2] for row in permutes} == {line_of(rotate, 'ppermute')}


def gather_and_add(x, w):
    parts = jax.lax.all_gather(x @ w, 'model')
    return parts.sum(0)


def add(x, w):
    return jax.lax.psum(x @ w, 'model')


def test_a_sum_of_what_is_gathered_is_one_sum_over_devices():
    def ask(function):
        mesh = mesh_of(data=2, model=4)
        about = {'in_specs': (P('data', 'model'), P('model')), 'out_specs': P('data')}
        mapped = jax.shard_map(function, mesh=mesh, **about, check_vma=False)
        args = struct(mesh, (64, 256), 'data', 'model'), struct(mesh, (256, WIDTH), 'model')
        return forecast(jax.jit(mapped), *args)

    made, mended = ask(gather_and_add), ask(add)
    ((_, cause),) = made.collectives
    assert cause.source.endswith(line_of(gather_and_add, 'all_gather')) and cause.confirmed
    assert cause.change.startswith("write jax.lax.psum(x @ w, 'model') in place of the all_gather")
    assert cause.effect.sent[1] == sum(c.total_bytes for c, _ in mended.collectives)
    assert not any(cause.change for _, cause in mended.collectives)


def compare_wide(x, w):
    everyone = jax.lax.all_gather(x, 'data', tiled=True)
    keys = jnp.tanh(everyone @ w)
    return jnp.mean(jax.nn.softmax(jnp.tanh(x @ w) @ keys.T) ** 2)[None]


def compare_narrow(x, w):
    own = jnp.tanh(x @ w)
    keys = jax.lax.all_gather(own, 'data', tiled=True)
    return jnp.mean(jax.nn.softmax(own @ keys.T) ** 2)[None]


def test_rows_are_projected_before_they_are_gathered():
    """Each device gathers the 8 numbers that it makes of each of its rows, and not all 256."""

    def ask(function):
        mesh = mesh_of(data=8)
        about = {'in_specs': (P('data'), P()), 'out_specs': P('data')}
        mapped = jax.shard_map(function, mesh=mesh, **about)
        loss = jax.grad(lambda w, x: jnp.mean(mapped(x, w)))
        args = struct(mesh, (256, 8)), struct(mesh, (256, 256), 'data')
        return forecast(jax.jit(loss), *args, confirm=False)

    made, mended = ask(compare_wide), ask(compare_narrow)
    cause = next(cause for _, cause in made.collectives if cause is not None and cause.change)
    assert cause.source.endswith(line_of(compare_wide, 'all_gather')) and cause.avoidable
    assert 'from x only, and gather the result, (256, 8)' in cause.change
    assert line_of(compare_wide, 'keys = ') in cause.change
    totals = [sum(c.total_bytes for c, _ in one.collectives) for one in (made, mended)]
    saved = cause.effect.sent[0] - cause.effect.sent[1]
    assert saved == pytest.approx(totals[0] - totals[1], rel=0.05)
    assert not any(cause.change for _, cause in mended.collectives)


def recur(x, w, lay=lambda u: u):
    u = lay((x @ w).swapaxes(0, 1))
    _, ys = jax.lax.scan(lambda h, now: (0.9 * h + now, h), jnp.zeros(u.shape[1:]), u)
    return jnp.mean(ys.swapaxes(0, 1) ** 2)


def test_a_scan_over_a_sharded_dimension_gathers_it():
    def ask(lay):
        mesh = mesh_of(data=2, seq=4)
        gradient = jax.jit(jax.grad(lambda w, x: recur(x, w, lay)))
        x = struct(mesh, (16, 64, WIDTH), 'data', 'seq')
        return forecast(gradient, struct(mesh, (WIDTH, 256)), x)

    def channels(u):
        mesh = mesh_of(data=2, seq=4)
        return jax.lax.with_sharding_constraint(u, NamedSharding(mesh, P(None, 'data', 'seq')))

    made, mended = ask(lambda u: u), ask(channels)
    cause = next(cause for _, cause in made.collectives if cause is not None and cause.change)
    assert "PartitionSpec(None, 'data', 'seq')" in cause.change and cause.confirmed
    assert line_of(recur, 'u = lay') in cause.change
    sent = sum(c.total_bytes for c, _ in mended.collectives)
    assert cause.effect.sent[1] == pytest.approx(sent, rel=0.01)


def test_a_slice_of_which_only_the_shape_is_used_moves_nothing():
    def loss(w, x):
        u = x @ w
        start = jnp.zeros_like(u[:, 0])
        _, ys = jax.lax.scan(lambda h, now: (0.9 * h + now, h), start, u.swapaxes(0, 1))
        return jnp.mean(ys**2)

    mesh = mesh_of(data=2, seq=4)
    args = struct(mesh, (WIDTH, 256)), struct(mesh, (16, 64, WIDTH), 'data', 'seq')
    causes = [cause for _, cause in forecast(jax.jit(jax.grad(loss)), *args).collectives]
    assert not any(cause and line_of(loss, 'u[:, 0]') in cause.change for cause in causes)


def test_rows_over_two_axes_are_told_with_both():
    mesh = mesh_of(data=2, fsdp=4)

    def loss(params, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))
        return feed(params, x)

    params = {
        'one': {name: struct(mesh, (WIDTH, WIDTH), 'fsdp') for name in ('gate', 'up', 'down')}
    }
    batch = struct(mesh, (64, LENGTH, WIDTH), ('data', 'fsdp'))
    (finding,) = lint(make_step(loss), params, batch, compile=False)
    assert finding.where.endswith(line_of(loss, 'constraint'))
    assert "write P(('data', 'fsdp'), None, None)" in finding.message


def test_a_table_next_to_the_batch_does_not_say_how_rows_are_sharded():
    mesh = mesh_of(data=2, model=4)

    def product(params, places, x):
        return (x + places.sum(1)) @ params['down']

    params = {'down': struct(mesh, (256, WIDTH), 'model')}
    args = struct(mesh, (256, 8), None, 'model'), struct(mesh, (64, 256), 'data', 'model')
    made = forecast(jax.jit(product), params, *args, confirm=False)
    assert "the batch is sharded over 'data'" in made.collectives[0][1].why


def test_only_arrays_that_move_are_named():
    mesh = mesh_of(data=8)

    def loss(params, batch):
        x = jax.lax.with_sharding_constraint(batch['x'], NamedSharding(mesh, P('data')))
        return jnp.mean((feed(params, x) - batch['y']) ** 2)

    params = {'one': {name: struct(mesh, (WIDTH, WIDTH)) for name in ('gate', 'up', 'down')}}
    x = struct(mesh, (64, LENGTH, WIDTH), None, 'data')
    batch = {'x': x, 'y': struct(mesh, (64,), 'data')}
    made = explain(make_step(loss), params, batch)
    changes = ' '.join(row.change for row in made.exchanges)
    assert "lay out batch/x as PartitionSpec('data', None, None)" in changes
    assert 'batch/y' not in changes


def test_kernels_of_convolutions_may_be_whole():
    """An axis of tensors shards matrices; convolutions next to them are often whole on purpose."""
    mesh = mesh_of(data=4, model=2)

    def loss(params, x):
        window = ('NWC', 'WIO', 'NWC')
        x = jax.lax.conv_general_dilated(x, params['conv'], (1,), 'SAME', dimension_numbers=window)
        return jnp.mean((jax.nn.silu(x @ params['up']) @ params['down']) ** 2)

    params = {
        'conv': struct(mesh, (5, WIDTH, WIDTH)),
        'up': struct(mesh, (WIDTH, 256), None, 'model'),
        'down': struct(mesh, (256, WIDTH), 'model'),
    }
    assert not lint(
        make_step(loss), params, struct(mesh, (8, LENGTH, WIDTH), 'data'), compile=False
    )


@pytest.mark.parametrize(
    ('code', 'calls', 'array'),
    [
        ('hidden = jnp.tanh(x @ w)', (), 'hidden'),
        ('hidden = jax.nn.relu(x @ w) @ v', (), 'x'),  # one of two products
        ('a, b = jnp.split(x, 2)', (), 'x'),
        ("y = lax.with_sharding_constraint(batch['x'], spec)", CONSTRAINING, "batch['x']"),
        ('y = lay(keys + 1, spec)', CONSTRAINING, 'keys + 1'),
        ('y = jax.tree.map(lambda g: reshard(g, spec), grads)', CONSTRAINING, 'g'),
        ('y = self.queries.reshape(4, -1) @ w', ('reshape',), 'self.queries'),
        ('y = jnp.reshape(rows, (4, -1))', ('reshape',), 'rows'),
        ('y = lay(one, spec) + lay(other, spec)', CONSTRAINING, 'x'),
    ],
)
def test_the_array_of_a_line_has_its_name(tmp_path, code, calls, array):
    path = tmp_path / 'model.py'
    path.write_text(f'def f(x, w):\n    {code}\n    return y\n')
    assert array_at(f'{path}:2', calls) == array


def test_a_list_has_units_of_one_kind():
    about = {'what': 'buffer', 'kind': 'f32[8]', 'axes': (), 'count': 1, 'array': ''}
    row = ExplainedRow(nbytes=96 * 2**20, line='', why='', change='', **about)
    assert str(row).split()[:2] == ['100.7', 'MB']
    assert row.text(3 * 2**30).split()[:2] == ['96.0', 'MiB']


def test_changes_are_compiled_once_and_while_there_is_time():
    compiled = []

    def compile(call):
        compiled.append(call)
        return None, 4.0

    x = struct(mesh_of(data=8), (8, 8), 'data')
    calls = [read_call(jax.jit(f), (x,)).trace() for f in (jnp.sin, jnp.cos, jnp.sin)]
    trials = Trials(compile, expected=3.0, seconds=10.0)
    for n, call in enumerate(calls):
        assert trials.is_over == (n == 2)  # 2 of 10 s are left
        trials.measure(call)
    assert compiled == calls[:2]
    assert not Trials(compile, expected=3.0, seconds=math.inf).is_over


@pytest.mark.parametrize(
    ('formula', 'compiled', 'shown'),
    [
        ((100, 60), 50, (50, 50)),  # the compiler holds less than either
        ((100, 60), 80, (80, 60)),
        ((100, 60), 200, (200, 120)),  # and here twice as much
        ((100, 130), 200, (200, 230)),
    ],
)
def test_what_a_formula_saves_is_of_the_compiled_peak(formula, compiled, shown):
    about = {'source': '', 'array': '', 'logical_axes': (), 'rule': '', 'why': ''}
    cause = Cause(**about, effect=Effect(sent=(8.0, 8.0), peak=formula))
    ((_, made),) = next_to_compiled([(None, cause)], compiled)
    assert made.effect.peak == shown


def test_without_time_changes_are_told_as_not_tried():
    mesh = mesh_of(data=2, model=4)
    params = {'one': {name: struct(mesh, (WIDTH, WIDTH)) for name in ('gate', 'up', 'down')}}

    def loss(params, x):
        whole = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))
        return feed(params, whole)

    args = make_step(loss), params, struct(mesh, (64, LENGTH, WIDTH), ('data', 'model'))
    first = explain(*args, seconds=0).suggestions[0]
    assert line_of(loss, 'whole =') in first.where and 'not tried; by formula' in first.text
    with pytest.raises(ValueError, match='seconds=-1 must be at least 0'):
        explain(*args, seconds=-1)


def use_shards(x, w):
    def body(x, w):
        narrow = w.astype('bfloat16')
        return jax.lax.psum(jnp.tanh(x @ narrow) @ narrow.T, 'model')

    specs = P('data'), P(None, 'model')
    mesh = mesh_of(model=4, data=2)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P('data'))(x, w)


def test_a_shard_in_another_type_is_not_called_gathered():
    mesh = mesh_of(model=4, data=2)
    asked = explain(
        jax.jit(use_shards),
        struct(mesh, (64, 512), 'data'),
        struct(mesh, (512, 2048), None, 'model'),
    )
    (why,) = [row.why for row in asked.buffers if 'f32[512,512]' in str(row)]
    assert 'gathered' not in why and 'has all of it' not in why


def average(params, slow, batch):
    def loss(params):
        x = batch
        for w in params['layers']:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    gradients = jax.grad(loss)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return params, jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, slow, params)


@functools.cache
def ask_average():
    mesh = mesh_of(data=8)
    sharded = {'layers': [struct(mesh, (256, 256), 'data')] * 2}
    whole = {'layers': [struct(mesh, (256, 256))] * 2}
    results = jax.tree.map(lambda x: x.sharding, (sharded, whole))
    step = jax.jit(average, donate_argnums=(0, 1), out_shardings=results)
    return explain(step, sharded, whole, struct(mesh, (64, 256), 'data'))


def test_only_what_a_compiled_change_removes_is_avoidable():
    # With the average laid out like its parameters, gradients are still summed over the devices.
    rows = ask_average().exchanges
    assert {row.kind for row in rows if row.avoidable} == {'all-gather'}
    [summed] = [row for row in rows if row.kind == 'all-reduce']
    assert 'slow' not in summed.why and not summed.change


def test_a_change_is_written_out_once():
    text = ' '.join(str(ask_average()).split())
    assert text.count("lay out slow/layers/0 as PartitionSpec('data', None)") == 1
    assert '(avoidable); the change of slow/layers/0 above' in text


def tune(params, frozen, x):
    def loss(params):
        hidden = jnp.tanh(x @ frozen['up'] + x @ params['a'] @ params['b'])
        return jnp.mean((hidden @ frozen['down']) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_frozen_matrices_are_not_the_batch():
    mesh = mesh_of(data=4, model=2)
    params = {'a': struct(mesh, (512, 8)), 'b': struct(mesh, (8, 2048), None, 'model')}
    frozen = {
        'up': struct(mesh, (512, 2048), None, 'model'),
        'down': struct(mesh, (2048, 512), 'model'),
    }
    x = struct(mesh, (64, 512), 'data')
    step = jax.jit(tune, donate_argnums=0)
    paths = [('params', 'a'), ('params', 'b'), ('frozen', 'down'), ('frozen', 'up'), ('x',)]
    roles = find_roles(step.trace(params, frozen, x).jaxpr, paths)
    assert roles == [*['parameters'] * 4, 'batch']
    assert "the batch is sharded over 'model'" not in str(explain(step, params, frozen, x))


def test_a_gradient_of_a_sharded_parameter_is_not_called_whole():
    mesh = mesh_of(data=2, sequence=4)
    w = struct(mesh, (512, 512), ('data', 'sequence'))
    x = struct(mesh, (8, 128, 512), 'data', 'sequence')
    step = make_step(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    sums = [r.why for r in explain(step, w, x).exchanges if 'gradient' in r.array]
    assert sums and not any('not sharded' in why for why in sums)
