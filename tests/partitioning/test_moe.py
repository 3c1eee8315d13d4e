"""Mixtures of experts: the mesh with an 'expert' axis, and the partitioner on it."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from mock_devices import tpus

from partitioning import MoePjitPartitioner
from partitioning.mesh.aliases import default_moe_mesh

pytestmark = pytest.mark.core


def v3_2x2():
    return tpus((2, 2, 1), 'TPU v3', cores=2)


# The mesh.


@pytest.mark.parametrize('experts', [0, -2, True, 2.0, '2', None])
def test_experts_that_are_not_a_positive_integer(experts):
    with pytest.raises(ValueError, match=f'num_expert_partitions={experts!r} must be an integer'):
        default_moe_mesh(experts, 2, devices=v3_2x2())


@pytest.mark.parametrize('experts', [3, 5, 6])
def test_experts_that_do_not_fit(experts):
    """The number of experts must be a factor or a multiple of the data axis."""
    with pytest.raises(ValueError) as error:
        default_moe_mesh(experts, 2, devices=v3_2x2())
    assert f'num_expert_partitions={experts!r}' in str(error.value)
    assert ' 4 devices' in str(error.value) and 'use one of 1, 2, 4' in str(error.value)


def test_partitions_of_a_moe_mesh_that_do_not_fit():
    with pytest.raises(ValueError, match='num_partitions=3 does not divide the 8'):
        default_moe_mesh(2, 3, devices=v3_2x2())
    with pytest.raises(ValueError, match='At least one of'):
        default_moe_mesh(2, devices=v3_2x2())
    with pytest.raises(ValueError, match='num_partitions=2 and model_parallel_submesh'):
        default_moe_mesh(2, 2, (1, 1, 1, 2), devices=v3_2x2())
    with pytest.raises(ValueError, match='At least one of'):
        MoePjitPartitioner(2)


# The partitioner.


def test_a_layer_of_experts():
    """Each expert multiplies its rows, with the result of a single device."""
    partitioner = MoePjitPartitioner(2, 2)
    rows = np.arange(4 * 3 * 6, dtype=np.float32).reshape(4, 3, 6) / 10
    kernel = np.cos(np.arange(4 * 6 * 8, dtype=np.float32)).reshape(4, 6, 8)
    named = nn.Partitioned(kernel, ('expert', 'embed', 'expert_mlp'))
    spec = partitioner.get_mesh_axes({'kernel': named})['kernel']
    layer = partitioner.partition(
        lambda k, x: jnp.einsum('erd,edf->erf', x, k), (spec, P('expert')), P('expert')
    )
    result = layer(kernel, rows)
    np.testing.assert_allclose(result, rows @ kernel, rtol=1e-5)
    assert result.sharding == NamedSharding(partitioner.mesh, P('expert'))
