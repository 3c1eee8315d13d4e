"""Which path rule takes which array, and regular expressions that give paths their names."""

import re

import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P
from unnamed_models import array, gpt2

from partitioning import (
    AxisRules,
    MeshConfig,
    PjitPartitioner,
    explain_rules,
    suggest_rules,
)
from partitioning.suggestion.suggested_rules import make_path_rules

pytestmark = pytest.mark.core

MODEL = {
    'up': {'kernel': array(64, 256), 'bias': array(256)},
    'down': {'kernel': array(256, 64), 'bias': array(64)},
}
KERNELS = [('up/kernel', ('embed', 'mlp')), ('down/kernel', ('mlp', 'embed'))]
COMPLETE = [*KERNELS, ('.*/bias', (None,))]


MESH = MeshConfig(axes={'data': 4, 'model': 2})


def taken(rules, state=MODEL):
    return [list(rule.arrays) for rule in explain_rules(state, rules).rules]


def test_the_first_match_takes_an_array():
    found = explain_rules(MODEL, [*COMPLETE[:1], ('.*/kernel', (None, None)), *COMPLETE[2:]])
    assert taken(COMPLETE) == [['up/kernel'], ['down/kernel'], ['down/bias', 'up/bias']]
    assert [list(rule.arrays) for rule in found.rules][:2] == [['up/kernel'], ['down/kernel']]
    assert found.rules[0].arrays == {'up/kernel': (64, 256)}
    assert found.is_complete


@pytest.mark.parametrize(
    'rules', [COMPLETE, COMPLETE[:2], [*COMPLETE, ('x', ())], [('.*', ('embed',))]]
)
def test_complete_rules_are_those_that_a_partitioner_accepts(rules):
    found = explain_rules({'params': MODEL}, rules)
    partitioner = PjitPartitioner(2, AxisRules(names=rules))
    if found.is_complete:
        partitioner.plan({'params': MODEL})
    else:
        with pytest.raises(ValueError, match=r'path rule|has 1 entry'):
            partitioner.plan({'params': MODEL})


def test_arrays_without_a_rule_are_listed():
    found = explain_rules(MODEL, KERNELS)
    assert found.untaken == {'down/bias': (64,), 'up/bias': (256,)}
    text = str(found)
    assert '4 arrays: 2 taken by 2 rules, 2 need a rule and have none' in text
    assert 'no rule takes 2 arrays' in text and 'up/bias' in text


def test_unused_rules_say_why():
    found = explain_rules(MODEL, [*COMPLETE, ('.*/up/kernal', (None, None)), ('up/bias', (None,))])
    misspelt, late = found.unused
    assert "Did you mean 'up/kernel'?" in misspelt.why_unused
    assert 'move it up' in late.why_unused and 'up/bias' in late.why_unused
    assert '2 rules without arrays' in str(found) and '.*/up/kernal' in str(found)
    assert '4 taken by 3 rules' in str(found)


def test_names_of_another_rank_are_listed():
    found = explain_rules(MODEL, [('.*', ('embed', 'mlp'))])
    assert found.misfits == {
        'down/bias': ((64,), ('embed', 'mlp')),
        'up/bias': ((256,), ('embed', 'mlp')),
    }
    assert not found.is_complete
    assert 'another number of names than dimensions: 2 arrays' in str(found)


def test_small_arrays_need_no_rule_and_large_ones_do():
    state = {'params': MODEL, 'stats': {'small': array(8), 'large': array(128, 64)}}
    found = explain_rules(state, COMPLETE)
    assert found.small == 1
    assert found.untaken == {'stats/large': (128, 64)}


def test_partition_rules_are_searched_for():
    rules = [('up/kernel', P('data', 'model')), ('kernel', P('model')), ('', P())]
    found = explain_rules(MODEL, rules)
    assert taken(rules) == [['up/kernel'], ['down/kernel'], ['down/bias', 'up/bias']]
    assert found.is_complete and "P('data', 'model')" in str(found)
    PjitPartitioner.from_partition_rules(rules, mesh=MESH).plan(MODEL)
    assert list(explain_rules(MODEL, [('bias', P('data', None))]).misfits) == [
        *('down/bias', 'up/bias')
    ]


def test_arrays_of_one_element_take_any_partition_rule():
    assert explain_rules(
        {'scale': array(1), 'step': array()}, [('.*', P('data', None))]
    ).is_complete


def test_malformed_rules_are_refused():
    with pytest.raises(ValueError, match='a partition rule must be'):
        explain_rules(MODEL, [('bias', P()), ('kernel', 8)])
    with pytest.raises(ValueError, match='a path rule must be'):
        explain_rules(MODEL, [('kernel', 'embed')])
    with pytest.raises(ValueError, match='path rules must be a list'):
        explain_rules(MODEL, 'kernel')


@pytest.mark.parametrize(
    'state, rules, said',
    [
        (lambda key: {}, [], r'the function <lambda> has no arrays: write .*eval_shape\(init, key'),
        ({'params': {}}, [], r"\{'params': \{\}\} has no arrays"),
        ({'w': np.ones((2, 2))}, AxisRules([('a', 'data')]), 'these AxisRules have no names'),
    ],
)
def test_neither_a_state_nor_path_rules(state, rules, said):
    with pytest.raises(ValueError, match=said):
        explain_rules(state, rules)


def test_the_names_of_axis_rules_are_path_rules():
    state, names = {'w': np.ones((2, 2))}, [('w', ('embed', None))]
    assert explain_rules(state, AxisRules(names=names)) == explain_rules(state, names)
    assert explain_rules(state, AxisRules(names=names)).is_complete


def test_the_table_fits_a_terminal():
    deep = {'a_long_name_of_a_module': {'another_long_name_of_a_module': gpt2()}}
    rules = [*suggest_rules(deep), ('nothing', (None,))]
    text = str(explain_rules(deep, rules))
    assert max(map(len, text.splitlines())) <= 100
    assert '2304 x 768' in text and '...' in text


# Regular expressions that give each path its names, whatever the paths.

KEYS = st.sampled_from(
    ['h', '0', '1', '12', 'a', 'b_0', 'b_1', 'c2d3', 'c2d4', 'kernel', 'bias', 'w', '~', 'x.y']
)
PATHS = st.lists(KEYS, min_size=1, max_size=5).map('/'.join)
NAMES = st.sampled_from([None, (None,), (None, None), ('embed', 'mlp'), ('mlp', 'embed')])


@given(st.dictionaries(PATHS, NAMES, max_size=30))
def test_the_first_rule_that_matches_gives_the_names(wanted):
    rules = make_path_rules(wanted, [(None,), (None, None)])
    used = set()
    for path, names in wanted.items():
        found = next((i for i, (p, _) in enumerate(rules) if re.fullmatch(p, path)), None)
        used.add(found)
        assert (None if found is None else rules[found][1]) == names
    assert used >= {*range(len(rules))}


LAYERS = {f'h{i}_attn/{k}/w': (k,) for i in range(12) for k in ('q', 'linear')}
LAYERS |= {f'h{i}_mlp/{k}/w': (k, k) for i in range(12) for k in ('linear', 'linear_1')}


@pytest.mark.parametrize(
    'wanted, rules',
    [
        ({'a/kernel': (1,), 'b/kernel': (2,)}, [('a/kernel', (1,)), ('b/kernel', (2,))]),
        ({'a/x/kernel': (1,), 'a/y/kernel': (1,)}, [('.*/kernel', (1,))]),
        ({'kernel': (1,), 'a/kernel': (1,)}, [('(.*/)?kernel', (1,))]),
        (
            {f'l_{i}/{k}': (k,) for i in range(3) for k in 'ab'},
            [('.*/a', ('a',)), ('.*/b', ('b',))],
        ),
        # Numbers are general where all numbers agree.
        (
            LAYERS,
            [
                ('.*/q/w', ('q',)),
                (r'h\d+_attn/linear/w', ('linear',)),
                (r'h\d+_mlp/linear/w', ('linear', 'linear')),
                ('.*/linear_1/w', ('linear_1', 'linear_1')),
            ],
        ),
        (
            {'l/0/w': (0,), 'l/1/w': (1,), 'l/2/w': (0,)},
            [('l/(0|2)/w', (0,)), ('l/1/w', (1,))],
        ),
        # An array without a rule is not matched.
        ({'a/w': (1,), 'b/w': None}, [('a/w', (1,))]),
        # Many different keys get a general rule, after the exceptions.
        (
            {f'{k}/bias': (None,) for k in 'abcde'} | {'head/bias': ('vocab',)},
            [('head/bias', ('vocab',)), ('.*/bias', (None,))],
        ),
        # Rules that differ in one place become one.
        (
            {
                **{f'a/{k}/w': (1,) for k in 'qkv'},
                **{f'b/{k}/w': (2,) for k in 'qkv'},
                'a/o/w': (3,),
                'b/o/w': (3,),
            },
            [('a/(q|k|v)/w', (1,)), ('b/(q|k|v)/w', (2,)), ('.*/o/w', (3,))],
        ),
        # PyTorch's names are single keys.
        (
            {'layers.0.q.w': (1,), 'layers.1.q.w': (1,), 'layers.0.o.w': (2,)},
            [(r'.*\.q\.w', (1,)), (r'.*\.o\.w', (2,))],
        ),
        ({}, []),
    ],
)
def test_examples(wanted, rules):
    assert make_path_rules(wanted, [(None,)]) == rules


def test_long_alternatives_are_divided():
    wanted = {f'{name}/w': (1,) for name in ('a' * 30, 'b' * 30)} | {'c/w': (2,)}
    assert [pattern for pattern, _ in make_path_rules(wanted)] == [
        *('a' * 30 + '/w', 'b' * 30 + '/w', 'c/w')
    ]
