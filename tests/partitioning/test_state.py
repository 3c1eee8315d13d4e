"""States with missing or wrong names, and mistakes that T5X ignores or reports badly."""

import re

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisNames,
    PjitPartitioner,
    with_sharding_constraint,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]

RULES = [('embed', 'data'), ('mlp', 'model'), ('vocab', 'model'), ('layers', None)]
W = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
    return partitioner


# Missing and wrong names.


@pytest.mark.parametrize(
    'names, shape, message',
    [
        (('embd', 'mlp'), (8, 8), "'embd'.*'embed'"),
        (('embed', 'embed'), (8, 8), 'two dimensions'),
        (('embed', 'mlp'), (8, 7), '7 is not divisible by 2.*6 or 8'),
        (('layers', 'vocab'), (8, 7), '7 is not divisible by 2'),
    ],
)
def test_names_that_do_not_map(partitioner, names, shape, message):
    box = nn.LogicallyPartitioned(jnp.zeros(shape), names)
    expected = rf'Failed to map logical axes for params/dense/kernel.*{message}'
    with pytest.raises(ValueError, match=expected):
        partitioner.get_mesh_axes({'params': {'dense': {'kernel': box}}})


def test_a_statistic_whose_shape_does_not_match_its_parameter(partitioner):
    box = nn.LogicallyPartitioned(jnp.zeros((8, 16)), ('embed', 'mlp'))
    state = {'params': {'w': box}, 'opt_state': {'strange': {'w': jnp.zeros((5, 3))}}}
    with pytest.raises(ValueError, match=r'opt_state/strange/w.*\(5, 3\).*\(8, 16\)'):
        partitioner.get_mesh_axes(state)


def test_a_statistic_that_may_belong_to_two_parameters(partitioner):
    """Both trees contain the path w, and their layouts differ."""

    def model(*names):
        return {'params': {'w': nn.LogicallyPartitioned(jnp.zeros((8, 8)), names)}}

    state = {'a': model('embed', 'mlp'), 'b': model('mlp', 'embed'), 'mu': {'w': jnp.zeros((8, 8))}}
    with pytest.raises(ValueError, match=r'mu/w.*a/params/w.*b/params/w'):
        partitioner.get_mesh_axes(state)
    state['b'] = model('embed', 'mlp')
    assert partitioner.get_mesh_axes(state)['mu']['w'] == P('data', 'model')


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
    partitioner = PjitPartitioner(2, logical_axis_rules=RULES)
    with pytest.raises(ValueError) as error:
        partitioner.get_mesh_axes({'params': {'w': nn.Partitioned(W, names)}})
    message = str(error.value)
    assert 'params/w' in message and repr(axis) in message and str(names) in message


TWICE = [P('data', 'data'), P(('data', 'data'), None), P('model', ('data', 'model'))]


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


class NotATree:
    """A state that jax does not look into, and that names its axes itself."""

    def as_logical_axes(self):
        return {'step': None, 'params': {'w': AxisNames('vocab', 'embed')}}


def test_a_state_that_jax_does_not_look_into(partitioner):
    found = partitioner.get_mesh_axes(NotATree())
    assert found == {'step': None, 'params': {'w': P('model', 'data')}}
    other = PjitPartitioner(2, logical_axis_rules=[('embed', None)])
    with pytest.raises(ValueError, match=r"Failed to map logical axes for params/w.*'vocab'"):
        other.get_mesh_axes(NotATree())
