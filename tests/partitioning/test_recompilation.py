"""Why a partitioned function was compiled again, and the policy that forbids it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import PjitPartitioner, check_compiled_once, create_mesh

pytestmark = pytest.mark.core

DATA = P('data')
X = np.ones((8, 4), 'float32')


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2)  # data 4 x model 2


@pytest.fixture(name='compiled')
def _compiled(caplog):
    """Lists the functions that XLA compiles."""
    names = []

    class Handler(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if 'Finished XLA compilation' in message:
                names.append(message.split()[4].removeprefix('jit(').removesuffix(')'))

    logger, handler = logging.getLogger('jax'), Handler()
    logger.addHandler(handler)
    with jax.log_compiles():
        yield names
    logger.removeHandler(handler)


@struct.dataclass
class State:
    w: jax.Array
    scale: float = struct.field(pytree_node=False, default=1.0)


def scaled(state, batch, power=1):
    return jax.tree.map(lambda w: w * batch['x'].sum() ** power, state)


STATE = {'w': X, 'step': np.int32(0)}


def add(tree, **leaves):
    return {**tree, **leaves}


CHANGES = {
    'shape': (
        (add(STATE), {'x': np.ones((16, 4), 'float32')}),
        ["batch['x']", 'float32[8, 4] to float32[16, 4]', 'pad'],
    ),
    'dtype': (
        (add(STATE, w=X.astype('int32')), {'x': X}),
        ["state['w']", 'float32[8, 4] to int32[8, 4]', "astype('float32')"],
    ),
    'weak type': (
        (add(STATE, step=0), {'x': X}),
        ["state['step']", 'int32[] to weakly typed int32[]', "jnp.asarray(x, 'int32')"],
    ),
    'a number of another type': (
        (add(STATE, step=0.5), {'x': X}),
        ["state['step'] changed from int32[]", "as jnp.asarray(x, 'int32')"],
    ),
    'keys': ((add(STATE, b=X), {'x': X}), ['state', "no 'b'", "now has 'b'", 'structure']),
    'containers': (
        (add(STATE, w=(X, X)), {'x': X}),
        ["state['w']", 'an array', 'a tuple of 2'],
    ),
    'static value': (
        (add(STATE), {'x': X}, 2),
        ['static argument power', 'from 1 to 2', 'as an array'],
    ),
    'two leaves': (
        (add(STATE, w=np.ones((4, 4), 'float32')), {'x': np.ones((4, 4), 'float32')}),
        ["state['w']", 'float32[4, 4]', '1 more change'],
    ),
}


@pytest.mark.parametrize('change', CHANGES)
def test_the_cause_of_a_recompilation(partitioner, change):
    """Found afterwards, or at the call; the policy 'error' does not even trace the function."""
    args, parts = CHANGES[change]
    args = (*args, 1)[:3]
    traced = []

    def fn(state, batch, power):
        traced.append(None)
        return scaled(state, batch, power)

    for policy in ('allow', 'error'):
        step = partitioner.partition(fn, (None, DATA), None, static_argnums=2, on_recompile=policy)
        step(STATE, {'x': X}, 1)
        step(add(STATE, w=2 * X), {'x': X}, 1)
        check_compiled_once(step)
        traced.clear()
        if policy == 'allow':
            step(*args)
            with pytest.raises(ValueError, match=r'^fn was compiled 2 times') as caught:
                check_compiled_once(step)
        else:
            with pytest.raises(ValueError, match=r'^fn would be compiled again') as caught:
                step(*args)
            assert not traced
            step(STATE, {'x': X}, 1)  # nothing has changed
            check_compiled_once(step)
        for part in parts:
            assert part in str(caught.value)
        assert '\n' not in str(caught.value)


def test_static_fields_and_objects(partitioner):
    """A static object that is created anew for each call is named, though its repr is the same."""

    class Config:
        def __repr__(self):
            return 'Config()'

    step = partitioner.partition(
        lambda x, config: x, (DATA,), DATA, static_argnums=1, on_recompile='error'
    )
    step(X, Config())
    with pytest.raises(ValueError, match=r'config is another object.*Config\(\).*__eq__'):
        step(X, Config())
    step = partitioner.partition(lambda state: state.w, None, None, on_recompile='error')
    step(State(X, 1.0))
    with pytest.raises(ValueError, match=r'state had State.scale=1.0 and now has State.scale=2.0'):
        step(State(X, 2.0))


def test_defaults_and_names(partitioner):
    def fn(x, scale=1.0):
        return x * scale

    step = partitioner.partition(fn, (DATA,), DATA)
    step(X)
    step(X, scale=2.0)
    with pytest.raises(ValueError, match=r'fn was compiled 2 times.*scale was left out and is now'):
        check_compiled_once(step)


def test_keywords_have_no_fixed_layout(partitioner, compiled):
    """jax compiles for another layout without tracing again. The expected count is XLA's."""

    def fn(x, *, table):
        return x + table['t']

    def table(*spec):
        return {'t': jax.device_put(X, NamedSharding(partitioner.mesh, P(*spec)))}

    tables = [table('data'), table('model'), table('data'), table('model')]
    step = partitioner.partition(fn, (DATA,), DATA)
    for n, given in enumerate(tables):
        step(X, table=given)
        assert step.num_compilations() == compiled.count('fn'), f'after call {n}'
    assert (step.num_traces(), step.num_compilations()) == (1, 2)
    with pytest.raises(
        ValueError, match=r"table\['t'\].*from P\('data'\) to P\('model'\).*an entry"
    ):
        check_compiled_once(step)
    strict = partitioner.partition(fn, (DATA,), DATA, on_recompile='error')
    strict(X, table=table('data'))
    with pytest.raises(ValueError, match=r"from P\('data'\) to P\('model'\)"):
        strict(X, table=table('model'))
    strict(X, table=table('data'))
    check_compiled_once(strict)


def test_positional_arguments_have_a_fixed_layout(partitioner, compiled):
    """jax compiles once for host arrays, and once more if an array is on a mesh at last."""

    def fn(x):
        return x * 2

    step = partitioner.partition(fn, (DATA,), DATA)
    for x in (X, jnp.asarray(X), 2 * X):
        step(x)
    assert compiled.count('fn') == step.num_compilations() == 1
    placed = jax.device_put(X, NamedSharding(partitioner.mesh, DATA))
    for _ in range(2):
        step(placed)
    assert compiled.count('fn') == step.num_compilations() == 2
    with pytest.raises(ValueError, match=r'x, float32.*from no mesh.* to .*data 4 x model 2.*put'):
        check_compiled_once(step)


def test_layouts_are_types_on_explicit_axes():
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types='explicit')
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=[('batch', 'data')])
    step = partitioner.partition(lambda x, *, y: x, (DATA,), DATA, on_recompile='error')
    specs = [P('data', None), P(None, 'model')]
    first, second = (jax.device_put(X, NamedSharding(mesh, spec)) for spec in specs)
    step(X, y=first)
    with pytest.raises(ValueError, match=r"y, .*from P\('data', None\) .*to P\(None, 'model"):
        step(X, y=second)


def test_traced_but_never_compiled(partitioner):
    step = partitioner.partition(scaled, (None, DATA), None)
    step.eval_shape(STATE, {'x': X})
    assert step.num_traces() == 1
    with pytest.raises(ValueError, match=r'scaled was compiled 0 times.*call it'):
        check_compiled_once(step)
    step.lower(STATE, {'x': X}).compile()
    check_compiled_once(step)


def test_a_call_that_fails_is_not_counted(partitioner):
    def fn(x):
        if x.shape[0] == 16:
            raise RuntimeError('inside')
        return x

    step = partitioner.partition(fn, (DATA,), DATA, on_recompile='error')
    with pytest.raises(RuntimeError):
        step(np.ones((16, 4), 'float32'))
    step(X)
    check_compiled_once(step)


def test_a_cleared_cache(partitioner):
    step = partitioner.partition(scaled, (None, DATA), None, on_recompile='error')
    step(STATE, {'x': X})
    step.clear_cache()
    step(STATE, {'x': np.ones((16, 4), 'float32')})  # a new beginning
    check_compiled_once(step)
    with (
        jax.default_matmul_precision('float32'),
        pytest.raises(ValueError, match=r'arguments are equal.*setting'),
    ):
        step(STATE, {'x': np.ones((16, 4), 'float32')})
