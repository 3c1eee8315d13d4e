"""What to change first, and faults that only cost memory, or that send the same twice.

The programs without the fault are compiled, too: what is promised is what they hold and send.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from plain_steps import line_of, mesh_of, struct

from meshwright import explain, forecast, forecast_table, lint
from meshwright.report.suggestions import list_suggestions

WIDTH, LAYERS, ROWS, LENGTH = 128, 4, 64, 16


def update(loss, params):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def sent(made):
    return sum(c.total_bytes for c, _ in made.collectives)


def gather(w):
    mesh = mesh_of(fsdp=8)
    return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))


def fsdp_step(early):
    """A step with 4 layers that are gathered before the loop over them, or each for its own."""
    mesh = mesh_of(fsdp=8)

    @jax.checkpoint
    def layer(x, w):
        w = w if early else gather(w)
        x = x + jax.nn.relu(x @ w) @ w.T
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('fsdp'))), None

    def step(params, x):
        def loss(params):
            return (jax.lax.scan(layer, x, gather(params) if early else params)[0] ** 2).sum()

        return update(loss, params)

    params = struct(mesh, (LAYERS, WIDTH, WIDTH), None, 'fsdp')
    return jax.jit(step, donate_argnums=0), (params, struct(mesh, (8, WIDTH), 'fsdp'))


def test_layers_that_are_gathered_before_the_loop_over_them():
    made, healthy = (forecast(*_flat(fsdp_step(early))) for early in (True, False))
    (finding,) = made.findings
    assert finding.kind == 'gathered layers'
    assert finding.where.endswith(line_of(gather, 'with_sharding_constraint'))
    whole = 4 * WIDTH * WIDTH
    assert f'all 4 layers, {LAYERS * whole / 1000:.1f} kB, where one layer is' in finding.message
    assert not healthy.findings and not list_suggestions(healthy)
    assert not any(cause and cause.avoidable for _, cause in healthy.collectives)
    more = f'once more, and {(sent(healthy) - sent(made)) / 1000:.1f} kB sent'
    assert finding.message.endswith(more)
    assert made.memory.peak - healthy.memory.peak > (LAYERS - 2) * whole


def _flat(made):
    fn, args = made
    return fn, *args


def sharded_step(fault):
    """A step in a shard_map that sends twice what it could send once, or does not."""
    mesh = mesh_of(data=8)

    def loss(w, x):
        return ((x @ w) ** 2).mean()

    def again(w, x):
        g = jax.grad(loss)(w, x)  # jax sums the gradient of what is whole
        return w - (jax.lax.pmean(g, 'data') if fault else g / 8)

    def accumulate(w, x):
        varying = jax.lax.pcast(w, 'data', to='varying')  # jax does not sum its gradient

        def body(total, x):
            g = jax.grad(loss)(varying, x)
            return total + (jax.lax.pmean(g, 'data') if fault else g), None

        zeros = jnp.zeros_like(w)
        zeros = zeros if fault else jax.lax.pcast(zeros, 'data', to='varying')
        total, _ = jax.lax.scan(body, zeros, x)
        return w - (total if fault else jax.lax.pmean(total, 'data'))

    def make(body, rows):
        specs = P(), P(*rows)
        fn = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
        shape = (*[LAYERS] * (len(rows) - 1), ROWS, WIDTH)
        args = struct(mesh, (WIDTH, WIDTH)), struct(mesh, shape, *rows)
        return jax.jit(fn, donate_argnums=0), args

    return make(again, ('data',)), make(accumulate, (None, 'data'))


@pytest.mark.parametrize('kind', [0, 1], ids=['summed twice', 'summed in a loop'])
def test_sums_that_are_repeated(kind):
    made = forecast(*_flat(sharded_step(True)[kind]), confirm=False)
    healthy = forecast(*_flat(sharded_step(False)[kind]))
    cause = next(cause for _, cause in made.collectives if cause and cause.change)
    assert cause.avoidable and cause.effect.sent == (sent(made), pytest.approx(sent(healthy)))
    tried = forecast(*_flat(sharded_step(True)[kind]), confirm=True)
    tried = next(cause for _, cause in tried.collectives if cause and cause.change)
    assert tried.confirmed and tried.effect.sent == cause.effect.sent
    assert tried.effect.peak[1] == pytest.approx(healthy.memory.peak, rel=0.02)
    lines = {0: 'w - (jax.lax.pmean(g', 1: 'total + '}
    assert cause.source.endswith(line_of(sharded_step, lines[kind]))
    assert not list_suggestions(healthy)


def make_shard_map(spec, check_vma=True):
    """Attention whose shard_map knows of the heads' axis or not, without donating its weights."""
    mesh = mesh_of(data=2, model=4)
    about = {'mesh': mesh, 'check_vma': check_vma}

    def core(q):
        return jnp.einsum('bhst,bthk->bshk', jax.nn.softmax(jnp.einsum('bshk,bthk->bhst', q, q)), q)

    def step(w, x):
        def loss(w):
            q = jnp.einsum('bsd,dhk->bshk', x, w['q'])
            mixed = jax.shard_map(core, in_specs=spec, out_specs=spec, **about)(q)
            return (jnp.einsum('bshk,hkd->bsd', mixed, w['o']) ** 2).mean()

        return update(loss, w)

    w = {
        'q': struct(mesh, (WIDTH, 8, 16), None, 'model'),
        'o': struct(mesh, (8, 16, WIDTH), 'model'),
    }
    return jax.jit(step), (w, struct(mesh, (8, LENGTH, WIDTH), 'data'))


def test_devices_that_compute_the_same_come_first_and_the_call_comes_last():
    faulty, args = make_shard_map(P('data'))
    explained = explain(faulty, *args)
    first, *_, last = explained.suggestions
    assert first == list_suggestions(explained.forecast)[0]
    assert first.where.endswith(line_of(make_shard_map, 'in_specs'))
    assert "write P('data', None, 'model', None) in in_specs and out_specs" in first.text
    assert 'donate_argnames' in last.text
    for text in (str(explained), forecast_table([explained.forecast])):
        told = text.partition('what to change first\n  ')[2]
        assert told.startswith(first.where)
    good, args = make_shard_map(P('data', None, 'model'))
    (only,) = explain(good, *args).suggestions
    assert 'donate_argnames' in only.text


@pytest.mark.parametrize('check_vma', [True, False])
def test_specs_that_are_tried_send_what_the_same_program_with_them_sends(check_vma):
    """Without the check of jax, its backward pass sums what is the same on all devices."""
    made = forecast(*_flat(make_shard_map(P('data'), check_vma)), confirm=True)
    healthy = forecast(*_flat(make_shard_map(P('data', None, 'model'), check_vma)))
    causes = [cause for _, cause in made.collectives if cause and cause.avoidable]
    assert all(cause.source.endswith(line_of(make_shard_map, 'in_specs')) for cause in causes)
    sums = [c for c, cause in made.collectives if cause in causes and c.kind == 'all-reduce']
    assert bool(sums) != check_vma
    assert causes and all('the program asks for it' not in cause.why for cause in causes)
    for cause in causes:
        assert cause.confirmed and cause.effect.sent == (sent(made), sent(healthy))
        assert cause.effect.peak == (made.memory.peak, healthy.memory.peak)
    assert '(confirmed by compiling: sends ' in list_suggestions(made)[0].text


def test_a_mask_of_each_row_is_sharded_like_its_batch_but_no_table_and_not_a_number_of_each_row():
    mesh = mesh_of(data=8)

    def step(w, x, mask, table):
        def loss(w):
            return (jnp.where(mask, x @ w, 0) ** 2).mean() + (table @ w).mean()

        return update(loss, w)

    x, table = struct(mesh, (ROWS, WIDTH), 'data'), struct(mesh, (ROWS, WIDTH))
    mask = struct(mesh, (ROWS, WIDTH), dtype='bool')
    args = struct(mesh, (WIDTH, WIDTH)), x, mask, table
    (finding,) = lint(jax.jit(step, donate_argnums=0), *args, compile=False)
    assert finding.kind == 'whole batch' and finding.where == 'mask'

    def look_up(w, ids, factors):
        return update(lambda w: (w[ids] * factors[:, None]).mean(), w)

    ids, factors = struct(mesh, (ROWS,), 'data', dtype='int32'), struct(mesh, (ROWS,))
    assert not lint(jax.jit(look_up, donate_argnums=0), args[0], ids, factors, compile=False)


def test_a_small_exchange_that_nobody_tried_to_avoid_is_no_suggestion():
    mesh = mesh_of(model=8)

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def best_token(x, up, down, head):
        x = constrain((x @ up) @ down)  # a sum of 8 rows of WIDTH numbers, which it needs
        parts = constrain((x @ head).reshape(8, 8, -1), None, 'model')
        part = parts.max(-1).argmax(-1, keepdims=True)
        where = jnp.take_along_axis(parts.argmax(-1), part, -1)  # 8 x 8 numbers
        return part * parts.shape[-1] + where

    made = forecast(
        jax.jit(best_token),
        struct(mesh, (8, WIDTH)),
        struct(mesh, (WIDTH, 8 * WIDTH), None, 'model'),
        struct(mesh, (8 * WIDTH, WIDTH), 'model'),
        struct(mesh, (WIDTH, 64 * WIDTH), None, 'model'),
        confirm=False,
    )
    changes = [(c, cause.change) for c, cause in made.collectives if cause and cause.change]
    assert 0 < sum(c.total_bytes for c, _ in changes) < 0.02 * sent(made)
    assert not list_suggestions(made)


@pytest.mark.parametrize('name', ['points', 'inputs'])
def test_rows_of_another_kind_may_be_whole(name):
    """Pairs of points are sharded, so every device needs all points."""
    mesh = mesh_of(data=8)

    def step(w, data, labels):
        def loss(w):
            y = data[name] @ w
            between = jnp.sum((y[data['first']] - y[data['second']]) ** 2, -1) * data['weight']
            return between.mean() + jnp.take_along_axis(y, labels[:, None], 1).mean()

        return update(loss, w)

    pairs = {key: struct(mesh, (8 * ROWS,), 'data', dtype='int32') for key in ('first', 'second')}
    data = pairs | {'weight': struct(mesh, (8 * ROWS,), 'data'), name: struct(mesh, (ROWS, WIDTH))}
    args = struct(mesh, (WIDTH, WIDTH)), data, struct(mesh, (ROWS,), dtype='int32')
    step = jax.jit(step, donate_argnums=0)
    assert not lint(step, *args, compile=False)
    whole = data | {key: struct(mesh, (8 * ROWS,), dtype='int32') for key in pairs}
    whole['weight'] = struct(mesh, (8 * ROWS,))
    (finding,) = lint(step, args[0], whole, args[2], compile=False)
    assert finding.kind == 'whole batch'
