"""How AutoDist cuts one variable: its notation, and which row is in which shard."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

from partitioning import create_mesh
from partitioning.compat.autodist import PartitionedPS, PartitionerConfig, Variable
from partitioning.compat.autodist.splits import (
    even_shards,
    split_offsets,
    split_rows,
    split_sizes,
    uneven_shards,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]


def test_A1_from_a_list():
    config = PartitionerConfig(partition_list=[1, 4, 1])
    assert (config.partition_str, config.num_shards, config.axis) == ('1,4,1', 4, 1)


def test_A2_from_a_string():
    config = PartitionerConfig(partition_str='2')
    assert (config.partition_list, config.num_shards, config.axis) == ([2], 2, 0)
    config = PartitionerConfig(partition_str='1,1,8')
    assert (config.axis, config.num_shards) == (2, 8)


@pytest.mark.parametrize(
    'settings, message',
    [
        ({}, 'partition_list'),
        ({'partition_list': []}, 'number of shards per dimension'),
        ({'partition_str': ''}, 'number of shards per dimension'),
        ({'partition_list': [1, 1, 1]}, 'trivial -- num_split is 1 on every axis'),
        ({'partition_list': [2, 2]}, 'only support partitioning along one axis'),
        ({'partition_list': [0, 4]}, r'>= 1, not \[0, 4\]'),
        ({'partition_str': 'a,b'}, "'a,b'"),
        ({'partition_str': '4,'}, "'4,'"),
    ],
)
def test_A3_invalid_partitioners(settings, message):
    with pytest.raises(ValueError, match=message):
        PartitionerConfig(**settings)


def test_A4_quirks_of_autodist_that_are_errors():
    with pytest.raises(ValueError, match=r"\[1, 4\] .*'1,4' .*one of them"):
        PartitionerConfig(partition_list=[1, 4], partition_str='1,4')
    with pytest.raises(ValueError, match=r'>= 1, not \[-1, 4\]'):
        PartitionerConfig(partition_list=[-1, 4])


def test_A4_blanks_are_removed():
    config = PartitionerConfig(partition_str='1, 4, 1')
    assert config.partition_str == '1,4,1'
    assert config == PartitionerConfig(partition_list=[1, 4, 1])


@given(st.integers(1, 300), st.data())
def test_A5_A6_dense_and_sparse_gradients_are_cut_as_numpy_cuts(size, data):
    num = data.draw(st.integers(1, size))
    parts = np.array_split(np.arange(size), num)
    sizes = [len(part) for part in parts]
    assert list(split_sizes(size, num)) == sizes
    assert [*split_offsets(size, num), size] == [0, *np.cumsum(sizes)]
    shards, local = split_rows(np.arange(size), size, num)
    assert shards.tolist() == [i for i, part in enumerate(parts) for _ in part]
    assert local.tolist() == [k for part in parts for k in range(len(part))]


def test_A6_sparse_gradients_along_columns():
    message = 'Embedding variables can only be partitioned along the first axis'
    with pytest.raises(ValueError, match=message):
        split_rows([0, 1], 10, 3, axis=1)


EVEN = {
    1: 1, 2: 2, 3: 3, 4: 2, 5: 5, 6: 2, 7: 7, 8: 2, 9: 3, 10: 2, 12: 2, 15: 3, 16: 2, 25: 5, 49: 7,
    97: 97, 100: 2, 10000: 2,
}  # fmt: skip
UNEVEN = {1: 1, 2: 2, 3: 2, 4: 3, 5: 2, 6: 4, 7: 2, 8: 3, 12: 5, 16: 3, 60: 7, 10000: 3}


def test_A7_even_shards():
    assert {size: even_shards(size) for size in EVEN} == EVEN
    scalar = PartitionedPS().build([Variable('step', ())], ['A'])
    assert scalar.node_config[0].num_shards == 1


def test_A8_uneven_shards():
    assert {size: uneven_shards(size) for size in UNEVEN} == UNEVEN


def test_A18_over_the_axis_of_that_size():
    mesh = create_mesh((2, 4), ('data', 'model'), devices=jax.devices()[:8])
    config = PartitionerConfig(partition_str='1,4,1')
    assert config.to_partition_spec(mesh) == P(None, 'model')
    assert config.to_partition_spec(mesh, (3, 8, 5)) == P(None, 'model')
    assert PartitionerConfig([2]).to_partition_spec(mesh) == P('data')
    assert PartitionerConfig.from_partition_spec(P(None, 'model'), mesh, 3) == config


@pytest.mark.parametrize(
    'counts, sizes, shape, words',
    [
        ([1, 4], {'data': 2, 'model': 8}, None, ['4', 'data 2 x model 8', 'no axis']),
        ([1, 4], {'data': 4, 'model': 4}, None, ['4', 'data 4 x model 4', 'data, model']),
        ([1, 4], {'data': 2, 'model': 4}, (3, 6), ['dimension 1', 'size 6', 'divisible by 4']),
        ([1, 4], {'data': 2, 'model': 4}, (3, 8, 2), ["'1,4' has 2", 'has 3 dimensions']),
    ],
)
def test_A18_meshes_and_shapes_that_do_not_fit(counts, sizes, shape, words):
    with pytest.raises(ValueError) as error:
        PartitionerConfig(counts).to_partition_spec(sizes, shape)
    for word in words:
        assert word in str(error.value)
