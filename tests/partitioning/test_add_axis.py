"""add_axis and remove_axis: the names of arrays that gain or lose a dimension."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from partitioning import (
    AxisNames,
    add_axis,
    remove_axis,
)
from partitioning.state.linen import LogicallyPartitioned

pytestmark = [pytest.mark.core, pytest.mark.smoke]

N = nn.PARTITION_NAME


def box(shape, *names, kind=nn.LogicallyPartitioned, **fields):
    return kind(jnp.zeros(shape), names, **fields)


@pytest.mark.parametrize(
    'index, expected',
    [
        (0, ('layers', 'x', 'y')),
        (1, ('x', 'layers', 'y')),
        (2, ('x', 'y', 'layers')),
        (4, ('x', 'y', None, None, 'layers')),
        (-1, ('x', 'y', 'layers')),
        (-2, ('x', 'layers', 'y')),
        (-3, ('layers', 'x', 'y')),
    ],
)
def test_add_axis(index, expected):
    """The table of flax, except for negative indices, which count as in numpy."""
    added = add_axis(('x', 'y'), index, 'layers')
    assert added == AxisNames(*expected) and isinstance(added, AxisNames)
    assert add_axis(('x', 'y'), index, None) == tuple(
        None if name == 'layers' else name for name in expected
    )
    boxed = box((2, 2), 'x', 'y', kind=LogicallyPartitioned).add_axis(index, {N: 'layers'})
    assert boxed.names == expected
    if index >= 0:
        assert box((2, 2), 'x', 'y').add_axis(index, {N: 'layers'}).names == expected


NAMES = st.lists(st.sampled_from(['a', 'b', 'c', 'd', None]), max_size=4)


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(NAMES.filter(bool), st.data())
def test_add_axis_undoes_remove_axis(names, data):
    """The contract of flax, at every index, negative ones included."""
    index = data.draw(st.integers(-len(names), len(names) - 1))
    assert add_axis(remove_axis(names, index, names[index]), index, names[index]) == tuple(names)


def test_padding_dimensions_stay():
    """The names do not say that the dimensions in between were added too."""
    assert remove_axis(add_axis(('x', 'y'), 4, 'l'), 4, 'l') == AxisNames('x', 'y', None, None)


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
