"""fsdp_logical_axis_rules gives the layouts of FSDP and ZeRO in tables written by hand."""

import pytest
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisRules,
    fsdp_logical_axis_rules,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
)

pytestmark = pytest.mark.core

DATA4_MODEL2 = {'data': 4, 'model': 2}
STANDARD = standard_logical_axis_rules()
WITH_FSDP = standard_logical_axis_rules(mesh_axes=('data', 'fsdp', 'model'))
BOTH = ('data', 'fsdp')
FSDP = {
    'standard': fsdp_logical_axis_rules(STANDARD),
    'backwards': fsdp_logical_axis_rules(STANDARD[::-1]),
    'activations in two dimensions': fsdp_logical_axis_rules(standard_logical_axis_rules(2, 1)),
    'two axes': fsdp_logical_axis_rules(WITH_FSDP, BOTH),
    'one of two': fsdp_logical_axis_rules(WITH_FSDP, 'fsdp'),
    'embed, kv': fsdp_logical_axis_rules(STANDARD, names=['embed', 'kv']),
    'kv, embed': fsdp_logical_axis_rules(STANDARD, names=('kv', 'embed')),
}


@pytest.mark.parametrize(
    'rules, names, expected',
    [
        ('standard', ('vocab', 'embed'), P('model', 'data')),
        ('standard', ('layers', 'embed', 'mlp'), P(None, 'data', 'model')),
        ('standard', ('embed',), P('data')),
        ('standard', ('mlp',), P('model')),
        # The batch of activations stays on the data axes, wherever its rule is in the list.
        ('standard', ('batch', 'length', 'embed'), P('data', None, None)),
        ('standard', ('batch', 'length', 'mlp'), P('data', None, 'model')),
        ('backwards', ('embed', 'batch'), P(None, 'data')),
        ('backwards', ('embed', 'mlp'), P('data', 'model')),
        ('activations in two dimensions', ('batch', 'length', 'embed'), P('data', None, 'model')),
        ('activations in two dimensions', ('embed', 'mlp'), P('data', 'model')),
        ('two axes', ('embed', 'mlp'), P(BOTH, 'model')),
        ('two axes', ('batch', 'embed'), P(BOTH, None)),
        ('one of two', ('embed', 'mlp'), P('fsdp', 'model')),
        ('one of two', ('batch', 'embed'), P(BOTH, None)),
        # The first of the given names that an array has gets the axes.
        ('embed, kv', ('heads', 'kv', 'embed'), P('model', None, 'data')),
        ('kv, embed', ('heads', 'kv', 'embed'), P('model', 'data', None)),
        ('embed, kv', ('heads', 'kv'), P('model', 'data')),
    ],
)
def test_fsdp_rules(rules, names, expected):
    assert logical_to_mesh_axes(names, FSDP[rules]) == expected


def test_fsdp_rules_keep_the_policies_of_the_given_rules():
    rules = fsdp_logical_axis_rules(AxisRules(STANDARD, 'replicate', 'drop_axis'))
    spec = logical_to_mesh_axes(('embed', 'new'), rules, mesh=DATA4_MODEL2, shape=(6, 7))
    assert spec == P(None, None)


@pytest.mark.parametrize(
    'arguments',
    [
        *({'names': names} for names in ('embed', (), (None,))),
        *({'axes': axes} for axes in ((), None, ('data', 'data'), 3)),
        *({'rules': rules} for rules in (None, [('embed',)])),
    ],
    ids=str,
)
def test_bad_arguments_of_fsdp_rules(arguments):
    with pytest.raises(ValueError, match=r'names=|rule|axis twice'):
        fsdp_logical_axis_rules(**{'rules': STANDARD, **arguments})
