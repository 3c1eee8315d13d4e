"""Misused partitioned functions: the right result, or one error that names what to change."""

import re
import traceback

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import jax_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from partitioning import PaddedSpec, PjitPartitioner

pytestmark = pytest.mark.core

DATA = P('data')
SPECS = {'w': P('data', None), 'b': P('model'), 'step': P()}
X = np.arange(32, dtype='float32').reshape(8, 4)
BATCH = {'x': X}


def make_state():
    return {'w': X, 'b': np.ones(4, 'float32'), 'step': np.int32(0)}


def train_step(state, batch):
    new = {**state, 'w': state['w'] + batch['x'].sum(), 'step': state['step'] + 1}
    return new, {'loss': batch['x'].mean()}


class Rows:
    def __init__(self):
        self.x = X


def power(x, n):
    return x**n


def identity(x):
    return x


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2)  # data 4 x model 2


@pytest.fixture(name='step', scope='module')
def _step(partitioner):
    return partitioner.partition(train_step, (SPECS, DATA), (SPECS, None))


@pytest.fixture(name='placed')
def _placed(partitioner):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(partitioner.mesh, spec)),
        make_state(),
        SPECS,
    )


def error_of(call, *args, kind=ValueError, **kwargs):
    """The message of the only error in the traceback of a call."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    shown = ''.join(traceback.format_exception(caught.value))
    assert shown.count('Traceback (most recent call last)') == 1
    assert '\n' not in str(caught.value)
    return str(caught.value)


def assert_says(message, *parts):
    for part in parts:
        assert part in message, f'{part!r} is not in {message!r}'


# When a function is partitioned.


@pytest.mark.parametrize(
    'fn, specs, settings, parts',
    [
        (train_step, (SPECS, DATA, None), {}, ['3 entries', 'state, batch', 'remove 1']),
        (
            power,
            (DATA, None),
            {'static_argnums': 1},
            ['2 entries', '(x)', 'static argument (n) has no entry'],
        ),
        (identity, {'w': DATA}, {}, ['tuple', 'dict', '(specs,)']),
        (identity, 'data', {}, ['tuple', 'not a str', "write (P('data'),)"]),
        (
            train_step,
            (SPECS, P('batch', 'embed')),
            {},
            ['in_shardings[1] (batch)', "'batch' is a logical axis", "write P('data', None)"],
        ),
        (
            train_step,
            (SPECS, {'x': ('data', None)}),
            {},
            ['in_shardings[1] (batch) at x', "P('data', None)"],
        ),
        (train_step, (SPECS, DATA), {'donate_argnums': 2}, ['donate_argnums=2', 'batch (1)']),
        (train_step, (SPECS, DATA), {'static_argnums': (5,)}, ['static_argnums=5', 'state (0)']),
        (train_step, (SPECS, DATA), {'donate_argnums': 'state'}, ['donate_argnums', "'s'"]),
        (
            power,
            (DATA,),
            {'static_argnums': 1, 'donate_argnums': -1},
            ['n is in both', 'static_argnums', 'donate_argnums'],
        ),
        (5, None, {}, ['must be a function', '5']),
        ((make_state(), X), None, {}, ['a function, not a tuple of 2', 'without calling it']),
        (identity, None, {'on_recompile': 'warn'}, ['on_recompile', "'allow'", "'error'"]),
    ],
    ids=[
        *('too many', 'static', 'not a tuple', 'a text', 'names', 'no P', 'donated index'),
        *('static index', 'a name', 'both', 'not a function', 'a result', 'policy'),
    ],
)
def test_settings_that_do_not_fit_the_function(partitioner, fn, specs, settings, parts):
    message = error_of(partitioner.partition, fn, specs, None, **settings)
    assert_says(message, *parts)


# Entries and arguments.


@pytest.mark.parametrize(
    'in_specs, out_specs, state, batch, parts',
    [
        (DATA, None, {}, {}, ["state['step']", 'one entry for all of state, batch']),
        ((SPECS,), None, {}, {}, ['1 entry', '2 positional arguments', 'entry for batch']),
        ((DATA, SPECS), None, {}, {}, ['state and batch', 'wrong order']),
        ((SPECS, DATA), None, {'c': X}, {}, ['state:', "no 'c'", 'partitioner.plan']),
        (({**SPECS, 'c': DATA}, DATA), None, {}, {}, ['state:', "has 'c'", "no 'c'"]),
        (({**SPECS, 'b': (DATA,)}, DATA), None, {}, {}, ["state['b']", 'a tuple of 1', 'an array']),
        (
            ({**SPECS, 'step': DATA}, DATA),
            None,
            {},
            {},
            ["state['step']", "P('data') has 1 entry", '0 dimensions'],
        ),
        (
            (SPECS, DATA),
            None,
            {},
            {'x': np.ones((30, 4), 'float32')},
            ["batch['x']", '(30, 4)', "'data'", '28 or 32', "PaddedSpec(P(None), P('data'))"],
        ),
        ((SPECS, DATA), (None,) * 3, {}, {}, ['result', 'a tuple of 3', 'a tuple of 2']),
        (
            (SPECS, DATA),
            ({**SPECS, 'z': P()}, None),
            {},
            {},
            ['result[0]', "has 'z'", "returns no 'z'"],
        ),
        ((SPECS, DATA), (SPECS, DATA), {}, {}, ["result[1]['loss']", '1 entry', '0 dimensions']),
    ],
    ids=[
        *('one for all', 'too few', 'order', 'extra key', 'missing key', 'no leaf', 'rank', 'rows'),
        *('number of results', 'keys of results', 'rank of results'),
    ],
)
def test_specs_that_do_not_fit(partitioner, in_specs, out_specs, state, batch, parts):
    call = partitioner.partition(train_step, in_specs, out_specs)
    for method in (call, call.lower):
        message = error_of(method, make_state() | state, BATCH | batch)
        assert_says(message, 'train_step', *parts)


@pytest.mark.parametrize(
    'arguments, parts',
    [
        (lambda s, b: ((s, {'loss': 0.0}), b), ['tuple of 2 that begins with a dict', 'unpack it']),
        (lambda s, b: ((s,), b), ['tuple of 1', '`state, = train_step(state, batch)`']),
        (lambda s, b: (b['x'], s), ['state and batch are in the wrong order', 'Swap']),
        (lambda s, b: (s['inner'], b), ['state is only the part inner', 'the whole state']),
    ],
    ids=['a result', 'a result of one', 'swapped', 'a part'],
)
@pytest.mark.parametrize('how', ['setup', 'partition'])
def test_other_values_than_the_state(partitioner, how, arguments, parts):
    state = {'inner': make_state(), 'n': jnp.zeros(())}

    def train_step(state, batch):
        return state, jax.tree.leaves(batch)[0].mean()

    if how == 'setup':
        call = PjitPartitioner({'data': 8}, 'fsdp').setup(state, train_step)[1]
    else:
        call = partitioner.partition(train_step, ({'inner': SPECS, 'n': P()}, DATA), None)
    message = error_of(call, *arguments(state, BATCH))
    assert_says(message, 'train_step', *parts)
    assert 'specs from this' not in message


def test_a_list_of_arguments(partitioner):
    """The number of entries is known only when such a function is called."""
    call = partitioner.partition(lambda *xs: sum(xs), (DATA, DATA), DATA)
    np.testing.assert_array_equal(call(X, X), 2 * X)
    assert_says(error_of(call, X), '2 entries', 'only xs[0] was passed')


def test_an_entry_for_an_argument_with_a_default(partitioner):
    call = partitioner.partition(lambda x, scale=2.0: x * scale, (DATA, None), DATA)
    np.testing.assert_array_equal(call(X, 3.0), 3 * X)
    assert_says(error_of(call, X), '2 entries', 'only x was passed', 'default')


@pytest.mark.parametrize('value', ['abc', object()], ids=['string', 'object'])
def test_results_that_are_not_arrays(partitioner, value):
    call = partitioner.partition(lambda x: (x, {'name': value}), (DATA,), None)
    assert_says(error_of(call, X), "result[1]['name']", type(value).__name__, 'only arrays')


@pytest.mark.parametrize('entry', ['property', 'written'])
def test_padding_on_request(partitioner, entry):
    """30 rows over 4 devices: the gradient equals the one on one device."""
    rows = np.random.default_rng(0).normal(size=(30, 4)).astype('float32')
    w = np.linspace(-1, 1, 4, dtype='float32')
    gradient = jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    spec = PaddedSpec(P(), DATA) if entry == 'written' else partitioner.padded_data_partition_spec
    call = partitioner.partition(gradient, (P(), spec), None)
    for actual, expected in zip(call(w, rows), gradient(w, rows), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_none_for_everything(partitioner, placed):
    """None replicates host arrays; a state that is laid out needs its own specs."""
    call = partitioner.partition(train_step, None, None)
    state, metrics = call(make_state(), BATCH)
    assert float(metrics['loss']) == X.mean()
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state))
    message = error_of(call, placed, BATCH)
    assert_says(message, "state['b']", "P('model')", 'data 4 x model 2', 'plan.specs')


# What an argument contains.


@pytest.mark.parametrize(
    'batch, parts',
    [
        ({'name': 'abc'}, ["batch['name']", 'str', "'abc'"]),
        ({'name': np.array(['abc'] * 8)}, ["batch['name']", '<U3']),
        ({'name': np.array([None] * 8)}, ["batch['name']", 'dtype object', 'astype']),
        ({'id': 2**40}, ["batch['id']", '1099511627776', 'int32', 'jax_enable_x64']),
        ({'id': object()}, ["batch['id']", 'object', 'remove it from batch']),
        ('abc', ["batch is a str, 'abc'", 'numbers; pass a pytree of arrays']),
        ((row for row in X), ['batch is a generator', 'such as next(iter(batch))']),
        (Rows(), ['batch is a Rows', 'register Rows with jax.tree_util.register_dataclass']),
        ({'x': X.tolist()}, ["batch['x'][0][0]", 'A list of numbers', 'numpy.asarray']),
    ],
    ids=[
        'string',
        'strings',
        'objects',
        'large integer',
        'any object',
        'text',
        'iterator',
        'class',
        'list',
    ],
)
def test_values_that_are_not_arrays(step, batch, parts):
    given = BATCH | batch if isinstance(batch, dict) else batch
    for method in (step, step.eval_shape):
        assert_says(error_of(method, make_state(), given), 'train_step', *parts)


def test_a_description_has_no_data(step):
    abstract = {**make_state(), 'step': jax.ShapeDtypeStruct((), 'int32')}
    assert_says(error_of(step, abstract, BATCH), "state['step']", 'ShapeDtypeStruct')
    assert step.lower(abstract, BATCH).out_info[1]['loss'].shape == ()


def test_a_mode_that_should_be_static(partitioner):
    call = partitioner.partition(power, (DATA, None), DATA)
    assert_says(error_of(call, X, 'square'), 'n is a str', 'static_argnums=1')


@pytest.mark.parametrize(
    'fn, value, parts',
    [
        (lambda x, n: x[:n], 3, ['n=3', 'write static_argnums=1,']),
        (lambda x, n: x + jnp.zeros(n['size']), {'size': 4}, ["n['size']=4", 'static_argnums']),
    ],
    ids=['slice', 'shape'],
)
def test_a_number_whose_value_the_trace_needs(partitioner, fn, value, parts):
    call = partitioner.partition(fn, (DATA, None), None)
    assert_says(error_of(call, X, value), '(at test_call_errors.py:', 'needs the value of', *parts)


def test_a_keyword_whose_value_the_trace_needs(partitioner):
    call = partitioner.partition(lambda x, *, flag: x if flag else -x, (DATA,), DATA)
    message = error_of(call, X, flag=True)
    assert_says(message, 'the value of flag=True', 'functools.partial(<lambda>, flag=True)')


def test_the_value_of_an_array_is_not_that_of_a_number(partitioner):
    call = partitioner.partition(lambda x, n: x if x.sum() > 0 else x * n, (DATA, None), DATA)
    with pytest.raises(jax.errors.TracerBoolConversionError, match='the argument x'):
        call(X, 3)


def test_none_in_a_batch_is_noted(step):
    """None is an empty tree, so the function runs, and its exception comes out."""
    with pytest.raises(AttributeError, match='NoneType') as caught:
        step(make_state(), {'x': None})
    assert caught.value.__notes__[-1] == "batch['x'] is None in this call"


@pytest.mark.parametrize('n', [[2], np.array(2), {}], ids=['list', 'array', 'dict'])
def test_static_arguments_that_are_not_hashable(partitioner, n):
    call = partitioner.partition(power, (DATA,), DATA, static_argnums=1)
    assert_says(error_of(call, X, n), 'power', 'static argument n', type(n).__name__, 'tuple')


@pytest.mark.parametrize(
    'args, kwargs, parts',
    [
        ((), {'batch': BATCH}, ["missing a required argument: 'state'"]),
        ((make_state(),), {}, ["missing a required argument: 'batch'"]),
        ((make_state(),), {'batsh': BATCH}, ["unexpected keyword argument 'batsh'", "'batch'?"]),
        ((make_state(), BATCH, 3), {}, ['too many positional arguments', '(state, batch)']),
        ((make_state(), BATCH), {'batch': BATCH}, ["multiple values for argument 'batch'"]),
    ],
    ids=['first missing', 'second missing', 'unknown', 'too many', 'twice'],
)
def test_calls_that_do_not_fit_the_signature(step, args, kwargs, parts):
    assert_says(error_of(step, *args, kind=TypeError, **kwargs), 'train_step()', *parts)


# Where an argument is.


def test_a_donated_state_used_again(partitioner, placed):
    step = partitioner.partition(train_step, (SPECS, DATA), (SPECS, None), donate_argnums=0)
    state, _ = step(placed, BATCH)
    for _ in range(2):
        message = error_of(step, placed, BATCH)
        assert_says(message, "state['b'] was donated", 'state, ... = train_step(state, ...)')
    state, _ = step(state, BATCH)
    assert int(state['step']) == 2


def test_a_state_that_another_function_donated(partitioner, placed):
    step = partitioner.partition(train_step, (SPECS, DATA), (SPECS, None), donate_argnums=0)
    step(placed, BATCH)
    evaluate = partitioner.partition(lambda state: state['w'].sum(), (SPECS,), None)
    assert_says(error_of(evaluate, placed), "state['b']", 'another function', 'donate_argnums')


@pytest.mark.parametrize('keys', ['p', 'pq'])
def test_one_array_donated_twice(partitioner, keys):
    def add(state, x):
        return {key: value + x for key, value in state.items()}

    x = jax.device_put(X, NamedSharding(partitioner.mesh, DATA))
    call = partitioner.partition(add, (DATA, DATA), DATA, donate_argnums=0)
    other = "state['q']" if keys == 'pq' else 'x'
    message = error_of(call, dict.fromkeys(keys, x), X if keys == 'pq' else x)
    assert_says(message, "state['p']", other, 'donated only once', 'jnp.copy')


def test_arrays_elsewhere(partitioner, step):
    state, device = make_state(), jax.devices()[3]
    other = jax.make_mesh((2, 4), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
    explicit = jax.make_mesh((2, 4), ('a', 'b'), axis_types=(AxisType.Explicit,) * 2)
    for sharding, shown in [
        (NamedSharding(other, P('b')), "P('b') over a 2 x b 4"),
        (NamedSharding(explicit, P('b')), "P('b') over a 2 x b 4"),
        (NamedSharding(partitioner.mesh, P('model')), "P('model') over data 4 x model 2"),
    ]:
        message = error_of(step, {**state, 'w': jax.device_put(X, sharding)}, BATCH)
        wanted = "P('data', None) over data 4 x model 2"
        assert_says(message, "state['w']", shown, wanted, 'jax.device_put(state, plan.shardings)')
    message = error_of(step, state, batch={'x': jax.device_put(X, NamedSharding(other, P('a')))})
    assert_says(message, "batch['x']", "P('a') over a 2 x b 4", "partitioner.mesh, P('data')")
    call = partitioner.partition(lambda x, *, k: x + k, (DATA,), DATA)
    x = jax.device_put(X, NamedSharding(partitioner.mesh, DATA))
    one = jax.device_put(X, jax.sharding.SingleDeviceSharding(device))
    try:  # from jax 0.12 on, an array on one device is moved
        np.testing.assert_array_equal(call(x, k=one), 2 * X)
    except ValueError as error:
        assert_says(str(error), 'k is laid out', 'data 4 x model 2', 'jax.device_put(k')


# The user's own exceptions, and leftovers of pmap.


class OwnError(Exception):
    pass


def fail(state, batch):
    raise OwnError('inside', state.keys())


def test_the_exception_of_the_function_comes_out_unchanged(partitioner):
    call = partitioner.partition(fail, (SPECS, DATA), None)
    for method in (call, call.lower, call.trace, call.eval_shape):
        with pytest.raises(OwnError) as caught:
            method(make_state(), BATCH)
        assert caught.value.args == ('inside', SPECS.keys())
        assert any(frame.name == 'fail' for frame in caught.traceback)
    with pytest.raises(OwnError):
        call(make_state(), batch=BATCH)


@pytest.mark.parametrize('collective', [jax.lax.pmean, jax.lax.psum])
def test_collectives_of_pmap(partitioner, collective):
    def leftover(state, batch):
        return collective(batch['x'], 'batch')

    call = partitioner.partition(leftover, (SPECS, DATA), None)
    message = error_of(call, make_state(), BATCH)
    assert_says(message, 'leftover', "axis 'batch'", 'pmap', 'global', "axis_name='batch'")
    line = leftover.__code__.co_firstlineno + 1
    assert re.search(rf'test_call_errors\.py:{line}\b', message)


def test_batch_norm_of_pmap(partitioner):
    layer = nn.BatchNorm(use_running_average=False, axis_name='batch')
    variables = layer.init(jax.random.key(0), X)

    def normalize(variables, x):
        return layer.apply(variables, x, mutable=['batch_stats'])[0]

    message = error_of(partitioner.partition(normalize, (None, DATA), DATA), variables, X)
    assert_says(message, 'BatchNorm', 'test_call_errors.py', "axis 'batch'", 'axis_name')


def test_a_batch_that_was_reshaped_for_pmap(partitioner):
    """Most steps compute the same; where one fails, a note says why."""
    sharded = np.arange(64, dtype='float32').reshape(8, 2, 4)
    mean = partitioner.partition(lambda x: x.mean(), (DATA,), None)
    assert float(mean(sharded)) == sharded.mean()
    call = partitioner.partition(lambda x: x @ jnp.ones((2, 3)), (DATA,), None)
    with pytest.raises(TypeError) as caught:
        call(sharded)
    assert 'jax_utils.shard' in caught.value.__notes__[-1]


def test_a_replicated_state_of_pmap(step):
    message = error_of(step, jax_utils.replicate(make_state()), BATCH)
    assert_says(message, 'state', 'first dimension', '8', 'jax_utils.replicate')


def test_a_replicated_state_of_pmap_inside_the_function(partitioner):
    """The exception is the function's own, with a note."""
    call = partitioner.partition(
        lambda state, batch: batch['x'] @ state['w'].reshape(4, 8), (SPECS, DATA), None
    )
    with pytest.raises(TypeError) as caught:
        call(jax_utils.replicate(make_state()), BATCH)
    assert 'jax_utils.replicate' in caught.value.__notes__[-1]


@pytest.mark.parametrize('empty', [{}, (), None])
def test_sizes_say_nothing_about_the_order_of_entries(partitioner, empty, capfd):
    """An argument without arrays fits every entry. jax prints nothing of its own."""
    for fn, specs, args in (
        (lambda s, b: b.sum(), (P(), DATA), (empty, np.ones(13))),
        (lambda s, b: b.sum(), (P(), DATA), (np.ones(8), np.ones(13))),
        (lambda b, s: b.sum(), (DATA, P()), (np.ones(13), empty)),
    ):
        call = partitioner.partition(fn, specs, None)
        for method in (call, call.lower):
            message = error_of(method, *args)
            assert_says(message, 'b: ', '13', "'data'", '12 or 16')
            assert 'order' not in message
    call = partitioner.partition(identity, (P(),), DATA)
    assert_says(error_of(call, np.ones(13)), 'result: ', '13', '12 or 16')
    assert ''.join(capfd.readouterr()) == ''


def test_an_array_of_another_mesh_in_a_closure(partitioner):
    mesh = jax.make_mesh((4,), ('q',), devices=jax.devices()[:4])
    w = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P('q')))
    call = partitioner.partition(lambda x: x @ w, (DATA,), None)
    with pytest.raises(
        ValueError, match=r'is on another mesh, q 4, .* data 4 x model 2: pass it as'
    ):
        call(X)
