"""Activations on meshes with both Auto and Explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from partitioning import (
    constrain,
    create_mesh,
    with_sharding_constraint,
)

pytestmark = pytest.mark.core

UNC = P.UNCONSTRAINED
MIXED = pytest.mark.parametrize(
    'axis_types', [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)]
)
RULES = [('batch', 'data'), ('embed', 'model'), ('both', ('data', 'model')), ('no', None)]


SPECS = {
    ('batch', 'embed'): P('data', 'model'),
    ('embed', 'batch'): P('model', 'data'),
    ('batch', None): P('data', None),
    ('no', 'embed'): P(None, 'model'),
    ('no', None): P(None, None),
}


@MIXED
def test_constrain_over_a_mixed_mesh(axis_types):
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    x = np.arange(64.0, dtype='float32').reshape(8, 8)
    with jax.set_mesh(mesh):
        constrained = jax.jit(lambda x: [constrain(x * 2, names, RULES) for names in SPECS])
        for y, spec in zip(constrained(x), SPECS.values(), strict=True):
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), spec
            np.testing.assert_array_equal(y, x * 2)


@MIXED
@pytest.mark.parametrize('axes', [('data', 'model'), ('model', 'data')])
def test_a_dimension_over_axes_of_both_types(axis_types, axes):
    """If the axes cannot be applied in this order, there is an error: their order matters."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    with jax.set_mesh(mesh):
        try:
            y = jax.jit(lambda x: with_sharding_constraint(x * 2, P(axes)))(jnp.ones((8, 8)))
        except ValueError:
            return
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(axes)), 2)


@MIXED
def test_unconstrained_dimensions_of_a_mixed_mesh(axis_types):
    """jax refuses them only if no axis is Auto."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, (UNC, 'embed'), RULES))(jnp.ones((8, 8)))
    assert y.sharding.spec[1] == 'model'
