"""Programs that compute in the wrong order: the first change says what to write, and what it saves.

Each is compiled with the fault and with the mend, and the promise is what the mended one sends.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from plain_steps import line_of

from meshwright import forecast, lint

AXES, TURN = ('data', 'part'), [(i, (i + 1) % 4) for i in range(4)]


@functools.cache
def make_mesh():
    return Mesh(np.reshape(jax.devices(), (2, 4)), AXES, axis_types=(AxisType.Auto,) * 2)


def lay(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(make_mesh(), P(*spec)))


def struct(shape, *spec, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(make_mesh(), P(*spec)))


def leave(function):
    return function


def shard_map(function, *specs):
    """A shard_map whose results are laid out as its first argument."""
    return jax.shard_map(function, mesh=make_mesh(), in_specs=specs, out_specs=specs[0])


def of_codes(layer):
    """A stack of layers on rows, with weights of one byte and a scale for each column."""

    def step(codes, scales, x):
        return jax.lax.scan(lambda x, w: (lay(layer(x, *w), AXES), None), x, (codes, scales))[0]

    return jax.jit(step)


def wide(x, codes, scale):
    return jnp.tanh(x @ lay(codes.astype(jnp.float32) * (scale / 127)))


def narrow(x, codes, scale):
    return jnp.tanh(x @ (lay(codes).astype(jnp.float32) * (scale / 127)))


def attend(q, k, out):
    return out + jnp.einsum('bqhd,bkhd->bqhd', q, jnp.repeat(k, q.shape[2] // k.shape[2], 2))


def go_round(q, k, out):
    def hop(carry, _):
        k, out = carry
        out = attend(q, k, out)
        return (jax.lax.ppermute(k, 'part', TURN), out), None

    return jax.lax.scan(hop, (k, out), length=3)[0]


def repeat_before(q, k):
    k, out = go_round(q, jnp.repeat(k, 4, axis=2), jnp.zeros_like(q))
    return attend(q, k, out)


def repeat_after(q, k):
    k, out = go_round(q, k, jnp.zeros_like(q))
    return attend(q, k, out)


def of_heads(ring):
    """The gradient of a ring over the tokens, with four heads of queries for each of keys."""
    rows = P('data', 'part')

    def step(wq, wk, x):
        q, k = (jnp.einsum('btd,dhe->bthe', x, w) for w in (wq, wk))
        return jnp.mean(shard_map(ring, rows, rows)(q, k) ** 2)

    return jax.jit(jax.grad(step, (0, 1)))


def sample(x, head):
    return jax.lax.top_k(lay(x @ head, 'data', 'part') / 2, 8)


def sample_parts(x, head):
    def best(x):
        values, ids = jax.lax.top_k(x, 8)
        ids += jax.lax.axis_index('part') * x.shape[1]
        values, ids = (jax.lax.all_gather(v, 'part', axis=1, tiled=True) for v in (values, ids))
        values, chosen = jax.lax.top_k(values, 8)
        return values, jnp.take_along_axis(ids, chosen, 1)

    specs = {'in_specs': P('data', 'part'), 'out_specs': P('data')}
    logits = lay(x @ head, 'data', 'part') / 2
    return jax.shard_map(best, mesh=make_mesh(), check_vma=False, **specs)(logits)


def to_waves(field):
    return lay(jnp.fft.fftn(lay(field * 2, None, 'part'), axes=(1, 2, 3)), None, None, 'part')


def to_waves_by_dimension(field):
    def transform(u):
        u = jnp.fft.fftn(u, axes=(2, 3))
        u = jax.lax.all_to_all(u, 'part', split_axis=2, concat_axis=1, tiled=True)
        return jnp.fft.fft(u, axis=1)

    specs = {'in_specs': P(None, 'part'), 'out_specs': P(None, None, 'part')}
    return jax.shard_map(transform, mesh=make_mesh(), **specs)(lay(field * 2, None, 'part'))


def choose(cache, beam):
    rows = (jnp.arange(64)[:, None] * 4 + beam).reshape(-1)
    return lay(jnp.take(cache, rows, axis=0), AXES)


def choose_in_groups(cache, beam):
    chosen = jax.vmap(lambda c, b: c[b])(cache.reshape(64, 4, 32, 8), beam)
    return lay(chosen.reshape(cache.shape), AXES)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A program with a fault, and what is said about it."""

    bad: Callable
    good: Callable
    args: tuple
    line: str
    text: str


CODES = struct((3, 128, 128), None, None, 'part', dtype='int8'), struct((3, 128))
FAULTS = {
    'a cast before a gather': Fault(
        of_codes(wide),
        of_codes(narrow),
        (*CODES, struct((64, 128), AXES)),
        line_of(wide, 'lay('),
        'constrain int8[128, 128], before it is widened at ',
    ),
    'a repeat before a ring': Fault(
        of_heads(repeat_before),
        of_heads(repeat_after),
        (struct((64, 8, 16)), struct((64, 2, 16)), struct((4, 128, 64), 'data', 'part')),
        line_of(go_round, 'ppermute'),
        'exchange float32[2, 32, 2, 16] at ',
    ),
    'the best of all logits': Fault(
        jax.jit(sample),
        jax.jit(sample_parts),
        (struct((64, 128), 'data'), struct((128, 4096), None, 'part')),
        line_of(sample, 'top_k'),
        'take the best 8 of each part of the 4,096 elements at ',
    ),
    'rows within groups': Fault(
        jax.jit(choose),
        jax.jit(choose_in_groups),
        (struct((256, 32, 8), AXES), struct((64, 4), AXES, dtype='int32')),
        line_of(choose, 'jnp.take'),
        'reshape to (64, 4, ...), use jnp.take_along_axis along dimension 1',
    ),
    'a transform of all dimensions': Fault(
        jax.jit(to_waves),
        jax.jit(to_waves_by_dimension),
        (struct((3, 32, 32, 32), None, 'part'),),
        line_of(to_waves, 'fftn'),
        'dimensions 2 and 3 of (3, 32, 32, 32), which each device has whole',
    ),
}


def sent(made):
    return sum(c.total_bytes for c, _ in made.collectives)


@pytest.mark.parametrize('kind', FAULTS)
def test_the_first_change_is_another_order(kind):
    fault = FAULTS[kind]
    made, good = (forecast(f, *fault.args, confirm=False) for f in (fault.bad, fault.good))
    cause = next(cause for _, cause in made.collectives if cause and cause.change)
    assert cause.source.endswith(fault.line) and fault.text in cause.change
    assert cause.effect.sent == (sent(made), pytest.approx(sent(good), rel=0.05))
    assert not any(cause and cause.change for _, cause in good.collectives)


def fine_tune(optimizer):
    """A step that trains the head of a model, and its arguments."""

    def step(params, state, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch @ params['base']) @ params['head']) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = {'base': struct((256, 512)), 'head': struct((512, 16))}
    state = jax.tree.map(
        lambda x: struct(x.shape, dtype=x.dtype), jax.eval_shape(optimizer.init, params)
    )
    return step, (params, state, struct((64, 256), AXES))


def test_moments_of_frozen_parameters_are_told():
    """Two moments of 256 * 512 float32 numbers, and none if the optimizer sees the head only."""
    frozen, trained = {'base': True, 'head': False}, {'base': False, 'head': True}
    still = optax.masked(optax.set_to_zero(), frozen)
    for adam, count in ((optax.adam(1e-3), 1), (optax.masked(optax.adam(1e-3), trained), 0)):
        step, args = fine_tune(optax.chain(adam, still))
        found = lint(jax.jit(step, donate_argnums=(0, 1)), *args, compile=False)
        assert [f.kind for f in found] == ['frozen parameters'] * count
        assert all('params/base is returned as it came' in f.message for f in found)
        assert all('1.0 MB on each device' in f.message for f in found)
        assert all(f.where.endswith(line_of(fine_tune, 'optimizer.update')) for f in found)


def train_layers(around, inside):
    """A step with a scan over 8 layers, and its arguments."""

    def block(x, p):
        return x + jnp.tanh(x @ p['up']) @ p['down'], None

    def stack(layers, x):
        return jax.lax.scan(inside(block), x, layers)[0]

    def step(layers, x):
        return jax.grad(lambda layers: jnp.mean(around(stack)(layers, x) ** 2))(layers)

    layers = {'up': struct((8, 64, 256)), 'down': struct((8, 256, 64))}
    return jax.jit(step), (layers, struct((64, 32, 64), AXES))


def test_a_checkpoint_around_all_layers_is_told_with_what_they_save():
    step, args = train_layers(jax.checkpoint, leave)
    good, _ = train_layers(leave, jax.checkpoint)
    (found,) = (f for f in lint(step, *args, compile=False) if f.kind == 'checkpoint')
    assert found.where.endswith(line_of(train_layers, 'jax.lax.scan'))
    kept, after = (float(n) for n in re.findall(r'([0-9.]+) MB', found.message))
    held = [f.lower(*args).compile().memory_analysis().temp_size_in_bytes for f in (step, good)]
    assert (kept - after) * 1e6 == pytest.approx(held[0] - held[1], rel=0.2)
    assert not any(f.kind == 'checkpoint' for f in lint(good, *args, compile=False))


def simulate(constrain):
    """A step that collects 16 steps of 256 environments, and its arguments."""

    def step(weights, seed):
        env = constrain(jax.random.normal(jax.random.key(seed), (256, 32)))

        def tick(env, _):
            env = jnp.tanh(env @ weights['up']) @ weights['down']
            return env, env

        return jnp.mean(jax.lax.scan(tick, env, length=16)[1])

    weights = {'up': struct((32, 128)), 'down': struct((128, 32))}
    return jax.jit(step), (weights, struct((), dtype='uint32'))


def test_work_on_what_is_made_inside_is_told_for_each_axis_that_nothing_uses():
    """Two products of 2 * 256 * 32 * 128 FLOPs, 16 times; 'data' is used once rows are over it."""
    step, args = simulate(leave)
    found = lint(step, *args, compile=False)
    assert [f.kind for f in found] == ['whole work'] * len(AXES)
    assert all(f.where.endswith(line_of(simulate, 'jax.random.normal')) for f in found)
    assert all(f'100% of the {16 * 2 * 2 * 256 * 32 * 128:.3g} FLOPs' in f.message for f in found)
    step, args = simulate(lambda x: lay(x, AXES))
    assert not lint(step, *args, compile=False)
