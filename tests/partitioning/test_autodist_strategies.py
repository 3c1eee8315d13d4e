"""AutoDist's configurations, variables and strategies, beyond what AutoDist itself has."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

from partitioning.compat.autodist import (
    PS,
    AllReduce,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PartitionerConfig,
    RandomAxisPartitionAR,
    Strategy,
    Variable,
    split_rows,
    split_sizes,
)
from partitioning.compat.autodist.splits import split_axis
from partitioning.compat.autodist.variables import GraphConfig, NodeConfig, describe_variables

pytestmark = pytest.mark.core

PARAMS = {'fc1': {'kernel': jnp.ones((8, 16)), 'bias': jnp.ones(16)}, 'emb': jnp.ones((32, 8))}


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: split_sizes(3, 4), 'size 3 .* 4 shards'),
        (lambda: split_sizes(0, 1), 'size 0 .*>= 1'),
        (lambda: split_rows([3], 3, 2), 'row 3 .* 3 rows'),
        (lambda: split_rows([0.5], 3, 2), 'integers, not float64'),
    ],
)
def test_dimensions_that_cannot_be_cut(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.integers(0, 3), st.integers(2, 9), st.integers(0, 3))
def test_configs_become_specs_and_back(before, count, after):
    config = PartitionerConfig([*[1] * before, count, *[1] * after])
    sizes = {'one': 1, 'other': 10, 'cut': count}
    spec = config.to_partition_spec(sizes)
    assert spec == P(*[None] * before, 'cut')
    assert PartitionerConfig.from_partition_spec(spec, sizes, before + 1 + after) == config


def test_configs_of_specs():
    sizes = {'data': 2, 'model': 4, 'one': 1}
    both = PartitionerConfig.from_partition_spec(P('one', ('data', 'model')), sizes, 3)
    assert both.partition_str == '1,8,1'
    for spec, count in (P('data', 'model'), '2'), (P(), 'no'), (P('one'), 'no'):
        with pytest.raises(ValueError, match=f'cuts {count} dimensions'):
            PartitionerConfig.from_partition_spec(spec, sizes, 2)
    with pytest.raises(ValueError, match="Did you mean 'data'"):
        PartitionerConfig.from_partition_spec(P('date'), sizes, 2)


def test_configs_are_values():
    config = PartitionerConfig(partition_str='1,4')
    assert {config: 1}[PartitionerConfig(np.array([1, 4]))] == 1
    assert eval(repr(config)) == config
    for wrong in ({'partition_list': 4}, {'partition_list': '1,4'}, {'partition_str': 4}):
        with pytest.raises(ValueError):
            PartitionerConfig(**wrong)


# Variables and strategies.


def test_variables_of_trees():
    found = describe_variables({'params': PARAMS}, sparse=['em.'])
    assert [v.name for v in found] == ['emb', 'fc1/bias', 'fc1/kernel']
    assert [v.sparse for v in found] == [True, False, False]
    assert [v.nbytes for v in found] == [1024, 64, 512]
    half = describe_variables(jax.ShapeDtypeStruct((3, 5), 'bfloat16'))
    assert (half[0].nbytes, half[0].dtype) == (30, 'bfloat16')


@pytest.mark.parametrize(
    'sparse, message',
    [
        (['embd'], "'embd' matches no variable. Did you mean 'emb'?"),
        ('emb', r"write \['emb'\]"),
        (['('], r"'\(' is not a regular"),
    ],
)
def test_invalid_sparse_variables(sparse, message):
    with pytest.raises(ValueError, match=message):
        describe_variables(PARAMS, sparse)


def test_parallax_guesses_by_name():
    params = {'Embedding_0': {'embedding': jnp.ones((8, 4))}, 'dense': {'kernel': jnp.ones((4, 4))}}
    assert list(Parallax().build(params, ['A']).placements) == ['Embedding_0/embedding']
    strategy = Parallax(sparse=['dense/.*']).build(params, ['A'])
    assert list(strategy.placements) == ['dense/kernel']
    assert not Parallax(sparse=()).build(params, ['A']).placements


@pytest.mark.parametrize('servers', [[], 'AB', ['A', 'A'], [1], 2])
def test_invalid_servers(servers):
    with pytest.raises(ValueError, match='servers'):
        PS().build(PARAMS, servers)


def test_the_report():
    report = PartitionedPS().build(PARAMS, ['A', 'B', 'C']).report()
    assert re.search(r'fc1/kernel +8 x 16 +512 +2 +2,1 +[ABC], [ABC]\n', report)
    loads = dict(re.findall(r'^([ABC]) +([\d,]+)$', report, re.MULTILINE))
    assert sum(int(load.replace(',', '')) for load in loads.values()) == 1600
    assert 'balance' in report
    assert 'all-reduce group 0' in AllReduce().build(PARAMS, ['A']).report()


def test_the_report_of_very_many_shards():
    emb = [Variable('emb', (1_009, 4))]
    served = PartitionedPS().build(emb, ['A', 'B']).report()
    assert re.search(r'1009,1 +A, B, A, B, A, B and 1003 more\n', served)
    reduced = PartitionedAR(chunk_size=1).build(emb, ['A']).report()
    assert 'all-reduce groups 0, 1, 2, 3, 4, 5 and 1003 more' in reduced


def test_variables_in_any_sequence():
    named = {'emb': Variable('emb', (32, 8)), 'w': Variable('w', (8,))}
    strategy = PartitionedPS().build([*named.values()], ['A'])
    for given_variables in (iter(named.values()), named.values(), tuple(named.values())):
        assert PartitionedPS().build(given_variables, ['A']) == strategy
    for wrong in (named['emb'], named, [named['emb'], jnp.ones(3)], iter([jnp.ones(3)])):
        with pytest.raises(TypeError, match='Variables: give a list of Variables'):
            PS().build(wrong, ['A'])
    with pytest.raises(ValueError, match='no variables'):
        PS().build(iter([]), ['A'])


def test_strategies_of_one_content_have_one_id():
    strategy = RandomAxisPartitionAR(seed=3).build(PARAMS, ['A'])
    text = strategy.to_json()
    assert strategy.to_json() == text and Strategy.from_json(text) == strategy
    assert json.loads(text)['id'] == strategy.id
    other = RandomAxisPartitionAR(seed=3, mesh_axis='model').build(PARAMS, ['A'])
    assert other.id == strategy.id


@pytest.mark.parametrize(
    'change, message',
    [
        (('"PartitionedPS"', '"PS"'), "id '[0-9a-f]{16}'.* id '[0-9a-f]{16}'"),
        (('"A"', '"B"'), "emb .*'A'.* not one of the servers"),
        (('"sparse"', '"sparce"'), "Did you mean 'sparse'"),
        (('"PS"', '"P2P"'), "'PS' or 'AllReduce', not 'P2P'"),
        (('"2,1"', '"2"'), "partitioner '2' has 1 entry.* 2 dimensions"),
        (('"2,1"', '"3,1"'), '3 shards needs 3 servers'),
        (('"servers": ["A", "A"]', '"servers": ["A"]'), 'needs 2 servers'),
        (('"float32"', '"floaty"'), "'emb': \"dtype\" 'floaty' is not a dtype"),
        (('[32, 8]', '"328"'), "'emb': \"shape\" must be a list, not '328'"),
        (('[32, 8]', '[32.5, 8]'), r"'emb': \"shape\" must be a list of sizes, not \[32\.5, 8\]"),
        (('[32, 8]', '[-32, 8]'), r"'emb': \"shape\" must be a list of sizes, not \[-32, 8\]"),
        (('["A", "A"]', '"AA"'), "'emb': \"servers\" must be a list, not 'AA'"),
        (('"sparse": false', '"sparse": "no"'), "'emb': \"sparse\" must be a bool, not 'no'"),
        (('"name": "emb"', '"name": {}'), '{}: "name" must be a str, not {}'),
        (('{', '['), 'JSON'),
    ],
)
def test_files_changed_by_hand(change, message, tmp_path):
    path = tmp_path / 'strategy.json'
    path.write_text(PartitionedPS().build(PARAMS, ['A']).to_json().replace(*change, 1))
    with pytest.raises(ValueError, match=message) as error:
        Strategy.deserialize(path)
    assert str(path) in str(error.value)


def test_strategies_name_their_servers():
    strategy = PS().build(PARAMS, ['A'])
    with pytest.raises(ValueError, match=r"emb .*'A'.* not one of the servers"):
        dataclasses.replace(strategy, graph_config=GraphConfig(planner='PS', servers=('B',)))
    with pytest.raises(ValueError, match=r'emb .*more than once'):
        dataclasses.replace(strategy, node_config=strategy.node_config[:1] * 2)


def test_sparse_variables_are_cut_by_rows():
    with pytest.raises(ValueError, match='emb is cut along 1'):
        NodeConfig(
            variable=Variable('emb', (8, 4), sparse=True),
            partitioner='1,2',
            synchronizer='AllReduce',
            groups=(0, 0),
        )


@pytest.mark.parametrize(
    'sizes, axis',
    [
        ({'data': 1, 'model': 8}, 'model'),
        ({'data': 2, 'model': 4}, 'data'),
        ({'data': 8, 'model': 1}, 'data'),
        ({'x': 8}, 'x'),
        ({'data': 1, 'model': 1}, 'data'),
    ],
)
def test_the_default_axis(sizes, axis):
    assert split_axis(sizes) == axis


def test_several_axes_could_be_meant():
    with pytest.raises(ValueError, match="'x' or 'y' of the mesh x 2 x y 4"):
        split_axis({'x': 2, 'y': 4})
    strategy = PartitionedPS().build(PARAMS, ['A'])
    assert strategy.to_plan({'x': 2, 'y': 4}, 'y').plan['emb'] == P('y')
    with pytest.raises(ValueError, match=r"'modle' .*Did you mean 'model'"):
        strategy.to_plan({'data': 2, 'model': 4}, 'modle')


def test_the_dimension_that_is_split():
    params = {f'w{i}': jax.ShapeDtypeStruct((8, 8, 8), 'float32') for i in range(12)}
    strategy = RandomAxisPartitionAR(seed=0).build(params, ['A'])
    wanted = {'2,1,1': P('model'), '1,2,1': P(None, 'model'), '1,1,2': P(None, None, 'model')}
    plan = strategy.to_plan({'data': 1, 'model': 8}).plan
    assert plan == {name: wanted[cut] for name, cut in strategy.partitions.items()}
    assert {*strategy.partitions.values()} == {*wanted}
