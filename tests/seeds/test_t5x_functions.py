"""T5X's partitioned functions and constraints on today's jax."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import (
    PjitPartitioner,
    default_mesh,
    global_mesh_defined,
    with_sharding_constraint,
)

pytestmark = pytest.mark.core


RULES = [('batch', 'data'), ('mlp', 'model')]


@pytest.mark.filterwarnings('error::DeprecationWarning')
def test_E19_partitioned_functions_work_on_todays_jax():
    """There is no use of pjit, `with mesh:` or jax.tree_map, which are gone or warn."""
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    assert not global_mesh_defined()
    seen = []

    def step(x):
        seen.append(global_mesh_defined())
        return with_sharding_constraint(2 * x, P('data', 'model'))

    x = jnp.arange(64.0).reshape(8, 8)
    # x is not committed to devices, so it may be laid out in any way; keywords are accepted.
    y = one.partition(step, (P('data'),), P('data', 'model'))(x=x)
    np.testing.assert_array_equal(y, 2 * np.arange(64.0).reshape(8, 8))
    assert seen == [True]


def test_E19_constraints_hold_on_cpu():
    """T5X silently skips them."""
    one = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    constrained = one.partition(
        lambda x: with_sharding_constraint(x + 1, P('data', 'model')), (P(),), None
    )
    text = constrained.lower(jnp.zeros((8, 8))).as_text()
    assert 'sdy.sharding_constraint' in text or '@Sharding' in text
    with jax.set_mesh(one.mesh):
        x = jax.jit(lambda x: with_sharding_constraint(x + 1, P('data', 'model')))(
            jnp.zeros((8, 8))
        )
    assert x.sharding.spec == P('data', 'model')


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_E19_jax_no_longer_has_what_t5x_needs():
    """T5X's own partitioning does not run on today's jax: the modules it imports are gone."""
    with pytest.raises(ModuleNotFoundError, match=r'jax\.experimental\.maps'):
        importlib.import_module('jax.experimental.maps')
    with pytest.raises(AttributeError, match='tree_map'):
        _ = jax.tree_map
    mesh, x = default_mesh(2), jnp.zeros((8, 8))
    with mesh:
        assert not global_mesh_defined()
        with pytest.raises(RuntimeError, match='jit requires a non-empty mesh in context'):
            jax.jit(lambda x: x, in_shardings=P('data'))(x)
