"""The rows B15 and B16 about flax.linen: activations and the context of rules."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from boxed_states import XY, partitioner_of
from flax.linen.spmd import RulesFallback
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import AxisRules, constrain, create_mesh

pytestmark = pytest.mark.core

UNC = P.UNCONSTRAINED

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
