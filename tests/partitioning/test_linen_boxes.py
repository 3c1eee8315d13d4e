"""The names of linen boxes: mesh axes or logical axes, with or without rules and meshes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from boxed_states import RULES, box, partitioner_of, spec_of
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from partitioning import (
    TrainState,
    create_mesh,
    unbox,
)

pytestmark = pytest.mark.core

# A Partitioned holds mesh axes, a LogicallyPartitioned holds logical axes.


def test_the_outer_of_two_boxes_names_the_array():
    nested = nn.Partitioned(box((8, 8), 'data', 'model', kind=nn.Partitioned), ('model', 'data'))
    assert spec_of(nested, []) == nested.get_partition_spec() == P('model', 'data')


def test_a_box_around_several_arrays_has_no_layout():
    several = nn.Partitioned({'K': jnp.zeros((8, 2)), 'b': jnp.zeros(8)}, ('data',))
    with pytest.raises(ValueError, match=r"params/w.*\('data',\).* several arrays"):
        spec_of(several, [])


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_unbox_does_not_lay_out(axis_type):
    """flax's unbox adds a constraint, which fails on a single device and over Explicit axes."""
    array = box((8, 4), 'data', 'model', kind=nn.Partitioned)
    with jax.set_mesh(create_mesh((4, 2), ('data', 'model'), axis_types=axis_type)):
        assert unbox(array) is array.value
        with pytest.raises((TypeError, AssertionError, ValueError)):
            nn.unbox(array)
        assert jax.jit(unbox).trace(array).jaxpr.eqns == []


# Rules for one array, tried before the other rules.


@pytest.mark.parametrize(
    'names, own, expected',
    [
        (('in', 'mlp'), (('in', 'data'),), P('data', 'model')),
        (('embed', 'mlp'), (('mlp', None),), P('data', None)),
        (('embed', 'mlp'), (('mlp', 'data'),), P(None, 'data')),
        (('in', 'out'), (('in', ('data', 'model')), ('out', 'model')), P(('data', 'model'), None)),
    ],
)
@pytest.mark.parametrize('carrier', ['box', 'variable'])
def test_rules_for_one_array(names, own, expected, carrier):
    if carrier == 'box':
        array = box((8, 8), *names, rules=own)
    else:
        with nnx.use_eager_sharding(False):
            array = nnx.Param(jnp.zeros((8, 8)), out_sharding=names, sharding_rules=own)
    assert spec_of(array, RULES) == expected
    assert nn.logical_to_mesh_axes(names, [*own, *RULES]) == expected


def test_statistics_use_the_rules_of_their_parameter():
    variables = {'params': {'w': box((8, 8), 'embed', 'mlp', rules=(('mlp', None),))}}
    axes = partitioner_of(RULES).get_mesh_axes(TrainState.create(variables, optax.adam(1e-3)))
    assert axes.opt_state[0].mu['w'] == axes.params['w'] == P('data', None)


@pytest.mark.parametrize(
    'own, message',
    [
        ((('in', 'dta'),), "params/w.*'dta'.*mean 'data'"),
        ((('in', 5),), r"rule \('in', 5\).*write"),
    ],
)
def test_wrong_rules_for_one_array(own, message):
    with pytest.raises(ValueError, match=message):
        spec_of(box((8, 8), 'in', 'mlp', rules=own), RULES)


def test_a_box_for_another_mesh_is_an_error():
    """A setting that cannot be honoured is an error."""
    other = create_mesh((2, 4), ('data', 'model'))
    with pytest.raises(ValueError, match=r'params/w.*mesh'):
        spec_of(box((8, 8), 'data', 'model', kind=nn.Partitioned, mesh=other), [])
