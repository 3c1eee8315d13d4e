"""Records of programs: what they have, by hand arithmetic, and what is a change and what is not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from meshwright.records.comparing import compare_records
from meshwright.records.record import Record, RecordedCollective, RecordedExchange
from meshwright.records.recording import record_call

ROWS, WIDTH, LAYERS = 64, 256, 3
NOTHING = jax.checkpoint_policies.nothing_saveable


@functools.cache
def mesh():
    return jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))


def struct(shape, *spec, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), P(*spec)))


def make(
    *,
    spec=(None, 'data', None),
    policy=NOTHING,
    donate=(0,),
    constrained=True,
    dtype=jnp.float32,
    scanned=True,
):
    """A step with its arguments, which differs as the settings say."""

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        x = jnp.tanh((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32))
        if constrained:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P('data', None)))
        return x, None

    def loss(weights, batch):
        x = batch
        if scanned:
            x, _ = jax.lax.scan(layer, x, weights)
        else:
            for i in range(LAYERS):
                x, _ = layer(x, weights[i])
        return jnp.mean(x * x)

    def step(weights, batch):
        value, slopes = jax.value_and_grad(loss)(weights, batch)
        return weights - 0.1 * slopes, value

    layouts = NamedSharding(mesh(), P(*spec)), NamedSharding(mesh(), P())
    fn = jax.jit(step, donate_argnums=donate, out_shardings=layouts)
    return fn, (struct((LAYERS, WIDTH, WIDTH), *spec), struct((ROWS, WIDTH), 'data', None))


@functools.cache
def recorded(**settings):
    """The record of a step, traced only."""
    return record_call(*make(**settings), compile=False)[0]


def kinds(before, after):
    return {one.kind for one in compare_records(before, after)}


@pytest.mark.smoke
def test_a_record_has_what_the_code_says_and_a_file_keeps_it():
    made = recorded()
    [weights, batch] = made.arguments
    assert (weights.path, weights.spec, weights.donated) == (
        'weights',
        "P(None, 'data', None)",
        True,
    )
    assert weights.bytes_per_device == LAYERS * WIDTH * WIDTH * 4 // 8 and not batch.donated
    [constraint] = made.constraints
    assert (constraint.shape, constraint.spec) == ((ROWS, WIDTH), "P('data', None)")
    assert constraint.count == LAYERS and 'with_sharding_constraint' in constraint.at[0].text
    assert [c.policy for c in made.checkpoints] == ['nothing_saveable']
    assert made.loops == (LAYERS,)
    assert Record.from_json(made.to_json()) == made


def test_exchanges_are_those_of_the_compiled_program_by_hand():
    def forward(weights, batch):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, weights)[0]

    args = struct((LAYERS, WIDTH, WIDTH), None, 'data', None), struct((ROWS, WIDTH), 'data', None)
    out = NamedSharding(mesh(), P('data', None))
    made, _ = record_call(jax.jit(forward, out_shardings=out), args)
    [gathered] = made.exchanges
    assert (gathered.kind, gathered.axes, gathered.dtype) == ('all-gather', ('data',), 'f32')
    assert gathered.array == 'weights' and gathered.count == LAYERS
    assert gathered.bytes == LAYERS * 7 * WIDTH * WIDTH * 4 // 8  # 7 of 8 shards of each layer
    assert 'jnp.tanh(x @ w)' in gathered.at.text


@pytest.mark.parametrize(
    ('settings', 'expected', 'words'),
    [
        ({'spec': (None, None, 'data')}, 'argument', "P(None, None, 'data')"),
        ({'policy': jax.checkpoint_policies.dots_saveable}, 'checkpoint', 'dots_saveable'),
        ({'donate': ()}, 'donation', 'donated -> kept'),
        ({'constrained': False}, 'constraint', 'is gone: layout of 64 x 256 in the code, 3 times'),
        ({'dtype': jnp.bfloat16}, 'precision', 'bfloat16 -> bfloat16 100%'),
    ],
    ids=['layout', 'remat', 'donation', 'constraint', 'dtype'],
)
def test_each_kind_of_change_is_reported_with_its_words(settings, expected, words):
    found = [d for d in compare_records(recorded(), recorded(**settings)) if d.kind == expected]
    assert any(words in one.line for one in found), found
    assert all(one.is_of_code for one in found)


def test_a_lost_constraint_and_a_type_have_their_lines():
    [gone] = compare_records(recorded(), recorded(constrained=False))
    assert 'with_sharding_constraint' in gone.at.text
    found = compare_records(recorded(), recorded(dtype=jnp.bfloat16))
    [precision] = [one for one in found if one.kind == 'precision']
    assert 'astype(dtype) @ w.astype(dtype)' in precision.at.text


def test_names_order_and_written_out_layers_are_no_change():
    assert not compare_records(recorded(), recorded(scanned=False))

    def renamed(record):
        arguments = [dataclasses.replace(a, path=f'state/{a.path}x') for a in record.arguments]
        return dataclasses.replace(record, function='other', arguments=tuple(arguments[::-1]))

    assert not compare_records(recorded(), renamed(recorded()))
    changed = renamed(recorded(spec=(None, None, 'data')))
    assert kinds(recorded(), changed) >= {'argument'}


def test_an_axis_of_one_device_in_a_layout_is_no_change():
    """P(None, ('data', 'model'), 'expert') on 8 x 1 x 1 devices is P(None, 'data', None)."""
    made = recorded()
    [weights, batch] = made.arguments
    longer = dataclasses.replace(weights, spec="P(None, ('data', 'model'), 'expert')")

    def on(mesh, *arguments):
        return dataclasses.replace(made, mesh=mesh, arguments=arguments)

    alone, two = ({'data': 8, 'model': n, 'expert': 1} for n in (1, 2))
    assert not compare_records(on(alone, weights, batch), on(alone, longer, batch))
    [found] = compare_records(on(two, weights, batch), on(two, longer, batch))
    assert found.line.startswith("weights: P(None, 'data', None), ")
    assert "-> P(None, ('data', 'model'), None), " in found.line
    assert not compare_records(on({'data': 8}, weights, batch), on(alone, longer, batch))

    def asked(*axes):
        collectives = tuple(RecordedCollective(name='psum', axes=a, count=2) for a in axes)
        return dataclasses.replace(on(alone, weights, batch), collectives=collectives)

    wide = asked(('data', 'model'), ('expert',))
    assert not compare_records(asked(('data',)), wide)
    assert kinds(asked(), wide) == {'collective'}
    open_ = dataclasses.replace(batch, spec='P(UNCONSTRAINED, None)')
    assert kinds(on(alone, weights, batch), on(alone, weights, open_)) == {'argument'}


def test_another_order_of_mesh_axes_is_a_change():
    two = dataclasses.replace(recorded(), mesh={'data': 4, 'model': 2})
    [change] = compare_records(two, dataclasses.replace(two, mesh={'model': 2, 'data': 4}))
    assert (change.subject, change.before, change.after) == (
        'mesh',
        'data 4 x model 2',
        'model 2 x data 4',
    )


def test_figures_may_differ_more_if_the_code_says_the_same():
    made = recorded()
    for share, expected in ((1.05, set()), (1.08, {'memory'})):
        assert kinds(made, dataclasses.replace(made, peak=round(made.peak * share))) == expected
    lost = recorded(constrained=False)
    more = dataclasses.replace(lost, peak=round(lost.peak * 1.05))
    assert kinds(made, more) == {'constraint', 'memory'}
    unknown = dataclasses.replace(made, constraints=None, checkpoints=None, precisions=None)
    assert not compare_records(unknown, lost)


def test_an_exchange_that_the_code_asks_for_is_missed():
    """A sum of four bytes is too small to count among exchanges, and is asked for all the same."""

    def of(mean):
        def inside(x):
            return x * jax.lax.rsqrt(mean(jnp.mean(x * x)))

        fn = jax.jit(jax.shard_map(inside, mesh=mesh(), in_specs=P('data'), out_specs=P('data')))
        return record_call(fn, (struct((ROWS, WIDTH), 'data'),), compile=False)[0]

    over_all = of(lambda x: jax.lax.pmean(x, 'data'))
    [lost] = compare_records(over_all, of(lambda x: x))
    assert (lost.kind, lost.subject, lost.after) == ('collective', 'psum over data in the code', '')
    assert 'jax.lax.pmean' in lost.at.text
    assert not compare_records(over_all, of(lambda x: jax.lax.psum(x, 'data') / 8))


def test_other_partners_of_an_exchange_are_missed():
    """A ring of eight devices, closed or open; the same pairs in another order are the same."""

    def of(pairs):
        fn = jax.shard_map(
            lambda x: jax.lax.ppermute(x, 'data', pairs),
            mesh=mesh(),
            in_specs=P('data'),
            out_specs=P('data'),
        )
        return record_call(jax.jit(fn), (struct((ROWS, WIDTH), 'data'),), compile=False)[0]

    ring = [(i, (i + 1) % 8) for i in range(8)]
    closed, opened = of(ring), of(ring[:-1])
    [change] = compare_records(opened, closed)
    assert (change.kind, change.before, change.after) == (
        'collective',
        '1 time, devices 0-6 by +1',
        '1 time, devices 0-6 by +1, 7 by -7',
    )
    assert not compare_records(closed, of(ring[::-1]))
    [asked] = closed.collectives
    [less] = opened.collectives
    back = dataclasses.replace(asked, partners='0 by +7, 1-7 by -1')
    both = dataclasses.replace(closed, collectives=(asked, back))
    [change] = compare_records(both, dataclasses.replace(closed, collectives=(less, back)))
    assert '1 time, devices 0-6 by +1; 1 time, devices 0 by +7' in change.after
    old = dataclasses.replace(closed, collectives=(dataclasses.replace(asked, partners=None),))
    assert not compare_records(old, opened)


def test_a_loop_that_is_written_out_may_lack_the_exchange_of_one_layer():
    """Of six layers, the first needs no gradient of its input: a sixth of the sums is gone."""
    sums = RecordedExchange(
        kind='all-reduce', axes=('data',), network='ici', dtype='f32', array='', bytes=0, count=6
    )

    def of(loops, size, seconds):
        made = dataclasses.replace(sums, bytes=size)
        return dataclasses.replace(recorded(), loops=loops, exchanges=(made,), seconds=seconds)

    looped = of((6,), 6_000_000, 1.0)
    assert not compare_records(looped, of((), 5_000_000, 0.7))
    assert kinds(looped, of((), 4_000_000, 0.7)) == {'exchange'}
    assert kinds(looped, of((6,), 5_000_000, 0.7)) == {'exchange', 'time'}
