"""Dimensions added to names and removed: tables, the inverse, and under `python -O`."""

import json
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import partitioning
from partitioning import (
    AxisNames,
    add_axis,
    remove_axis,
)
from partitioning.state.linen import LogicallyPartitioned

pytestmark = pytest.mark.core

N = nn.PARTITION_NAME


def box(shape, *names, kind=nn.LogicallyPartitioned, **fields):
    return kind(jnp.zeros(shape), names, **fields)


# add_axis and remove_axis.


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
    """Of flax's table all but the negative indices, which are numpy's here."""
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
    """A dimension that numpy stacks by, and the dimension that it takes one of."""
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
def test_what_is_removed_can_be_added(names, data):
    """flax's contract, at every place from both ends."""
    index = data.draw(st.integers(-len(names), len(names) - 1))
    assert add_axis(remove_axis(names, index, names[index]), index, names[index]) == tuple(names)


def test_dimensions_in_between_stay():
    """The names cannot tell that they were not there before."""
    assert remove_axis(add_axis(('x', 'y'), 4, 'l'), 4, 'l') == AxisNames('x', 'y', None, None)


@pytest.mark.parametrize(
    'index, name, message',
    [
        (0, 'layers', "dimension 0 .*'x', not the 'layers'"),
        (-1, 'x', "dimension -1 .*'y', not the 'x'"),
        (2, 'x', 'no dimension 2'),
        (-3, 'x', 'no dimension -3'),
    ],
)
def test_removing_what_is_not_there(index, name, message):
    with pytest.raises(ValueError, match=message):
        remove_axis(('x', 'y'), index, name)
    with pytest.raises(ValueError, match=message):
        box((2, 2), 'x', 'y', kind=LogicallyPartitioned).remove_axis(index, {N: name})


def test_adding_before_the_first():
    with pytest.raises(ValueError, match='-4'):
        add_axis(('x', 'y'), -4, 'layers')


OPTIMIZED = """
import json, jax, flax.linen as nn, jax.numpy as jnp
from partitioning.state import linen

def names(boxes):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return x @ self.param('w', boxes(nn.initializers.ones, ('embed', 'mlp')), (4, 4)), None
    scanned = nn.scan(Layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=3,
                      metadata_params={nn.PARTITION_NAME: 'layers'})()
    made = scanned.init(jax.random.key(0), jnp.ones((2, 4)))
    _, again = scanned.apply(made, jnp.ones((2, 4)), mutable=['params'])
    made, again = made['params']['w'], again['params']['w']
    return [made.names, made.remove_axis(0, {nn.PARTITION_NAME: 'layers'}).names, again.names]

try:
    linen.LogicallyPartitioned(0, ('x', 'y')).remove_axis(0, {nn.PARTITION_NAME: 'layers'})
    wrong = 'removed'
except ValueError as error:
    wrong = str(error)
found = [names(nn.with_logical_partitioning), names(linen.with_logical_partitioning), wrong]
print(json.dumps([__debug__, *found]))
"""


def test_without_asserts():
    """Under `python -O` flax's boxes remove nothing, and a name comes with every step."""
    root = Path(partitioning.__file__).parents[1]
    command = [sys.executable, '-O', '-c', OPTIMIZED]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    debug, flax, ours, wrong = json.loads(done.stdout)
    assert not debug
    layers, layer = ['layers', 'embed', 'mlp'], ['embed', 'mlp']
    assert flax == [layers, layers, ['layers', *layers]]
    assert ours == [layers, layer, layers]
    assert "not the 'layers'" in wrong
