"""Partitioners on meshes with several slices, other axis names and other axis types."""

import flax.linen as nn
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mock_devices import tpu_slices

from partitioning import (
    MeshConfig,
    PjitPartitioner,
    constrain,
    create_mesh,
)
from partitioning.partitioner.base_pjit import BasePjitPartitioner

pytestmark = pytest.mark.core

# Several slices, and axes of other names.


def two_slices():
    return tpu_slices(2, (2, 2, 2), 'TPU v4')


RULES = [('batch', 'data'), ('mlp', 'model'), ('embed', 'data'), ('batch', 'model')]


@pytest.mark.parametrize(
    'settings',
    [
        {'mesh': MeshConfig.from_t5x(4, devices=two_slices())},
        {'mesh': MeshConfig.from_t5x(None, (2, 2, 1, 1), devices=two_slices())},
        {'mesh': MeshConfig(axes={'replica': 1, 'data': 4, 'model': 2}, slice_axis='replica')},
        {'ici_mesh_shape': (1, 4, 2), 'dcn_mesh_shape': (1, 1, 1)},
        {'mesh': MeshConfig.from_t5x(2, mesh_axis_names=('replica', 'data', 'model'))},
    ],
)
def test_rules_for_one_slice_on_a_mesh_of_several(settings):
    """Only the rule of the batch for 'data' changes, as in T5X."""
    partitioner = PjitPartitioner(**settings, logical_axis_rules=RULES)
    assert partitioner.logical_axis_rules == (('batch', ('replica', 'data')), *RULES[1:])
    assert partitioner.data_partition_spec == P(('replica', 'data'))


def test_rules_for_a_given_mesh_stay_as_they_are(caplog):
    """A warning says that the batch is computed twice."""
    mesh = create_mesh((2, 2, 2), ('replica', 'data', 'model'))
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES)
    with caplog.at_level('WARNING'):
        assert partitioner.data_partition_spec == P('data')
    assert "each of the 2 parts of 'replica' computes the same rows" in caplog.text
    assert BasePjitPartitioner(mesh=mesh).data_partition_spec == P(('replica', 'data'))


@pytest.mark.parametrize(
    'rule, axes',
    [
        (('batch', 'data'), ('pod', 'data')),
        (('batch', ('data',)), ('pod', 'data')),
        (('batch', ('data', 'model')), ('pod', 'data', 'model')),
        (('batch', ('data', 'pod')), ('data', 'pod')),
    ],
)
def test_the_batch_goes_over_the_slices_by_any_name(rule, axes):
    names = ('pod', 'data', 'model')
    config = MeshConfig.from_t5x(4, devices=two_slices(), mesh_axis_names=names)
    partitioner = PjitPartitioner(mesh=config, logical_axis_rules=[rule, ('embed', None)])
    assert partitioner.data_partition_spec == P(axes)
    assert partitioner.logical_axis_rules[1] == ('embed', None)
    assert BasePjitPartitioner(mesh=config).data_partition_spec == P(('pod', 'data'))


def test_axes_without_default_rules_have_no_rules():
    """Without rules for the axes, constrain raises instead of replicating everything."""
    partitioner = PjitPartitioner(mesh=MeshConfig(axes={'x': 4, 'y': 2}))
    with pytest.raises(ValueError, match=r"'mlp', 'embed'.* no axis rules"):
        partitioner.partition(lambda a: constrain(a, ('mlp', 'embed')), None, None)(np.ones((4, 4)))
    double = partitioner.partition(lambda a: a * 2, P('x'), P('y'))  # specs need no rules
    assert double(np.arange(8.0)).tolist() == (np.arange(8.0) * 2).tolist()


@pytest.mark.parametrize('axis, hint', [('foo', ''), ('modle', "Did you mean 'model'?")])
def test_an_axis_that_default_rules_do_not_use(axis, hint):
    """Default rules must not silently replicate everything over it."""
    state = {'w': nn.Partitioned(np.zeros((4, 8)), ('embed', 'mlp'))}
    for settings in (
        {'mesh': create_mesh((4, 2), ('data', axis))},
        {'mesh': MeshConfig(axes={'data': -1, axis: 2})},
    ):
        partitioner = PjitPartitioner(**settings)
        with pytest.raises(ValueError, match=f'mesh axis {axis!r}') as error:
            partitioner.get_mesh_axes(state)
        assert str(error.value).endswith(hint)
        with pytest.raises(ValueError, match=f'mesh axis {axis!r}'):
            partitioner.data_partition_spec  # noqa: B018
        chosen = PjitPartitioner(
            **settings, logical_axis_rules=[('batch', 'data'), ('embed', None), ('mlp', axis)]
        )
        assert chosen.get_mesh_axes(state) == {'w': P(None, axis)}


def test_an_axis_of_size_one_needs_no_rule():
    partitioner = PjitPartitioner(mesh=create_mesh((8, 1), ('data', 'foo')))
    assert partitioner.data_partition_spec == P('data')


def test_names_without_data():
    """The batch of a partitioner without rules is sharded over 'data'."""
    base = BasePjitPartitioner(mesh=MeshConfig(axes={'date': -1, 'model': 2}))
    with pytest.raises(ValueError, match=r"'data'.* date 4 x model 2.*'date'"):
        base.data_mesh_size  # noqa: B018
