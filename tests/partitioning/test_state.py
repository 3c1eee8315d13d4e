"""States with missing or wrong names, and states that name their axes themselves."""

import flax.linen as nn
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import AxisNames, PjitPartitioner, standard_logical_axis_rules

pytestmark = [pytest.mark.core, pytest.mark.smoke]

RULES = standard_logical_axis_rules(2, 2)


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
    return partitioner


# Missing and wrong names.


def test_a_state_without_names(partitioner):
    state = {'params': {'w': jnp.zeros((8, 8))}}
    with pytest.raises(ValueError, match='Missing axis names'):
        partitioner.get_mesh_axes(state)


def test_a_parameter_without_names_among_others(partitioner):
    """Without the error it would be replicated silently."""
    boxed = nn.LogicallyPartitioned(jnp.zeros((8, 8)), ('embed', 'mlp'))
    state = {'params': {'dense': {'kernel': boxed, 'other': jnp.zeros((8, 8))}}}
    with pytest.raises(ValueError, match='params/dense/other'):
        partitioner.get_mesh_axes(state)


@pytest.mark.parametrize('names', [('layers', 'embed', 'mlp'), ()])
def test_names_of_the_wrong_rank(partitioner, names):
    box = nn.LogicallyPartitioned(jnp.zeros((8, 8)), names)
    message = rf'params/dense/kernel.* {len(names)} entr.* 2 dimensions'
    with pytest.raises(ValueError, match=message):
        partitioner.get_mesh_axes({'params': {'dense': {'kernel': box}}})


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


def test_a_rule_for_an_axis_that_the_mesh_lacks():
    partitioner = PjitPartitioner(2, logical_axis_rules=[('embed', 'expert')])
    box = nn.LogicallyPartitioned(jnp.zeros((8,)), ('embed',))
    with pytest.raises(ValueError, match=r"params/w.*'expert'.*data 4 x model 2"):
        partitioner.get_mesh_axes({'params': {'w': box}})


# Other kinds of states.


class T5XState:
    """A state that names its axes itself; None means that an array has no names."""

    def as_logical_axes(self):
        return {
            'step': None,
            'params': {
                'logits_dense': AxisNames('vocab', 'embed'),
                'mlp': {'wo': {'kernel': AxisNames('embed', 'mlp')}},
            },
        }


def test_a_state_that_names_its_axes():
    rules = [('batch', 'data'), ('embed', None), ('vocab', 'model'), ('mlp', 'model')]
    partitioner = PjitPartitioner(2, logical_axis_rules=rules)
    assert partitioner.get_mesh_axes(T5XState()) == {
        'step': None,
        'params': {
            'logits_dense': P('model', None),
            'mlp': {'wo': {'kernel': P(None, 'model')}},
        },
    }


def test_a_state_that_names_an_axis_without_a_rule():
    partitioner = PjitPartitioner(2, logical_axis_rules=[('vocab', 'model'), ('embed', None)])
    message = "Failed to map logical axes for params/mlp/wo/kernel.*'mlp'"
    with pytest.raises(ValueError, match=message):
        partitioner.get_mesh_axes(T5XState())
