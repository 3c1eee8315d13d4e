"""Faults that no layout of a parameter mends: the first suggestion has the line and the cure.

Each program is compiled with the fault and as the suggestion says, and sends less as mended.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from plain_steps import line_of

from meshwright import forecast, lint

WIDTH, HIDDEN, ROWS = 64, 256, 512
HEADS, SIZE, LENGTH = 8, 8, 16


def make_mesh(*axes):
    return Mesh(np.reshape(jax.devices(), (2, 4)), axes)


def arrays(mesh, **given):
    """Arrays as {name: (shape, spec)} says."""
    return {
        name: jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))
        for name, (shape, spec) in given.items()
    }


def sent(made):
    return sum(c.total_bytes for c, _ in made.collectives)


def first(made):
    """The cause of the largest exchange that has a change."""
    found = [(c.total_bytes, cause) for c, cause in made.collectives if cause and cause.change]
    return max(found, key=lambda pair: pair[0])[1]


def ask(loss, parameters, **batch):
    def step(params, batch):
        gradient = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, gradient)

    shardings = jax.tree.map(lambda x: x.sharding, parameters)
    step = jax.jit(step, out_shardings=shardings)
    return forecast(step, parameters, batch, confirm=False)


def fully_sharded(rows):
    """Parameters over 'fsdp', and rows over some axes."""
    mesh = make_mesh('data', 'fsdp')
    parameters = arrays(
        mesh, up=((WIDTH, HIDDEN), ('fsdp',)), down=((HIDDEN, WIDTH), (None, 'fsdp'))
    )

    def loss(p, batch):
        return jnp.mean((jnp.tanh(batch['x'] @ p['up']) @ p['down'] - batch['y']) ** 2)

    shape = 8 * ROWS, WIDTH
    return loss, parameters, arrays(mesh, x=(shape, (rows,)), y=(shape, (rows,)))


def test_rows_that_lack_an_axis_of_the_parameters():
    loss, parameters, batch = fully_sharded('data')
    made = ask(loss, parameters, **batch)
    cause = first(made)
    assert "the 4,096 rows of batch/x, PartitionSpec('data', None), are not" in cause.why
    assert (
        cause.avoidable and "over 'fsdp', too: lay out batch/x as PartitionSpec((" in cause.change
    )
    loss, parameters, batch = fully_sharded(('data', 'fsdp'))
    mended = ask(loss, parameters, **batch)
    assert sent(mended) < sent(made) and cause.effect.sent[1] < cause.effect.sent[0] == sent(made)
    assert not any(cause.change or cause.avoidable for _, cause in mended.collectives)


def test_lint_knows_the_axis_by_what_the_products_do():
    """Nothing says that 'shards' is for rows, but all products sum over it in parts."""
    mesh = make_mesh('data', 'shards')
    parameters = arrays(
        mesh, up=((WIDTH, HIDDEN), ('shards',)), down=((HIDDEN, WIDTH), ('shards',))
    )
    batch = arrays(mesh, x=((ROWS, WIDTH), ('data',)))

    def step(params, batch):
        def loss(p):
            return jnp.mean((jnp.tanh(batch['x'] @ p['up']) @ p['down']) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    found = [one.message for one in lint(jax.jit(step), parameters, batch) if 'rows' in one.message]
    assert any("not divided along 'shards'" in message for message in found), found


def attend(q, k, v):
    weights = jax.nn.softmax(jnp.einsum('bqnk,bsnk->bnqs', q, k))
    return jnp.einsum('bnqs,bsnk->bqnk', weights, v)


def fused(p, batch):
    x = batch['x']
    qkv = (x @ p['qkv']).reshape(*x.shape[:2], 3, HEADS, SIZE)
    return jnp.mean(attend(*(qkv[:, :, n] for n in range(3))) ** 2)


def heads_first(p, batch):
    x = batch['x']
    qkv = (x @ p['qkv']).reshape(*x.shape[:2], HEADS, 3, SIZE)
    return jnp.mean(attend(*(qkv[:, :, :, n] for n in range(3))) ** 2)


def halves(p, batch):
    gate, up = jnp.split(batch['x'] @ p['qkv'], 2, axis=-1)
    return jnp.mean((gate * up) ** 2)


def pairs(p, batch):
    x = batch['x']
    both = jnp.einsum('bld,dpn->blpn', x, p['qkv'])
    return jnp.mean((both[:, :, 0] * both[:, :, 1]) ** 2)


def behind(p, batch):
    return jnp.mean((batch['rows'].reshape(-1, WIDTH) @ p['qkv']) ** 2)


def in_front(p, batch):
    return jnp.mean((batch['rows'].swapaxes(0, 1).reshape(-1, WIDTH) @ p['qkv']) ** 2)


def joined(p, batch):
    both = jnp.concatenate([batch['x'], 2 * batch['x']])
    return jnp.mean((both.reshape(-1, WIDTH) @ p['qkv']) ** 2)


def stacked(p, batch):
    both = jnp.stack([batch['x'], 2 * batch['x']], 1).reshape(64, LENGTH, WIDTH)
    return jnp.mean((both.reshape(-1, WIDTH) @ p['qkv']) ** 2)


@pytest.mark.parametrize(
    ('fault', 'mended', 'at', 'why', 'change'),
    [
        (
            joined,
            stacked,
            'jnp.concatenate',
            "concatenates dimension 0 of 64 elements, which is sharded over 'data'",
            f"write jnp.stack([batch['x'], 2 * batch['x']], 1).reshape(64, {LENGTH}, {WIDTH}) at",
        ),
        (
            fused,
            heads_first,
            'reshape(',
            f"splits dimension 2 of {3 * HEADS * SIZE} elements, which is sharded over 'model', "
            'into a first part of 3, which 4 devices do not divide',
            f'write reshape(32, {LENGTH}, {HEADS}, 3, {SIZE}) at',
        ),
        (
            halves,
            pairs,
            'jnp.split',
            f'splits dimension 2 of {3 * HEADS * SIZE} elements',
            'keep 2 arrays in place of params/qkv, one for each part',
        ),
        (
            behind,
            in_front,
            'reshape(',
            "merges dimension 1 of 32 elements, which is sharded over 'data', behind",
            "write jnp.moveaxis(batch['rows'], 1, 0).reshape(",
        ),
    ],
    ids=['rows of two arrays', 'a fused kernel', 'a split', 'a merge'],
)
def test_an_operation_that_cannot_keep_the_layout(fault, mended, at, why, change):
    mesh = make_mesh('data', 'model')
    columns = 3 * HEADS * SIZE

    def asked(loss):
        shape, spec = (WIDTH, columns), (None, 'model')
        if loss is pairs:
            shape, spec = (WIDTH, 2, columns // 2), (None, None, 'model')
        used = {'x': ((32, LENGTH, WIDTH), ('data',))}
        if loss in (behind, in_front):
            used = {'rows': ((LENGTH, 32, WIDTH), (None, 'data'))}
        return ask(loss, arrays(mesh, qkv=(shape, spec)), **arrays(mesh, **used))

    made, good = asked(fault), asked(mended)
    cause = first(made)
    assert cause.source.endswith(line_of(fault, at)) and why in cause.why
    assert change in cause.change and cause.avoidable and sent(good) < sent(made)
    # By formula, its exchanges are gone; the program that is written so sends about as much.
    before, after = cause.effect.sent
    assert before == sent(made) and after == pytest.approx(sent(good), abs=0.2 * before)
    assert not any(cause.change or cause.avoidable for _, cause in good.collectives)


def test_microbatches_that_take_rows_from_all_devices():
    mesh = make_mesh('data', 'model')

    def loss(p, batch):
        parts = batch['x'].reshape(3, ROWS // 4, WIDTH)
        return jnp.mean(jax.lax.map(lambda x: jnp.sum((x @ p['w']) ** 2), parts))

    parameters = arrays(mesh, w=((WIDTH, HIDDEN), ()))
    batch = arrays(mesh, x=((3 * ROWS // 4, WIDTH), (('data', 'model'),)))
    cause = first(ask(loss, parameters, **batch))
    assert cause.source.endswith(line_of(loss, 'reshape(')) and cause.array == 'batch/x'
    wanted = f"write jnp.moveaxis(batch['x'].reshape({ROWS // 4}, 3, {WIDTH}), 0, 1) at"
    assert cause.change.startswith(wanted) and 'each device keeps its rows' in cause.change


def shard(x, mesh, spec):
    return jax.lax.with_sharding_constraint(
        x,
        NamedSharding(mesh, spec),
    )


@pytest.mark.parametrize(('classes', 'spec'), [(1024, ('data', None)), (1002, ('data', 'model'))])
def test_a_constraint_that_gathers_and_one_whose_axis_does_not_divide(classes, spec):
    """The line is the one that calls the helper, and the next multiple of 4 is 1,004."""
    mesh = make_mesh('data', 'model')

    def loss(p, batch):
        logits = shard(batch['x'] @ p['out'], mesh, P(*spec))
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    columns = (None, 'model') if classes % 4 == 0 else ()
    parameters = arrays(mesh, out=((WIDTH, classes), columns))
    cause = first(ask(loss, parameters, **arrays(mesh, x=((4 * ROWS, WIDTH), ('data',)))))
    assert cause.source.endswith(line_of(loss, 'shard('))
    if classes % 4:
        assert 'whose 4 devices do not divide 1,002' in cause.why
        assert '1,004 elements in place of 1,002, the next multiple of 4' in cause.change
    else:
        assert "asks for PartitionSpec('data', None)" in cause.why and cause.rule == ''
        assert "PartitionSpec('data', 'model')" in cause.change


def test_a_pipeline_that_passes_its_state_on_by_a_roll_needs_its_permutations():
    mesh = make_mesh('data', 'stage')
    lay = NamedSharding(mesh, P('stage'))

    def loss(p, batch):
        def tick(state, new):
            state = jax.lax.with_sharding_constraint(jnp.roll(state, 1, axis=0).at[0].set(new), lay)
            state = jnp.tanh(jnp.einsum('srd,sde->sre', state, p['w']))
            return jax.lax.with_sharding_constraint(state, lay), jnp.mean(state**2, (1, 2))

        errors = jax.lax.scan(tick, jnp.zeros((4, ROWS, WIDTH)), batch['x'])[1]
        return jnp.sum(jnp.where(jnp.arange(4) == 3, errors, 0))

    parameters = arrays(mesh, w=((4, WIDTH, WIDTH), ('stage',)))
    made = ask(loss, parameters, **arrays(mesh, x=((8, ROWS, WIDTH), (None, 'data'))))
    moved = [(c, cause) for c, cause in made.collectives if c.kind == 'collective-permute']
    assert moved and not any(cause and (cause.change or cause.avoidable) for _, cause in moved)
