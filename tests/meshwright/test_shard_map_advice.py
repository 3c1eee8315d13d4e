"""Advice on shard_maps and their sums: a change does what the mended program does."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from plain_steps import line_of, mesh_of, struct

from meshwright import explain, forecast, lint

D, F, ROWS, STEPS = 64, 256, 64, 4


def sent(made):
    return sum(c.total_bytes for c, _ in made.collectives)


def rows_that_lack_their_axis(fault):
    """Data parallel: the specs of the batch lack 'data', and all devices average the same."""
    mesh = mesh_of(data=8)
    rows = P() if fault else P('data')

    def gradients(w, x, y):
        def loss(w):
            return ((jnp.tanh(x @ w['up']) @ w['down'] - y) ** 2).mean()

        return jax.lax.pmean(jax.grad(loss)(w), 'data')

    def step(w, x, y):
        about = {'in_specs': (P(), rows, rows), 'out_specs': P(), 'check_vma': False}
        g = jax.shard_map(gradients, mesh=mesh, **about)(w, x, y)
        return jax.tree.map(lambda a, b: a - b, w, g)

    w = {'up': struct(mesh, (D, F)), 'down': struct(mesh, (F, D))}
    x = struct(mesh, (16 * ROWS, D), 'data')
    return jax.jit(step, donate_argnums=0), w, x, x


def a_loop_over_automatic_axes(fault):
    """Microbatches in a shard_map over 'data' only, whose gradients are summed in each of them."""
    mesh = mesh_of(data=4, model=2)

    def gradients(w, x):
        def loss(w, x):
            return (jnp.tanh(x @ w['up']) @ w['down']).mean()

        def mean(g):
            return jax.tree.map(lambda a: jax.lax.psum(a, 'data') / 4, g)

        def body(i, total):
            g = jax.grad(loss)(w, x.reshape(STEPS, -1, D)[i])
            return jax.tree.map(jnp.add, total, mean(g) if fault else g)

        total = jax.lax.fori_loop(0, STEPS, body, jax.tree.map(jnp.zeros_like, w))
        return total if fault else mean(total)

    def step(w, x):
        about = {'in_specs': (P(), P('data')), 'out_specs': P(), 'axis_names': {'data'}}
        g = jax.shard_map(gradients, mesh=mesh, check_vma=False, **about)(w, x)
        return jax.tree.map(lambda a, b: a - b, w, g)

    w = {'up': struct(mesh, (D, F), None, 'model'), 'down': struct(mesh, (F, D), 'model')}
    return jax.jit(step, donate_argnums=0), w, struct(mesh, (ROWS, D), 'data')


def an_average_of_what_is_equal(fault):
    """A moving average of the parameters, which all devices have, is averaged over them."""
    mesh = mesh_of(data=8)

    def update(w, average, x):
        g = jax.lax.pmean(jax.grad(lambda w: jnp.tanh(x @ w).mean())(w), 'data')
        w = w - g
        average = 0.9 * average + 0.1 * w
        return w, jax.lax.pmean(average, 'data') if fault else average

    def step(w, average, x):
        about = {'in_specs': (P(), P(), P('data')), 'out_specs': (P(), P()), 'check_vma': False}
        return jax.shard_map(update, mesh=mesh, **about)(w, average, x)

    w = struct(mesh, (D, F))
    return jax.jit(step, donate_argnums=(0, 1)), w, w, struct(mesh, (ROWS, D), 'data')


def outputs_of_the_last_stage(fault):
    """All devices get the outputs that the last one has, to compute a loss from them."""
    mesh = mesh_of(stage=8)

    def loss(w, x, y):
        stage = jax.lax.axis_index('stage')

        def last(x):
            return jax.lax.psum(jnp.where(stage == 7, x, 0.0), 'stage')

        out = jnp.tanh(x @ w[0])
        if fault:
            return jnp.mean((last(out) - y) ** 2)
        return last(jnp.mean((out - y) ** 2))

    about = {'in_specs': (P('stage'), P(), P()), 'out_specs': P()}
    fn = jax.jit(jax.shard_map(loss, mesh=mesh, **about))
    return fn, struct(mesh, (8, D, F), 'stage'), struct(mesh, (ROWS, D)), struct(mesh, (ROWS, F))


def a_weighted_sum_of_what_is_summed(fault):
    """A product is summed over the devices, and then multiplied with the same on each of them."""
    mesh = mesh_of(model=8)

    def scores(x, w, v):
        h = x @ w
        h = jax.lax.psum(h, 'model') if fault else h
        s = 2.0 * (h @ v)
        return s if fault else jax.lax.psum(s, 'model')

    about = {'in_specs': (P(None, 'model'), P('model'), P()), 'out_specs': P()}
    fn = jax.jit(jax.shard_map(scores, mesh=mesh, **about))
    args = struct(mesh, (ROWS, D), None, 'model'), struct(mesh, (D, F), 'model')
    return fn, *args, struct(mesh, (F, 1))


EARLY = {
    outputs_of_the_last_stage: 'jax.lax.psum(jnp.where(stage == 7',
    a_weighted_sum_of_what_is_summed: "jax.lax.psum(h, 'model')",
}


@pytest.mark.parametrize('make', EARLY, ids=lambda make: make.__name__)
def test_a_sum_that_could_be_made_of_what_is_computed_from_it(make):
    made, mended = forecast(*make(True)), forecast(*make(False))
    cause = next(cause for _, cause in made.collectives if cause is not None and cause.change)
    assert cause.source.endswith(line_of(make, EARLY[make])) and cause.avoidable
    assert cause.change.startswith('leave out the psum over') and cause.confirmed is None
    before, after = cause.effect.sent
    assert before == sent(made) and after == pytest.approx(sent(mended), abs=1e-2 * before)
    assert not any(cause and cause.change for _, cause in mended.collectives)


def test_a_sum_whose_square_is_needed_is_left_where_it_is():
    """Without a mask, only linear functions can be computed before a sum."""
    mesh = mesh_of(model=8)
    about = {'in_specs': (P(None, 'model'), P('model')), 'out_specs': P()}
    loss = jax.shard_map(
        lambda x, w: jnp.mean(jax.lax.psum(x @ w, 'model') ** 2), mesh=mesh, **about
    )
    args = struct(mesh, (ROWS, D), None, 'model'), struct(mesh, (D, F), 'model')
    assert not any(
        cause and cause.change for _, cause in forecast(jax.jit(loss), *args).collectives
    )


FAULTS = {
    rows_that_lack_their_axis: ('jax.shard_map(gradients', "write P('data', None) in in_specs for"),
    a_loop_over_automatic_axes: ("jax.lax.psum(a, 'data')", 'write it once for the total after'),
    an_average_of_what_is_equal: ("pmean(average, 'data')", 'leave out the psum or pmean'),
}


@pytest.mark.parametrize('make', FAULTS, ids=lambda make: make.__name__)
def test_a_change_does_what_the_mended_program_does(make):
    text, words = FAULTS[make]
    made, mended = forecast(*make(True), confirm=True), forecast(*make(False))
    causes = [cause for _, cause in made.collectives if cause is not None and cause.avoidable]
    assert causes and all(cause.confirmed and words in cause.change for cause in causes)
    assert all(cause.source.endswith(line_of(make, text)) for cause in causes)
    assert causes[0].effect.sent == (sent(made), pytest.approx(sent(mended), rel=0.01))
    assert causes[0].effect.peak[1] == pytest.approx(mended.memory.peak, rel=0.02)
    told = str(explain(*make(False)))
    assert 'what to change first\n  nothing: ' in told and not lint(*make(False), compile=False)


def ring(fault):
    """Attention in a ring of keys; with the fault, each device has the queries of all devices."""
    mesh = mesh_of(data=2, sp=4)
    rows = P('data', 'sp')

    def attend(q, k):
        def body(carry, _):
            k, total = carry
            total = total + jnp.einsum('bqd,bkd->bqk', q, k).sum(-1)
            return (jax.lax.ppermute(k, 'sp', [(i, (i + 1) % 4) for i in range(4)]), total), None

        return jax.lax.scan(body, (k, jnp.zeros(q.shape[:2])), None, length=4)[0][1]

    def step(w, x):
        queries = P('data') if fault else rows
        about = {'in_specs': (queries, rows), 'out_specs': queries, 'check_vma': False}
        return jax.shard_map(attend, mesh=mesh, **about)(jnp.einsum('bsd,de->bse', x, w), x)

    return jax.jit(step), struct(mesh, (D, D)), struct(mesh, (4, ROWS, D), 'data', 'sp')


def test_one_argument_of_a_ring_whose_spec_lacks_the_axis_of_the_ring():
    (finding,) = lint(*ring(True), compile=False)
    assert finding.kind == 'whole shard_map'
    assert finding.where.endswith(line_of(ring, 'jax.shard_map(attend'))
    assert "no spec of q has 'sp'" in finding.message
    assert "write P('data', 'sp', None) in in_specs for q, and P('data', 'sp') in out_specs" in (
        finding.message
    )
    assert not lint(*ring(False), compile=False)


def by_hand(check_vma):
    """Two layers with column- and row-parallel products in a shard_map, trained."""
    mesh = mesh_of(data=2, model=4)

    def layer(x, scale, up, down):
        return jax.lax.psum(jnp.tanh((x * scale) @ up) @ down, 'model')

    specs = P('data'), P(), P(None, 'model'), P('model')
    mapped = jax.shard_map(
        layer, mesh=mesh, in_specs=specs, out_specs=P('data'), check_vma=check_vma
    )

    def step(w, x):
        def loss(w):
            h = x
            for one in w:
                h = h + mapped(h, *one)
            return (h**2).mean()

        return jax.tree.map(lambda a, g: a - g, w, jax.grad(loss)(w))

    one = struct(mesh, (D,)), struct(mesh, (D, F), None, 'model'), struct(mesh, (F, D), 'model')
    return jax.jit(step, donate_argnums=0), [one, one], struct(mesh, (ROWS, D), 'data')


@pytest.mark.parametrize('check_vma', [True, False])
def test_sums_that_jax_makes_are_not_called_the_program_s(check_vma):
    explained = explain(*by_hand(check_vma))
    assert not explained.suggestions
    whys = [row.why for row in explained.exchanges if row.kind == 'all-reduce']
    backward = [why for why in whys if "jax's transpose of" in why]
    assert backward and not any('the program asks' in why for why in backward)
    forward = [why for why in whys if why.startswith('the program asks for it with jax.lax.psum')]
    assert forward and not any('invariant' in why for why in whys)
    assert any('transpose of the psum at' in why for why in whys) != check_vma
    shape = f'its argument of shape ({ROWS}, {D})'
    assert any(shape in why for why in whys) != check_vma


def test_a_sum_that_the_next_iteration_needs_is_not_told_to_leave_the_loop():
    """As in a residual network, whose layers add to what they are given."""
    mesh = mesh_of(data=2, model=4)

    def layers(x, up, down):
        def layer(x, w):
            return x + jax.lax.psum(jnp.tanh(x @ w[0]) @ w[1], 'model'), None

        return jax.lax.scan(layer, x, (up, down))[0]

    def forward(w, x):
        specs = P('data'), P(None, None, 'model'), P(None, 'model')
        about = {'in_specs': specs, 'out_specs': P('data'), 'check_vma': False}
        return jax.shard_map(layers, mesh=mesh, **about)(x, w['up'], w['down'])

    w = {
        'up': struct(mesh, (STEPS, D, F), None, None, 'model'),
        'down': struct(mesh, (STEPS, F, D), None, 'model'),
    }
    explained = explain(jax.jit(forward), w, struct(mesh, (ROWS, D), 'data'))
    assert [row.kind for row in explained.exchanges] == ['all-reduce']
    assert not explained.suggestions


def test_the_scatter_of_a_gradient_is_the_transpose_of_a_gather():
    """What is recomputed in the backward pass is asked for by the program."""
    mesh = mesh_of(fsdp=8)

    @jax.checkpoint
    def product(x, w):
        return jnp.tanh(x @ jax.lax.all_gather(w, 'fsdp', axis=0, tiled=True))

    mapped = jax.shard_map(
        product, mesh=mesh, in_specs=(P('fsdp'), P('fsdp')), out_specs=P('fsdp'), check_vma=False
    )

    def step(w, x):
        return w - jax.grad(lambda w: (mapped(x, w) ** 2).mean())(w)

    args = struct(mesh, (D, D), 'fsdp'), struct(mesh, (ROWS, D), 'fsdp')
    rows = {row.kind: row for row in explain(jax.jit(step, donate_argnums=0), *args).exchanges}
    assert 'the program asks for it with jax.lax.all_gather' in rows['all-gather'].why
    assert rows['reduce-scatter'].why.startswith("jax's transpose of an all_gather ")
