"""Variants of T5X's rules for transformers: for meshes with other axes, and for FSDP."""

import itertools

import pytest
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisRules,
    fsdp_logical_axis_rules,
    logical_to_mesh_axes,
    standard_logical_axis_rules,
)

pytestmark = pytest.mark.core


# Rules for the axes of a mesh.


def rules_of(*mesh_axes, **dims):
    return standard_logical_axis_rules(mesh_axes=mesh_axes, **dims)


@pytest.mark.parametrize(
    'mesh_axes, batch',
    [
        (('data',), 'data'),
        (('fsdp', 'model'), 'fsdp'),
        (('replica', 'data', 'model'), ('replica', 'data')),
        (('data', 'fsdp', 'model'), ('data', 'fsdp')),
        (('data', 'expert', 'model'), ('data', 'expert')),
        (('expert', 'fsdp', 'data', 'replica'), ('replica', 'data', 'fsdp', 'expert')),
        (('data', 'sequence', 'stage', 'model'), 'data'),
        (('model',), None),
        ((), None),
    ],
)
def test_the_batch_is_sharded_over_all_data_axes(mesh_axes, batch):
    """The order of the axes does not depend on the mesh."""
    assert rules_of(*mesh_axes)[0] == ('batch', batch)


@pytest.mark.parametrize('axis', ['fsdp', 'sequence', 'stage', 'expert', 'replica'])
def test_no_rule_names_an_axis_that_the_mesh_lacks(axis):
    for mesh_axes in ((axis,), ('data', axis), (axis, 'model')):
        for dims in itertools.product((1, 2), repeat=2):
            lacks = [a for a, d in zip(('model', 'data'), dims, strict=True) if d == 2]
            if not set(lacks) <= set(mesh_axes):
                with pytest.raises(ValueError, match='partitioning_dims=2 shards over'):
                    standard_logical_axis_rules(*dims, mesh_axes=mesh_axes)
                continue
            rules = standard_logical_axis_rules(*dims, mesh_axes=mesh_axes)
            named = {
                a for _, axes in rules for a in ([axes] if isinstance(axes, str) else axes or [])
            }
            assert named <= set(mesh_axes)
            sizes = dict.fromkeys(mesh_axes, 2)
            for names in itertools.permutations(('batch', 'length', 'embed', 'mlp'), 3):
                logical_to_mesh_axes(names, rules, mesh=sizes, shape=(4, 4, 4))


ALL = ('data', 'fsdp', 'sequence', 'expert', 'stage', 'model')


@pytest.mark.parametrize(
    'mesh_axes, dims, names, expected',
    [
        (
            ALL,
            (1, 1),
            ('batch', 'length', 'embed'),
            P(('data', 'fsdp', 'expert'), 'sequence', None),
        ),
        (ALL, (1, 1), ('embed', 'mlp'), P('fsdp', 'model')),
        (ALL, (1, 1), ('stage', 'embed', 'heads', 'kv'), P('stage', 'fsdp', 'model', None)),
        (ALL, (1, 1), ('expert', 'embed', 'expert_mlp'), P('expert', 'fsdp', 'model')),
        (ALL, (1, 1), ('expert_group', 'expert_replicas'), P(None, ('data', 'fsdp'))),
        (
            ('replica', 'data', 'expert', 'model'),
            (1, 1),
            ('expert_replicas', 'expert', 'unmodeled'),
            P(('replica', 'data'), 'expert', None),
        ),
        (
            ('data', 'expert', 'model'),
            (1, 2),
            ('expert_replicas', 'expert', 'embed'),
            P('data', 'expert', None),  # not 'data' for 'embed', which would gather the tokens
        ),
        (('fsdp', 'model'), (1, 1), ('vocab', 'embed'), P('model', 'fsdp')),
        (('fsdp', 'model'), (1, 1), ('batch', 'length', 'embed'), P('fsdp', None, None)),
        (('data', 'fsdp', 'model'), (2, 1), ('batch', 'embed'), P(('data', 'fsdp'), 'model')),
        (('data', 'fsdp', 'model'), (1, 2), ('embed', 'mlp'), P('fsdp', 'model')),
        (('replica', 'data', 'model'), (1, 2), ('embed', 'mlp'), P('data', 'model')),
    ],
)
def test_layouts_on_more_axes(mesh_axes, dims, names, expected):
    rules = standard_logical_axis_rules(*dims, mesh_axes=mesh_axes)
    assert logical_to_mesh_axes(names, rules) == expected


# Axes that no rule uses.


@pytest.mark.parametrize(
    'axis, near',
    [('modle', 'model'), ('expart', 'expert'), ('sequences', 'sequence'), ('foo', None)],
)
def test_an_axis_that_no_rule_uses(axis, near):
    with pytest.raises(ValueError) as error:
        rules_of('data', axis)
    message = str(error.value)
    assert f'mesh axis {axis!r}' in message and f"('mlp', {axis!r})" in message
    assert message.endswith(f'Did you mean {near!r}?') == (near is not None)
    assert ('Did you mean' in message) == (near is not None)


@pytest.mark.parametrize('added', [('mlp', 'foo'), ('mlp', ('model', 'foo')), ('new', 'foo')])
def test_an_axis_that_an_added_rule_uses(added):
    rules = standard_logical_axis_rules(additional_rules=[added], mesh_axes=('data', 'foo'))
    assert rules[-1] == added
    with pytest.raises(ValueError, match="'foo'"):
        standard_logical_axis_rules(additional_rules=[('mlp', 'data')], mesh_axes=('data', 'foo'))


def test_rules_that_a_caller_appends_to_do_not_change_later_ones():
    standard_logical_axis_rules().append(('mine', 'model'))
    assert ('mine', 'model') not in standard_logical_axis_rules()


# FSDP and ZeRO, in tables written by hand.

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
