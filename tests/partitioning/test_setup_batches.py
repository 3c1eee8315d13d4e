"""partitioner.setup: batches of any structure, static arguments, and states that exist."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from partitioning import LogicallyPartitioned, PjitPartitioner, check_compiled_once

pytestmark = [pytest.mark.core, pytest.mark.smoke]

KEY = jax.random.key(0)
FSDP = PjitPartitioner(layout='fsdp')
ROWS = np.linspace(-1, 1, 8 * 64, dtype='float32').reshape(8, 64)


def init(key):
    return {'w': jax.random.normal(key, (64, 64))}


def step(state, batch):
    return {'w': state['w'] - batch['lr'] * (batch['x'].T @ batch['x'])}, 0.0


def scanned(state, rows):
    return jax.lax.scan(lambda s, x: ({'w': s['w'] + x.T @ x}, 0.0), state, rows)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def inputs(function, *args):
    """The specs of the arrays of the batch in the compiled function."""
    return jax.tree.map(lambda s: s.spec, function.lower(*args).compile().input_shardings[0][1])


def test_scalars_of_a_batch_are_replicated():
    batch = {'x': ROWS, 'lr': np.float32(0.1), 'nothing': None}
    state, run, data_spec = FSDP.setup(init, step, KEY)
    assert data_spec == P('data')
    assert inputs(run, state, batch) == {'x': P('data'), 'lr': P(), 'nothing': None}
    before = np.asarray(state['w'])
    state, _ = run(state, batch)
    close(state['w'], before - 0.1 * ROWS.T @ ROWS)
    run(state, batch)
    check_compiled_once(run)


def test_arrays_of_other_sizes_are_laid_out_by_their_own_size():
    graph = {'nodes': np.ones((48, 2)), 'edges': np.ones((80, 2)), 'graphs': np.ones(8)}
    state, run, _ = FSDP.setup(init, lambda s, g: (s, g), KEY)
    assert inputs(run, state, graph) == dict.fromkeys(graph, P('data'))


@pytest.mark.parametrize(
    'key', [KEY, jax.random.PRNGKey(0), {'dropout': jax.random.PRNGKey(0)}, np.float32(1)]
)
def test_keys_and_scalars_before_the_batch(key):
    def keyed(state, key, scale, x):
        return {'w': state['w'] + scale * x.T @ x}

    state, run, _ = FSDP.setup(init, keyed, KEY, static_argnums=2)
    lowered = run.lower(state, key, 3, ROWS).compile()
    specs = jax.tree.map(lambda s: s.spec, lowered.input_shardings[0])
    assert specs[2] == P('data')
    before = np.asarray(state['w'])
    state = run(state, key, 3, ROWS)
    close(state['w'], before + 3 * ROWS.T @ ROWS)
    run(state, key, 3, ROWS)
    check_compiled_once(run)


def test_a_batch_after_a_key_that_does_not_divide():
    _, run, _ = FSDP.setup(init, lambda state, key, x: (state, x), KEY)
    with pytest.raises(ValueError, match=r'^x has shape \(9, 64\), but 8 data shards'):
        run(init(KEY), jax.random.PRNGKey(0), np.ones((9, 64)))


@pytest.mark.parametrize('data_spec', [P(None, 'data'), {'a': P(None, 'data'), 'b': P()}])
def test_batches_of_steps_that_are_scanned(data_spec):
    rows = np.stack([ROWS * n for n in range(1, 6)])
    batch = {'a': rows, 'b': np.float32(1)}
    state, run, given = FSDP.setup(
        init, lambda s, b: scanned(s, b['a'] * b['b']), KEY, data_spec=data_spec
    )
    assert given == data_spec
    assert inputs(run, state, batch) == {'a': P(None, 'data'), 'b': P()}
    before = np.asarray(state['w'])
    state, _ = run(state, batch)
    close(state['w'], before + 55 * ROWS.T @ ROWS)  # 1 + 4 + 9 + 16 + 25


@pytest.mark.parametrize(
    'batch, said',
    [
        (
            np.ones((5, 8, 64)),
            r"^batch has shape \(5, 8, 64\).*size 5: pass 8 rows, or .*=P\(None, 'data'\)$",
        ),
        (  # features are no rows
            np.ones((30, 64)),
            r'size 30: pass 24 or 32 rows, .*padded_data_partition_spec, which pads them$',
        ),
        (  # steps of rows, and what stands next to them
            {'x': np.ones((5, 8, 64)), 'y': np.ones((5, 8)), 'w': np.ones((5, 3))},
            r"\{'x': P\(None, 'data'\), 'y': P\(None, 'data'\), 'w': P\(\)\}$",
        ),
        (
            {'x': ROWS, 'y': np.ones(7), 'z': 1.0},
            r"batch\['y'\] has shape \(7,\).*=\{'x': P\('data'\), 'y': P\(\), 'z': P\(\)\}$",
        ),
        (
            {'x': ROWS, 'y': [1, 2]},
            r"^batch\['y'\] is a list of 2 numbers.*asarray\(batch\['y'\]\)$",
        ),
        ([np.ones((12, 3))], r'^batch\[0\] .*\(data 8\).*12.*8 or 16.*_spec, which pads them$'),
        ({'x': np.array([[1, 2], [3]], object)}, r"batch\['x'\] is a numpy array of dtype object"),
    ],
)
@pytest.mark.parametrize('method', ['__call__', 'lower', 'eval_shape'])
def test_sizes_that_do_not_divide_are_named(batch, said, method):
    state, run, _ = FSDP.setup(init, lambda s, batch: s, KEY)
    with pytest.raises(ValueError, match=said) as error:
        getattr(run, method)(state, batch)
    assert '\n' not in str(error.value)
    run(state, ROWS)  # the state was not donated, and another batch is fine


@pytest.mark.parametrize(
    'data_spec, said',
    [
        ('data', r"^data_spec must be a PartitionSpec, .*not 'data': write P\('data'\)$"),
        (('data', None), r"not \('data', None\): write P\('data', None\)$"),
        (('batch', None), r"not \('batch', None\); plan\.specs"),
        ({'x': 3}, r"^data_spec\['x'\] must be a PartitionSpec, a Sharding or None, not 3$"),
        ({'x': P('batch')}, r"^data_spec\['x'\]: P\('batch'\): mesh axis.*write P\('data'\)$"),
        (P('date'), "data_spec: .*mesh axis 'date' does not exist.*Did you mean 'data'"),
    ],
)
def test_values_that_are_not_specs_of_a_batch(data_spec, said):
    with pytest.raises(ValueError, match=said):
        FSDP.setup(init, step, KEY, data_spec=data_spec)


def test_specs_of_another_batch():
    state, run, _ = FSDP.setup(init, lambda s, b: s, KEY, data_spec={'x': P('data')})
    with pytest.raises(ValueError, match=r"^data_spec has 'x', but b has no 'x': give data_spec"):
        run(state, {'y': ROWS})
    state, run, _ = FSDP.setup(init, lambda s, b: s, KEY)
    state = run(state, {'x': ROWS, 'lr': 1.0})
    with pytest.raises(ValueError, match=r'b has the structure .*lr.* first call.*setup again'):
        run(state, {'x': ROWS})


@pytest.mark.parametrize(
    'args, said',
    [
        ((init, None, KEY), '^train_step must be a function, not None'),
        (
            (step, init, KEY),
            r'^step does not take .*init function comes first.*setup\(init, step, ',
        ),
        ((init, step), r'^init\(key\) got 0 arguments.*write setup\(init, step, key\)$'),
        (
            (init, step, KEY, P('data')),
            r'^argument 2 of the init function is .*data_spec=\.\.\.\)$',
        ),
        ((init, functools.partial(step, batch=ROWS), KEY), r'but step takes \(state\): write a'),
        ((nn.Dense(4), step, KEY, ROWS), r'^Dense is a module.*setup\(model.init, step, key, x\)$'),
        (
            (init, nn.Dense(4), KEY),
            r'^train_step must take \(state, batch\).*Dense takes \(inputs\)',
        ),
    ],
)
def test_functions_that_setup_cannot_use(args, said):
    with pytest.raises(ValueError, match=said):
        FSDP.setup(*args)


def test_a_padded_batch():
    spec = FSDP.padded_data_partition_spec
    state, run, _ = FSDP.setup(init, lambda s, x: (s, x.sum()), KEY, data_spec=spec)
    close(run(state, ROWS[:5])[1], ROWS[:5].sum())


# Static arguments.


def with_flag(state, batch, scale=1.0, train=True):
    return {'w': state['w'] * (2.0 if train else 1.0) * scale}, batch.sum()


def test_static_arguments():
    state, run, _ = FSDP.setup(init, with_flag, KEY, static_argnums=3, donate=False)
    for args, keywords, factor in (
        ((), {}, 2),
        ((3.0,), {}, 6),
        ((3.0, False), {}, 3),
        ((), {'train': False}, 1),
        ((), {'scale': 3.0, 'train': False}, 3),
    ):
        close(run(state, ROWS, *args, **keywords)[0]['w'], factor * state['w'])
    assert not state['w'].is_deleted()  # donate=False
    assert run.num_traces() <= 3  # of each value of train, at most with two kinds of scale


def test_a_bool_that_is_not_static():
    state, run, _ = FSDP.setup(init, with_flag, KEY)
    with pytest.raises(ValueError, match=r'^with_flag .*train=False .*static_argnums=3'):
        run(state, ROWS, train=False)


@pytest.mark.parametrize('method', ['setup', 'plan'])
def test_an_integer_in_place_of_a_random_key(method):
    with pytest.raises(ValueError, match=r'init needs a random key.* is 3: .* jax.random.key\(3\)'):
        getattr(FSDP, method)(*((init, with_flag) if method == 'setup' else (init,)), 3)


def test_the_state_and_the_batch_are_not_static():
    with pytest.raises(ValueError, match=r'static_argnums=\(1,\) names batch'):
        FSDP.setup(init, with_flag, KEY, static_argnums=(1,))


# States that exist.


class Layer(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        self.count = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        return self.linear(x)


def test_an_existing_state():
    given = {'w': np.ones((64, 64), 'float32'), 'step': 0, 'rate': jnp.float32(2) * 1}
    add = lambda s, b: {'w': s['w'] + b.sum(), 'step': s['step'] + 1, 'rate': s['rate']}  # noqa: E731
    state, run, _ = FSDP.setup(given, add)
    assert state['w'].addressable_shards[0].data.shape == (8, 64)
    for _ in range(2):
        state = run(state, ROWS)
    check_compiled_once(run)
    close(state['w'], 1 + 2 * ROWS.sum())
    assert int(state['step']) == 2
    assert (given['w'] == 1).all()


def test_an_existing_module():
    def train(layer, batch):
        layer.count[...] += 1
        return layer, layer(batch).sum()

    state, run, _ = FSDP.setup(Layer(), train)
    assert isinstance(state, Layer)
    state, _ = run(state, ROWS)
    assert int(state.count[...]) == 1
    FSDP.plan(state).check(state)


def test_boxes_of_an_existing_state_are_removed():
    rules = [('batch', 'data'), ('embed', 'model')]
    boxed = {'w': LogicallyPartitioned(jnp.ones((8, 8)), ('embed', None))}
    partitioner = PjitPartitioner({'data': 4, 'model': 2}, rules)
    state, _, _ = partitioner.setup(boxed, lambda s, b: s)
    assert state['w'].sharding.spec == P('model', None)


def test_states_that_hold_no_arrays():
    for wrong, said in (
        ({'w': jax.ShapeDtypeStruct((8,), 'float32')}, 'the state holds a ShapeDtypeStruct .*at w'),
        ({'w': ROWS, 'f': 'name'}, "the state holds the string 'name' at f"),
    ):
        with pytest.raises(ValueError, match=said):
            FSDP.setup(wrong, step)


# Keywords, and batches of to_global.


@pytest.mark.parametrize(
    'call, error, said',
    [
        (
            lambda: FSDP.setup(init, step, key=KEY),
            TypeError,
            r"no keyword 'key': .*by position.*key\)$",
        ),
        (
            lambda: FSDP.setup(init, step, KEY, static_argnames='t'),
            TypeError,
            'write static_argnums',
        ),
        (
            lambda: FSDP.setup(init, step, KEY, data_specs=P()),
            TypeError,
            "Did you mean 'data_spec'",
        ),
        (lambda: FSDP.partition(step, in_specs=None), TypeError, "'in_specs': write in_shardings"),
        (
            lambda: FSDP.partition(step, None, None, donate_argnames='s'),
            TypeError,
            'donate_argnums',
        ),
        (
            lambda: FSDP.compile(step, ROWS),
            ValueError,
            r'^step is not partitioned: write compile\(',
        ),
        (
            lambda: FSDP.to_global({'s': np.array(['a'] * 8)}),
            ValueError,
            r"^batch\['s'\] is a numpy array of dtype <U1: remove it from batch, or",
        ),
        (lambda: FSDP.to_global({'s': ['a']}), ValueError, r"^batch\['s'\]\[0\] is a str, 'a'"),
        (lambda: FSDP.to_global(ROWS, P('data')), ValueError, r"\(batch, spec=P\('data'\)\)$"),
        (lambda: FSDP.to_global(ROWS, spec=P('batch')), ValueError, r"^spec: .*write P\('data'\)$"),
        (
            lambda: FSDP.to_global({'x': ROWS, 'y': ROWS}, spec={'x': P('data')}),
            ValueError,
            r"^spec has no 'y', but the batch has 'y': give spec the structure of the batch",
        ),
    ],
)
def test_calls_that_do_not_fit(call, error, said):
    with pytest.raises(error, match=said) as caught:
        call()
    assert '\n' not in str(caught.value)
