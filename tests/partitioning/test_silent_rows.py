"""Mistakes that T5X ignores or reports badly: here each works, or is an error with the solution.

Other files test batch rules, constraints, keywords and most optimizers.
"""

import re

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.partitioning import AxisMetadata
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import (
    AxisNames,
    PjitPartitioner,
    constrain,
    host_local_array_to_global_array,
    standard_logical_axis_rules,
    with_sharding_constraint,
)

pytestmark = pytest.mark.core

RULES = [('embed', 'data'), ('mlp', 'model'), ('heads', None), ('stray', 'expert')]
W = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@flax.struct.dataclass
class T5XState:
    """A state that names the axes of all its arrays itself, with None for those without names."""

    step: jax.Array
    params: dict
    opt_state: tuple
    names: AxisNames = flax.struct.field(pytree_node=False)

    def as_logical_axes(self):
        axes = {'w': self.names}
        moments = self.opt_state[0]._replace(count=None, mu=axes, nu=axes)
        return self.replace(step=None, params=axes, opt_state=(moments, *self.opt_state[1:]))


@flax.struct.dataclass
class Parameters:
    """A state without an optimizer that names its axes itself, like T5X's InferenceState."""

    params: dict
    names: AxisNames = flax.struct.field(pytree_node=False)

    def as_logical_axes(self):
        return self.replace(params={'w': self.names})


def nnx_state(names):
    with nnx.use_eager_sharding(False):
        return {'params': {'w': nnx.Param(jnp.asarray(W), out_sharding=names)}}


# Each front-end that can name the axes of params/w, with a function that makes the state.
FRONT_ENDS = {
    'logical box': lambda names: {'params': {'w': nn.LogicallyPartitioned(W, names)}},
    'box': lambda names: {'params': {'w': nn.Partitioned(W, names)}},
    'params_axes': lambda names: {
        'params': {'w': W},
        'params_axes': {'w_axes': AxisMetadata(names=names)},
    },
    'nnx variable': nnx_state,
    'path rule': lambda names: {'params': {'w': W}},
    'as_logical_axes': lambda names: Parameters({'w': W}, AxisNames(*names)),
    'as_logical_axes with specs': lambda names: Parameters({'w': W}, P(*names)),
}
each_front_end = pytest.mark.parametrize('front_end', FRONT_ENDS)


def mesh_axes(front_end, names):
    """The spec of params/w."""
    overrides = [('w', names)] if front_end == 'path rule' else ()
    partitioner = PjitPartitioner(2, logical_axis_rules=RULES, params_axes_names_override=overrides)
    axes = partitioner.get_mesh_axes(FRONT_ENDS[front_end](names))
    params = axes.params if isinstance(axes, Parameters) else axes['params']
    (leaf,) = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, P))
    return leaf


@each_front_end
def test_correct_names(front_end):
    """Correct names work; the tests below change one thing each."""
    assert mesh_axes(front_end, ('embed', 'mlp')) == P('data', 'model')
    assert mesh_axes(front_end, ('heads', None)) == P(None, None)


@each_front_end
def test_a_name_without_a_rule(front_end):
    with pytest.raises(ValueError) as error:
        mesh_axes(front_end, ('embd', 'mlp'))
    message = str(error.value)
    assert 'params/w' in message and "'embd' of ('embd', 'mlp')" in message
    assert "Did you mean 'embed'?" in message and "('embd', None)" in message


# As in flax, the names of these belong to the first dimensions.
FEWER = ('logical box', 'box', 'nnx variable')


@pytest.mark.parametrize(
    'front_end, names',
    [
        *[(front_end, ('heads', 'embed', 'mlp')) for front_end in FRONT_ENDS],
        *[(front_end, ('embed',)) for front_end in FRONT_ENDS if front_end not in FEWER],
    ],
)
def test_too_few_or_too_many_names(front_end, names):
    with pytest.raises(ValueError) as error:
        mesh_axes(front_end, names)
    message = str(error.value)
    assert 'params/w' in message and str(names) in message and '(8, 8)' in message
    assert f'logical axes {names} has {len(names)} entr' in message


@pytest.mark.parametrize('front_end', FEWER)
def test_fewer_names_in_boxes_and_variables(front_end):
    assert mesh_axes(front_end, ('embed',)) == P('data', None)
    partitioner = PjitPartitioner(2, logical_axis_rules=RULES)
    found = partitioner.lint(FRONT_ENDS[front_end](('embed',)))
    (few,) = [finding for finding in found if finding.kind == 'few names']
    assert (few.severity, few.where) == ('warning', 'params/w')
    assert "('embed',) cover 1 of 2 dimensions of shape (8, 8)" in few.message
    assert "write ('embed', None)" in few.message


@each_front_end
def test_a_rule_to_an_axis_that_the_mesh_lacks(front_end):
    with pytest.raises(ValueError) as error:
        mesh_axes(front_end, ('stray', None))
    message = str(error.value)
    assert 'params/w' in message and "('stray', 'expert')" in message
    assert 'the mesh is data 4 x model 2' in message


def test_a_rule_of_the_batch_to_an_axis_that_the_mesh_lacks():
    """The error is raised before any function is partitioned."""
    partitioner = PjitPartitioner(2, logical_axis_rules=[('batch', 'dta')])
    with pytest.raises(ValueError, match=r"'dta'.*data 4 x model 2.*'data'"):
        partitioner.data_partition_spec  # noqa: B018


# One mesh axis twice.


@pytest.mark.parametrize('axes', [('data', 'data'), ['model', 'data', 'model']])
def test_a_mesh_axis_twice_in_a_rule(axes):
    with pytest.raises(ValueError, match=re.escape(repr(('embed', axes)))):
        PjitPartitioner(2, logical_axis_rules=[('embed', axes)])


@pytest.mark.parametrize(
    'names, axis',
    [
        ((('data', 'data'), None), 'data'),
        (('data', 'data'), 'data'),
        ((('data', 'model'), 'model'), 'model'),
    ],
)
def test_a_mesh_axis_twice_in_a_box(names, axis):
    with pytest.raises(ValueError) as error:
        mesh_axes('box', names)
    message = str(error.value)
    assert 'params/w' in message and repr(axis) in message and str(names) in message


TWICE = [P('data', 'data'), P(('data', 'data'), None), P('model', ('data', 'model'))]


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(2, logical_axis_rules=RULES)


@pytest.mark.parametrize('spec', TWICE)
def test_a_mesh_axis_twice_in_a_chunk(partitioner, spec):
    with pytest.raises(ValueError, match='twice'):
        partitioner.get_local_chunk_info((8, 8), tuple(spec))


@pytest.mark.parametrize('spec', [*TWICE, P('dta')])
def test_invalid_specs(partitioner, spec):
    """They are refused where they are passed, with the path of their array."""
    for resources in ((({'params': {'w': spec}},), None), (None, {'params': {'w': spec}})):
        with pytest.raises(ValueError, match='params/w'):
            partitioner.partition(lambda s: s, *resources)
    with pytest.raises(ValueError, match='params/w'):
        partitioner.move_params_to_devices({'params': {'w': W}}, {'params': {'w': spec}})


# Specs with the wrong number of dimensions.

LONG = P('data', None, None)


def test_specs_that_are_too_long(partitioner):
    with pytest.raises(ValueError, match=r'3 entries.* 2 dimensions, \(8, 8\)'):
        partitioner.get_local_chunk_info((8, 8), tuple(LONG))
    for resources in ((({'w': LONG},), None), (None, {'w': LONG})):
        with pytest.raises(ValueError, match=r"'w'.*3 entries.* 2 dimensions"):
            partitioner.partition(lambda s: s, *resources)({'w': W})
    with pytest.raises(ValueError, match='rank 2'):
        partitioner.move_params_to_devices({'w': W}, {'w': LONG})
    with pytest.raises(ValueError, match='has 3 entries, but the array has 2'):
        partitioner.partition(lambda x: with_sharding_constraint(x, LONG), None, None)(W)


@pytest.mark.parametrize('spec', [LONG, P('data', None, 'model')])
def test_specs_that_are_too_long_for_chunks(partitioner, spec):
    with pytest.raises(ValueError):
        host_local_array_to_global_array({'w': W}, partitioner.mesh, {'w': spec})


def test_shorter_specs_leave_the_other_dimensions_whole(partitioner):
    double = partitioner.partition(lambda s: s, ({'w': P('data')},), {'w': P('model')})
    placed = double({'w': W})['w']
    assert placed.sharding.is_equivalent_to(NamedSharding(partitioner.mesh, P('model', None)), 2)
    np.testing.assert_array_equal(placed, W)


# States of T5X with optax, as its OptaxWrapper makes them.


def t5x_state(tx, names):
    state = tx.init({'w': W})
    return T5XState(jnp.int32(0), {'w': jnp.asarray(W)}, state, names)


@pytest.mark.parametrize('names', [AxisNames('embed', 'mlp'), P('embed', 'mlp')])
def test_a_t5x_state_with_a_chain_of_optax(partitioner, names):
    """Tuples in the state of optax are not mistaken for axis names."""
    state = t5x_state(optax.adam(1e-3), names)
    axes = partitioner.get_mesh_axes(state)
    assert axes.params == {'w': P('data', 'model')}
    assert axes.opt_state[0].mu == axes.opt_state[0].nu == {'w': P('data', 'model')}
    assert axes.step is None and axes.opt_state[0].count is None
    shardings = partitioner.resolve(state).shardings
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    add = partitioner.partition(lambda s: s.replace(step=s.step + 1), (axes,), axes)
    new = add(state)
    assert int(new.step) == 1
    assert new.opt_state[0].mu['w'].addressable_shards[0].data.shape == (2, 4)


def test_the_error_of_a_t5x_state_names_the_array(partitioner):
    state = t5x_state(optax.adam(1e-3), AxisNames('embd', 'mlp'))
    with pytest.raises(ValueError, match=r"w.*'embd'.*'embed'"):
        partitioner.get_mesh_axes(state)


REFUSED = {  # T5X: 'unregistered optax state type'; here with the number of full-shape statistics
    'adafactor': (lambda: optax.adafactor(1e-3), 1),
    'novograd': (lambda: optax.novograd(1e-3), 1),
    'amsgrad': (lambda: optax.amsgrad(1e-3), 3),
    'adadelta': (lambda: optax.adadelta(1e-3), 2),
    'muon': (lambda: optax.contrib.muon(1e-3), 1),
    'schedule_free': (lambda: optax.contrib.schedule_free_adamw(1e-3), 2),
    'prodigy': (lambda: optax.contrib.prodigy(1e-3), 4),
    'sophia': (lambda: optax.contrib.sophia(1e-3), 2),
    'inject_hyperparams': (lambda: optax.inject_hyperparams(optax.adam)(1e-3), 2),
}


@pytest.mark.parametrize('front_end', ['logical box', 'params_axes'])
@pytest.mark.parametrize('name', REFUSED)
def test_optimizers_that_t5x_refuses(partitioner, name, front_end):
    make, copies = REFUSED[name]
    state = FRONT_ENDS[front_end](('embed', 'mlp'))
    state['opt_state'] = jax.eval_shape(make().init, {'w': W})
    axes = partitioner.get_mesh_axes(state)['opt_state']
    assert jax.tree.structure(axes) == jax.tree.structure(state['opt_state'])
    specs = jax.tree.leaves(axes)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state['opt_state'])]
    assert [spec for spec, shape in zip(specs, shapes, strict=True) if shape == (8, 8)] == (
        [P('data', 'model')] * copies
    )


@pytest.mark.parametrize('front_end', ['logical box', 'params_axes'])
def test_factored_statistics_are_sharded(front_end):
    """Each device holds only a shard of the rows and columns of Adafactor."""
    shape = (256, 128)
    partitioner = PjitPartitioner(2, logical_axis_rules=standard_logical_axis_rules(2, 2))
    w = jnp.zeros(shape)
    state = {'params': {'w': nn.LogicallyPartitioned(w, ('embed', 'mlp'))}}
    if front_end == 'params_axes':
        state = {'params': {'w': w}, 'params_axes': {'w_axes': AxisMetadata(('embed', 'mlp'))}}
    state['opt_state'] = jax.eval_shape(optax.adafactor(1e-3).init, {'w': w})
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    rows = {row.path.split('/')[-2]: row for row in partitioner.resolve(abstract).rows}
    assert (rows['v_row'].shape, rows['v_row'].bytes_per_device) == ((128,), 4 * 128 // 2)
    assert (rows['v_col'].shape, rows['v_col'].bytes_per_device) == ((256,), 4 * 256 // 4)


# Constraints by names.


@pytest.mark.parametrize(
    'names, message',
    [
        (('embd', 'mlp'), "'embd' of ('embd', 'mlp')"),
        (('embed',), "('embed',) has 1 entry, but the array has 2 dimensions"),
        (('stray', None), "('stray', 'expert')"),
    ],
)
def test_constraints_by_wrong_names(partitioner, names, message):
    """The error is raised on CPU too, in a partitioned function and under jax.set_mesh."""
    with pytest.raises(ValueError, match=re.escape(message)):
        partitioner.partition(lambda x: constrain(x, names), None, None)(W)
    with jax.set_mesh(partitioner.mesh), pytest.raises(ValueError, match=re.escape(message)):
        jax.jit(lambda x: constrain(x, names, RULES))(W)
