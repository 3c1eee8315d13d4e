"""Errors and reasons of logical axis rules.

The specs are tested in tests/seeds/test_flax_rules.py and test_resolution_properties.py.
"""

import pytest
from jax.sharding import PartitionSpec as P

from partitioning import (
    PjitPartitioner,
    logical_to_mesh_axes,
    resolve_axes,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]

PRIORITIES = [('foo', 'model'), ('bar', 'model'), ('baz', 'data')]


# Errors, each with its solution.


def test_unmatched_name():
    with pytest.raises(ValueError) as error:
        logical_to_mesh_axes(('batch', 'embd'), [('batch', 'data'), ('embed', 'model')])
    message = str(error.value)
    assert "no rule for logical axis 'embd' of ('batch', 'embd')" in message
    assert "'embed'" in message  # the nearest name
    assert "('embd', None)" in message  # the rule to add


def test_rule_to_an_axis_that_the_mesh_lacks():
    with pytest.raises(ValueError, match=r"'modle'.*data 4 x model 2.*'model'"):
        logical_to_mesh_axes(('foo',), [('foo', 'modle')], mesh={'data': 4, 'model': 2})
    with pytest.raises(ValueError, match="'expert'"):
        logical_to_mesh_axes(('foo',), [('foo', ('data', 'expert'))], mesh={'data': 4})


@pytest.mark.parametrize('shape', [(8,), (8, 8, 8), ()])
def test_names_and_shape_of_different_rank(shape):
    with pytest.raises(ValueError, match=rf'has 2 entries.* {len(shape)} dimension'):
        logical_to_mesh_axes(('foo', 'baz'), PRIORITIES, shape=shape)


@pytest.mark.parametrize('size, nearest', [(30, '28 or 32'), (5, '4 or 8'), (3, '4')])
def test_indivisible_size(size, nearest):
    with pytest.raises(
        ValueError, match=rf"'baz'.*{size} is not divisible by 4.*{nearest}"
    ) as error:
        logical_to_mesh_axes(
            ('foo', 'baz'), PRIORITIES, mesh={'data': 4, 'model': 2}, shape=(2, size)
        )
    assert "('baz', None)" in str(error.value)


@pytest.mark.parametrize('axes_as_names', [True, False])
def test_a_list_of_mesh_axes_is_not_a_name(axes_as_names):
    with pytest.raises(ValueError, match=r"\['x'\] in logical axes .* must be a name, a tuple"):
        resolve_axes(
            (['x'], 'a'), [('a', None)], mesh={'x': 2}, shape=(4, 4), axes_as_names=axes_as_names
        )


# Reasons.


def test_reasons():
    rules = [('mlp', 'model'), ('embed', 'model'), ('embed', 'data'), ('embed', None)]
    embed, mlp, bare, kv = resolve_axes(
        ('embed', 'mlp', None, 'kv'), rules, on_unmatched='replicate'
    )
    assert (mlp.name, mlp.mesh_axes, mlp.rule, mlp.lost) == ('mlp', 'model', ('mlp', 'model'), ())
    assert (embed.mesh_axes, embed.rule) == ('data', ('embed', 'data'))
    (taken_rule, taken), (late_rule, late) = embed.lost
    assert taken_rule == ('embed', 'model') and "'model'" in taken and "'mlp'" in taken
    assert late_rule == ('embed', None) and 'shadowed' in late
    assert bare.mesh_axes is None and 'no logical name' in bare.reason
    assert kv.mesh_axes is None and kv.rule is None and kv.reason == 'no rule'


def test_reason_where_every_rule_lost():
    _, b = resolve_axes(('a', 'b'), [('a', ('x', 'y')), ('b', 'y'), ('b', 'x')])
    assert b.mesh_axes is None and b.rule is None
    assert [rule for rule, _ in b.lost] == [('b', 'y'), ('b', 'x')]
    assert all("'a'" in why for _, why in b.lost)
    assert "'y'" in b.reason


def test_reason_of_an_axis_of_size_one():
    """The rule wins, but the dimension is whole on every device."""
    (dim,) = resolve_axes(('a',), [('a', 'x')], mesh={'x': 1}, shape=(6,))
    assert dim.mesh_axes == 'x' and 'size 1' in dim.reason


# AxisNames.


def test_partitioner_takes_lists_as_gin_writes_them():
    partitioner = PjitPartitioner(
        num_partitions=2, logical_axis_rules=[['batch', ['data', 'model']]]
    )
    assert partitioner.logical_axis_rules == (('batch', ('data', 'model')),)
    assert partitioner.data_partition_spec == P(('data', 'model'))
