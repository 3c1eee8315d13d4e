"""The rows B11 to B17 about flax.linen: rules, activations, contexts and initializers."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from boxed_states import KEY, XY, OneArray, box, ones, partitioner_of
from flax.linen.spmd import RulesFallback
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import (
    AxisRules,
    LogicallyPartitioned,
    PjitPartitioner,
    constrain,
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


# Activations.


def constrained(names, rules):
    """The spec that `constrain` gives inside a program, and whether it does anything."""
    mesh = create_mesh((4, 2), ('data', 'model'))
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda x: constrain(x, names, rules)).trace(jnp.zeros((8, 4)))
        y = jax.jit(lambda x: constrain(x, names, rules))(jnp.zeros((8, 4)))
    return y.sharding.spec, len(traced.jaxpr.eqns)


def by_linen(x, fallback):
    return nn.with_logical_constraint(x, ('foo', 'bar'), [('foo', 'data')], fallback=fallback)


def test_B15_a_name_without_a_rule():
    """AXIS_IS_UNSHARDED is the policy 'replicate'; RAISE_ERROR is the default."""
    rules, mesh, x = [('foo', 'data')], create_mesh((4, 2), ('data', 'model')), jnp.zeros((8, 4))
    spec, _ = constrained(('foo', 'bar'), AxisRules(rules, on_unmatched='replicate'))
    assert (*spec, None)[:2] == ('data', None)
    with jax.set_mesh(mesh):
        y = jax.jit(by_linen, static_argnums=1)(x, RulesFallback.AXIS_IS_UNSHARDED)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('data', None)), 2)
        with pytest.raises(ValueError, match='did not match a rule'):
            jax.jit(by_linen, static_argnums=1).trace(x, RulesFallback.RAISE_ERROR)
    with pytest.raises(ValueError, match=r"no rule for logical axis 'bar'.*\('bar', None\)"):
        constrained(('foo', 'bar'), rules)


def test_B15_no_constraint():
    """NO_CONSTRAINT does not exist here; a dimension is left open with UNCONSTRAINED."""
    rules = [('foo', 'data')]

    with jax.set_mesh(create_mesh((4, 2), ('data', 'model'))):
        traced = jax.jit(by_linen, static_argnums=1).trace(
            jnp.zeros((8, 4)), RulesFallback.NO_CONSTRAINT
        )
        assert not traced.jaxpr.eqns
    assert constrained((UNC, UNC), rules)[1] == 1
    with jax.set_mesh(XY), pytest.raises(ValueError, match=r'no axis rules.*rules='):
        constrain(jnp.zeros((8, 4)), ('foo', 'bar'), [])
    with pytest.raises(ValueError, match='its names'):
        constrain(jnp.zeros((8, 4)), None, rules)


def test_B16_rules_of_the_context():
    outer, inner = (('a', 'data'),), (('a', 'model'),)
    mesh, x, elsewhere = create_mesh((4, 2), ('data', 'model')), jnp.zeros((8, 4)), []

    def layout():
        with jax.set_mesh(mesh):
            return jax.jit(lambda x: constrain(x, ('a', None)))(x).sharding.spec[0]

    assert nn.get_logical_axis_rules() == ()
    with nn.logical_axis_rules(outer):
        assert layout() == 'data'
        with nn.logical_axis_rules(inner):
            assert layout() == 'model'
            thread = threading.Thread(target=lambda: elsewhere.append(nn.get_logical_axis_rules()))
            thread.start()
            thread.join()
        assert layout() == 'data'
    assert nn.get_logical_axis_rules() == () and elsewhere == [()]
    with pytest.raises(ValueError, match=r'no axis rules.*rules='):
        layout()


def test_B16_a_partitioned_function_sets_them():
    """Inside they are the partitioner's; before, after and in other threads they are not."""
    rules, outside = [('a', 'data')], (('outer', 'data'),)
    partitioner, seen = partitioner_of(rules), {}

    def program(x, fail=False):
        seen['inside'] = nn.get_logical_axis_rules()
        with nn.logical_axis_rules((('inner', None),)):
            seen['nested'] = nn.get_logical_axis_rules()
        thread = threading.Thread(target=lambda: seen.update(thread=nn.get_logical_axis_rules()))
        thread.start()
        thread.join()
        assert nn.get_logical_axis_rules() == seen['inside'] and not fail
        return constrain(x, ('a',))

    with nn.logical_axis_rules(outside):
        y = partitioner.partition(program, None, P('data'))(jnp.ones(8))
        assert y.sharding.spec == P('data')
        assert nn.get_logical_axis_rules() == outside
        with pytest.raises(AssertionError):
            partitioner.partition(lambda x: program(x, fail=True), None, None)(jnp.ones(8))
        assert nn.get_logical_axis_rules() == outside
    assert nn.get_logical_axis_rules() == ()
    expected = {'inside': tuple(rules), 'nested': (('inner', None),), 'thread': ()}
    assert {k: tuple(v) for k, v in seen.items()} == expected
