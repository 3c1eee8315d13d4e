"""The rows B1 to B8 about flax.linen: boxes, trees of boxes and lifted layers."""

import json
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boxed_states import KEY, XY, of_xy, ones
from flax import errors
from jax.sharding import NamedSharding, PartitionSpec as P

import partitioning
from partitioning import (
    AxisNames,
    LogicallyPartitioned,
    Partitioned,
    PjitPartitioner,
    create_mesh,
    get_logical_axes,
    unbox,
    with_partitioning,
)

pytestmark = pytest.mark.core

N = nn.PARTITION_NAME
BOTH = pytest.mark.parametrize('kind', [Partitioned, LogicallyPartitioned])

# A box.


@BOTH
def test_B1_a_box(kind):
    p = of_xy(kind)
    assert p.get_partition_spec() == P('x', 'y')
    assert len(jax.tree.leaves(p)) == 1
    assert jax.tree.map(jnp.shape, p) == kind((8, 4), ('x', 'y'))
    assert p.replace(names=('a',)).names == ('a',)
    again = p.replace_boxed(jnp.ones(3))
    assert type(again) is kind and (again.value.shape, again.names) == ((3,), ('x', 'y'))


def test_B1_its_sharding():
    assert of_xy().get_sharding(XY) == NamedSharding(XY, P('x', 'y'))
    own = LogicallyPartitioned(jnp.zeros((8, 4)), ('a', 'b'), rules=(('a', 'x'), ('b', 'y')))
    for array, rules in (
        (of_xy(), ()),
        (own, ()),
        (of_xy(LogicallyPartitioned), [*zip('xy', 'xy', strict=True)]),
    ):
        state = {'params': {'w': array}}
        found = PjitPartitioner(mesh=XY, logical_axis_rules=rules).plan(state).shardings
        assert found['params']['w'] == NamedSharding(XY, P('x', 'y'))


ADDED = {
    0: ('layers', 'x', 'y'),
    1: ('x', 'layers', 'y'),
    2: ('x', 'y', 'layers'),
    4: ('x', 'y', None, None, 'layers'),
}


@BOTH
def test_B2_add_axis(kind):
    for index, names in ADDED.items():
        added = of_xy(kind).add_axis(index, {N: 'layers'})
        assert type(added) is kind and added.names == names
    assert of_xy(kind).add_axis(0, {N: None}).names == (None, 'x', 'y')
    with pytest.raises(errors.PartitioningUnspecifiedError):
        of_xy(kind).add_axis(0, {})


@BOTH
def test_B2_a_negative_index_counts_as_in_arrays(kind):
    """flax inserts as lists do, and names a dimension that the array does not have."""
    assert nn.Partitioned(0, ('x', 'y')).add_axis(-1, {N: 'layers'}).names == ('x', 'layers', 'y')
    assert of_xy(kind).add_axis(-1, {N: 'layers'}).names == ('x', 'y', 'layers')
    assert np.stack([np.zeros((8, 4))] * 3, axis=-1).shape == (8, 4, 3)


@BOTH
def test_B3_remove_axis(kind):
    def back(index, name='layers'):
        return of_xy(kind).add_axis(index, {N: 'layers'}).remove_axis(index, {N: name})

    for index in (0, 1, 2, -1, -2, -3):
        assert type(back(index)) is kind and back(index).names == ('x', 'y')
    assert back(4).names == ('x', 'y', None, None)  # names cannot tell that they were not there
    with pytest.raises(ValueError, match=r"dimension 1 .* is 'layers', not .*'other'"):
        back(1, 'other')
    with pytest.raises(ValueError, match='no dimension 2'):
        of_xy(kind).remove_axis(2, {N: 'layers'})
    with pytest.raises(errors.PartitioningUnspecifiedError):
        of_xy(kind).remove_axis(0, {})


OPTIMIZED = """
import json, jax, flax.linen as nn, jax.numpy as jnp
from partitioning import PjitPartitioner, get_logical_axes
from partitioning.state import linen

def names(boxes):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return x @ self.param('w', boxes(nn.initializers.ones, ('embed', 'mlp')), (4, 4)), None
    scanned = nn.scan(Layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=3,
                      metadata_params={nn.PARTITION_NAME: 'layers'})()
    def init_and_apply(key, x):
        made = scanned.init(key, x)
        return made, scanned.apply(made, x, mutable=['params'])[1]
    given = init_and_apply, jax.random.key(0), jnp.ones((2, 4))
    made, again = (x['params']['w'] for x in jax.eval_shape(*given))
    partitioner = PjitPartitioner(1, logical_axis_rules=[(n, None) for n in made.names])
    inside = get_logical_axes(partitioner.eval_shape(*given)[1])['params']['w']
    removed = made.remove_axis(0, {nn.PARTITION_NAME: 'layers'}).names
    return [made.names, removed, again.names, tuple(inside)]

try:
    linen.Partitioned(0, ('x', 'y')).remove_axis(0, {nn.PARTITION_NAME: 'layers'})
    wrong = 'removed'
except ValueError as error:
    wrong = str(error)
found = [names(nn.with_logical_partitioning), names(linen.with_logical_partitioning), wrong]
print(json.dumps([__debug__, *found]))
"""


@pytest.mark.long
def test_B3_under_python_O():
    """flax's boxes remove nothing, so each step of a scanned layer adds a name.

    They do remove it while a partitioner traces.
    """
    root = Path(partitioning.__file__).parents[1]
    command = [sys.executable, '-O', '-c', OPTIMIZED]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    debug, flax, ours, wrong = json.loads(done.stdout)
    assert not debug
    layers, layer = ['layers', 'embed', 'mlp'], ['embed', 'mlp']
    assert flax == [layers, layers, ['layers', *layers], layers]
    assert ours == [layers, layer, layers, layers]
    assert 'dimension 0 ' in wrong and "'layers'" in wrong


# Trees of boxes.


def test_B4_specs_of_a_tree():
    tree = {'a': of_xy(), 'b': jnp.zeros(3), 'c': 'str', 'd': 1.0}
    assert nn.get_partition_spec(tree) == {'a': P('x', 'y'), 'b': P(), 'c': None, 'd': None}
    assert nn.get_sharding(tree, XY) == {
        **{'a': NamedSharding(XY, P('x', 'y')), 'b': NamedSharding(XY, P())},
        **{'c': None, 'd': None},
    }


def test_B4_specs_of_a_tree_by_a_partitioner():
    """The specs of arrays are the same; other leaves are replicated, like scalars of a state."""
    tree = {'a': of_xy(), 'b': jnp.zeros(3), 'c': 'str', 'd': 1.0, 'nothing': None}
    partitioner = PjitPartitioner(mesh=XY, logical_axis_rules=())
    assert partitioner.get_mesh_axes(tree) == {
        **{'a': P('x', 'y'), 'b': P(None), 'c': P(), 'd': P(), 'nothing': None},
    }
    ours = partitioner.plan(tree).shardings
    assert ours['a'] == NamedSharding(XY, P('x', 'y'))
    assert ours['b'].is_equivalent_to(NamedSharding(XY, P()), 1)
    assert ours['c'] == ours['d'] == NamedSharding(XY, P()) and ours['nothing'] is None


def test_B5_some_arrays_of_a_tree_have_names():
    kernel = Partitioned(jnp.zeros((8, 3, 3)), ('layers', 'in', 'out'))
    tree = {'kernel': kernel, 'bias': jnp.zeros((8, 3)), 'step': jnp.array(100)}
    specs = {'kernel': P('layers', 'in', 'out'), 'bias': P(), 'step': P()}
    assert nn.get_partition_spec(tree) == specs
    assert get_logical_axes(tree) == {
        'kernel': AxisNames('layers', 'in', 'out'),
        'bias': AxisNames(None, None),
        'step': AxisNames(),
    }
    mesh = create_mesh((8, 1, 1), ('layers', 'in', 'out'))
    ours = PjitPartitioner(mesh=mesh, logical_axis_rules=()).get_mesh_axes(tree)
    assert ours == {**specs, 'bias': P(None, None)}
    rules = [('layers', 'x'), ('in', None), ('out', None)]
    ours = PjitPartitioner(mesh=XY, logical_axis_rules=rules).get_mesh_axes(
        {**tree, 'kernel': LogicallyPartitioned(kernel.value, kernel.names)}
    )
    assert ours == {'kernel': P('x', None, None), 'bias': P(None, None), 'step': P()}


@pytest.mark.parametrize('strip', [unbox, nn.unbox])
def test_B6_unbox_removes_nested_boxes(strip):
    arrays = {'K': jnp.zeros((3, 2)), 'b': jnp.zeros(3)}
    out = strip(Partitioned(arrays, ('data',)))
    assert out['K'] is arrays['K'] and out['b'] is arrays['b']
    value = jnp.zeros((8, 4))
    assert strip(Partitioned(Partitioned(value, ('x', 'y')), ('x', 'y'))) is value


# Lifted layers.


class Bar(nn.Module):
    see: object
    shape: tuple = (3, 3)

    @nn.compact
    def __call__(self, x, _=None):
        kernel = self.param('kernel', with_partitioning(ones, ('in', 'out')), self.shape)
        bias = self.param('bias', nn.initializers.zeros, self.shape[-1:])
        self.see(self.variables['params']['kernel'].names)
        return x @ kernel + bias, None


def lifted(lift, metadata, see=len, **more):
    axes = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
    return lift(Bar, **axes, metadata_params=metadata, **more)(see)


def test_B7_vmap():
    seen = set()
    made = lifted(nn.vmap, {N: 'batch'}, seen.add).init(KEY, jnp.ones((8, 3)))['params']
    assert made['kernel'].names == ('batch', 'in', 'out')
    assert made['kernel'].value.shape == (8, 3, 3)
    assert seen == {('in', 'out')}
    with pytest.raises(errors.PartitioningUnspecifiedError):
        lifted(nn.vmap, {}).init(KEY, jnp.ones((8, 3)))


def test_B8_scan():
    made = lifted(nn.scan, {N: 'layers'}, length=8).init(KEY, jnp.ones((2, 3)))['params']
    assert jax.tree.map(jnp.shape, made) == {
        'kernel': Partitioned((8, 3, 3), ('layers', 'in', 'out')),
        'bias': (8, 3),
    }
