"""Names of arrays that gain or lose a dimension, by nn.scan, nn.vmap, add_axis and remove_axis."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boxed_states import KEY, RULES, box, ones, spec_of
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisNames,
    add_axis,
    get_logical_axes,
    remove_axis,
)
from partitioning.state.linen import LogicallyPartitioned, with_logical_partitioning

pytestmark = pytest.mark.core

N = nn.PARTITION_NAME


class Layer(nn.Module):
    """One of a stack; `see` receives the names of its parameter inside the lifted body."""

    initializer: object
    see: object

    @nn.compact
    def __call__(self, x, _=None):
        kernel = self.param('kernel', self.initializer, (6, 6))
        self.see(self.variables['params']['kernel'].names)
        return x @ kernel, None


def lifted(lift, init, see, axis=0, metadata=None, **more):
    metadata = {N: 'layers'} if metadata is None else metadata
    axes = {'variable_axes': {'params': axis}, 'split_rngs': {'params': True}}
    layers = lift(Layer, **axes, metadata_params=metadata, **more)
    return layers(init, see)


INITS = pytest.mark.parametrize(
    'boxes', [nn.with_logical_partitioning, with_logical_partitioning], ids=['flax', 'ours']
)
LIFTS = {'scan': (nn.scan, {'length': 3}), 'vmap': (nn.vmap, {'axis_size': 3, 'in_axes': None})}


@INITS
@pytest.mark.parametrize('lift', LIFTS)
@pytest.mark.parametrize(
    'axis, names, shape',
    [
        (0, ('layers', 'embed', 'mlp'), (3, 6, 6)),
        (1, ('embed', 'layers', 'mlp'), (6, 3, 6)),
        (2, ('embed', 'mlp', 'layers'), (6, 6, 3)),
    ],
)
def test_lifted_layers_have_one_more_name(boxes, lift, axis, names, shape):
    (transform, more), seen = LIFTS[lift], set()
    model = lifted(transform, boxes(ones, ('embed', 'mlp')), seen.add, axis, **more)
    variables = jax.eval_shape(model.init, KEY, jnp.ones((2, 6)))
    assert variables['params']['kernel'].value.shape == shape
    assert get_logical_axes(variables)['params']['kernel'] == AxisNames(*names)
    assert seen == {('embed', 'mlp')}
    sizes = {'layers': None, 'embed': 'data', 'mlp': 'model'}
    assert spec_of(box((8, 8, 8), *names), RULES) == P(*(sizes[name] for name in names))


# add_axis and remove_axis.

NAMES = st.lists(st.sampled_from(['a', 'b', 'c', 'd', None]), max_size=4)


@settings(max_examples=200)
@given(NAMES, st.data())
def test_names_move_as_dimensions_do(names, data):
    """The expected names follow the dimensions of numpy.stack and numpy.take."""
    index = data.draw(st.integers(-len(names) - 1, len(names)))
    sizes = range(2, 2 + len(names))
    stacked = np.stack([np.zeros(tuple(sizes))] * 9, axis=index).shape
    expected = tuple('layers' if size == 9 else names[size - 2] for size in stacked)
    added = add_axis(names, index, 'layers')
    assert added == expected
    assert remove_axis(added, index, 'layers') == tuple(names)
    assert np.take(np.zeros(stacked), 0, axis=index).shape == tuple(sizes)


@pytest.mark.parametrize(
    'index, name, message',
    [
        (0, 'layers', "dimension 0 .*'x', not .*'layers'"),
        (-1, 'x', "dimension -1 .*'y', not .*'x'"),
        (2, 'x', 'no dimension 2'),
        (-3, 'x', 'no dimension -3'),
    ],
)
def test_removing_a_dimension_that_does_not_exist(index, name, message):
    with pytest.raises(ValueError, match=message):
        remove_axis(('x', 'y'), index, name)
    with pytest.raises(ValueError, match=message):
        box((2, 2), 'x', 'y', kind=LogicallyPartitioned).remove_axis(index, {N: name})


def test_adding_before_the_first_dimension():
    with pytest.raises(ValueError, match='-4'):
        add_axis(('x', 'y'), -4, 'layers')
