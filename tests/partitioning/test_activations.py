"""Activations on meshes of several axis types, names without a rule, and the context of rules."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.spmd import RulesFallback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisRules,
    PjitPartitioner,
    constrain,
    create_mesh,
    with_sharding_constraint,
)

pytestmark = pytest.mark.core

UNC = P.UNCONSTRAINED
RULES = [('batch', 'data'), ('embed', 'data'), ('mlp', 'model'), ('layers', None)]


def partitioner_of(rules=(), **settings):
    return PjitPartitioner(2, logical_axis_rules=rules, **settings)


# Activations: mixed meshes, fallbacks, contexts.

MIXED = pytest.mark.parametrize(
    'axis_types', [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)]
)
OF_ACTIVATIONS = [('batch', 'data'), ('embed', 'model'), ('both', ('data', 'model')), ('no', None)]


@MIXED
@pytest.mark.parametrize(
    'names, expected',
    [
        (('batch', 'embed'), P('data', 'model')),
        (('embed', 'batch'), P('model', 'data')),
        (('batch', None), P('data', None)),
        (('no', 'embed'), P(None, 'model')),
        (('no', None), P(None, None)),
    ],
)
def test_constrain_over_a_mixed_mesh(axis_types, names, expected):
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    x = np.arange(64.0, dtype='float32').reshape(8, 8)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, names, OF_ACTIVATIONS))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, expected), 2)
    np.testing.assert_array_equal(y, x * 2)


@MIXED
@pytest.mark.parametrize('axes', [('data', 'model'), ('model', 'data')])
def test_a_dimension_over_axes_of_both_types(axis_types, axes):
    """As it says, or an error: the order of the axes says which device has which rows."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    with jax.set_mesh(mesh):
        try:
            y = jax.jit(lambda x: with_sharding_constraint(x * 2, P(axes)))(jnp.ones((8, 8)))
        except ValueError:
            return
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(axes)), 2)


@MIXED
def test_unconstrained_dimensions_of_a_mixed_mesh(axis_types):
    """jax refuses them only where no axis is Auto."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, (UNC, 'embed'), OF_ACTIVATIONS))(jnp.ones((8, 8)))
    assert y.sharding.spec[1] == 'model'


def test_names_without_a_rule_as_fallbacks_of_linen():
    """RAISE_ERROR is ours unless a policy says AXIS_IS_UNSHARDED."""
    rules = [('foo', 'data')]
    mesh = create_mesh((4, 2), ('data', 'model'))
    x = np.ones((8, 8), np.float32)

    def ours(x):
        return constrain(x, ('foo', 'new'), AxisRules(rules, on_unmatched='replicate'))

    def linens(x, fallback=RulesFallback.AXIS_IS_UNSHARDED):
        return nn.with_logical_constraint(x, ('foo', 'new'), rules, fallback=fallback)

    with jax.set_mesh(mesh):
        for fn in (ours, linens):
            sharding = jax.jit(fn)(x).sharding
            assert sharding.is_equivalent_to(NamedSharding(mesh, P('data', None)), 2)
        with pytest.raises(ValueError, match='did not match a rule'):
            jax.jit(lambda x: linens(x, RulesFallback.RAISE_ERROR))(x)
        with pytest.raises(ValueError, match="no rule for logical axis 'new'"):
            jax.jit(lambda x: constrain(x, ('foo', 'new'), rules))(x)


def test_rules_of_a_partitioned_function_are_its_own():
    """Inside they are the partitioner's; before, after, and in other threads those that were."""
    partitioner, seen = partitioner_of(RULES), {}

    def look(x, fail=False):
        seen['inside'] = nn.get_logical_axis_rules()
        with nn.logical_axis_rules((('inner', None),)):
            seen['nested'] = nn.get_logical_axis_rules()
        thread = threading.Thread(target=lambda: seen.update(thread=nn.get_logical_axis_rules()))
        thread.start()
        thread.join()
        assert nn.get_logical_axis_rules() == seen['inside'] and not fail
        return x

    outside = (('outer', 'data'),)
    with nn.logical_axis_rules(outside):
        partitioner.partition(look, None, None)(jnp.ones(8))
        assert nn.get_logical_axis_rules() == outside
        with pytest.raises(AssertionError):
            partitioner.partition(lambda x: look(x, fail=True), None, None)(jnp.ones(8))
        assert nn.get_logical_axis_rules() == outside
    assert nn.get_logical_axis_rules() == ()
    expected = {'inside': tuple(RULES), 'nested': (('inner', None),), 'thread': ()}
    assert {k: tuple(v) for k, v in seen.items()} == expected
