"""The rows B11 to B14 and B17 about flax.linen: logical axis rules and initializers."""

import jax
import pytest
from boxed_states import KEY, OneArray, box, ones
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import (
    AxisRules,
    LogicallyPartitioned,
    PjitPartitioner,
    create_mesh,
    logical_to_mesh_axes,
    to_nnx_state,
    to_params_axes,
    with_logical_partitioning,
    with_partitioning,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]

UNC = P.UNCONSTRAINED

# Rules: each table is tested for a box, for T5X's params_axes and for an nnx variable.

CUBE = create_mesh((2, 2, 2), ('data', 'model', 'replica'))
CUBE_XYZ = create_mesh((2, 2, 2), ('X', 'Y', 'Z'))


def spec_of_every_carrier(names, rules, mesh=CUBE):
    """The spec of an array with these names, which is the same for every carrier."""
    linen = {'params': {'w': box((8,) * len(names), *names)}}
    rules = AxisRules(rules, on_unmatched='replicate')
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    by_box = partitioner.get_mesh_axes(linen)['params']['w']
    by_axes = partitioner.get_mesh_axes(to_params_axes(linen))['params']['w']
    by_variable = partitioner.get_mesh_axes(to_nnx_state(linen))['w']
    assert by_box == by_axes == by_variable == logical_to_mesh_axes(names, rules)
    return tuple(by_box)


R = [('head', 'model'), ('embed', 'model'), ('embed', 'data'), ('vocab', 'model')]
XYZ = [('batch', 'X'), ('features', 'X'), ('heads', 'Y'), ('batch', 'Z')]
PRIORITIES = [('foo', 'model'), ('bar', 'model'), ('baz', 'data')]


@pytest.mark.parametrize(
    'rules, names, expected',
    [
        (R, ('embed', 'head'), ('data', 'model')),
        (R, ('vocab', 'embed'), (None, 'model')),
        (XYZ, ('batch', 'length', 'heads', 'features'), ('X', None, 'Y', None)),
        ([('a', ('model', 'data')), ('b', 'data')], 'ab', (('model', 'data'), None)),
        ([('a', ('model', 'replica')), ('b', 'data')], 'ab', (('model', 'replica'), 'data')),
        ([('a', None), ('a', 'model')], 'ab', (None, None)),
        (PRIORITIES, ('baz', 'bar', 'foo', 'unassigned'), ('data', None, 'model', None)),
    ],
)
def test_B11_B12_B13_the_first_rule_wins_and_an_axis_is_used_once(rules, names, expected):
    """Of any names and rules, test_resolution_properties.py and _front_ends.py show the same."""
    mesh = CUBE_XYZ if rules is XYZ else CUBE
    assert spec_of_every_carrier(tuple(names), rules, mesh) == expected


def test_B13_unconstrained_dimensions():
    names, rules = ('foo', UNC, UNC, None, None), [('foo', 'data'), ('bar', 'model')]
    assert tuple(logical_to_mesh_axes(names, rules)) == ('data', UNC, UNC, None, None)


def test_B14_errors():
    with pytest.raises(ValueError, match=r"'foo'.*two dimensions.*\('foo', 'foo', 'baz'\)"):
        spec_of_every_carrier(('foo', 'foo', 'baz'), PRIORITIES)
    assert logical_to_mesh_axes(None, PRIORITIES) is None
    with pytest.raises(ValueError, match='must be a list or a tuple of pairs, not generator'):
        logical_to_mesh_axes(('foo',), (rule for rule in PRIORITIES))
    with pytest.raises(ValueError, match=r"'zz'.*data 2 x model 2 x replica 2"):
        spec_of_every_carrier(('foo',), [('foo', 'zz')])


# Initializers.


def test_B17_names_mesh_and_rules_survive_jit():
    mesh, rules = create_mesh((4, 2), ('in', 'out')), (('a', 'in'), ('b', 'out'))
    init = with_logical_partitioning(ones, ('a', 'b'), mesh=mesh, rules=rules)
    made = jax.jit(OneArray(init).init)(KEY)['params']['w']
    assert type(made) is LogicallyPartitioned and made.mesh is mesh
    assert (made.names, made.rules) == (('a', 'b'), rules)
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=())
    born = partitioner.init(OneArray(init).init, KEY)['params']['w']
    assert born.sharding == NamedSharding(mesh, P('in', 'out'))


@pytest.mark.parametrize('boxes', [with_partitioning, with_logical_partitioning])
def test_B17_malformed_names_and_rules(boxes):
    with pytest.raises(ValueError, match=r"must be a tuple, such as \('embed',\)"):
        boxes(ones, 'embed')
    with pytest.raises(ValueError, match=r"rule \('a', 5\).*write"):
        with_logical_partitioning(ones, ('a',), rules=[('a', 5)])
