"""make_path_rules finds regular expressions that give each path its names, whatever the paths."""

import re

import pytest
from hypothesis import given, strategies as st

from partitioning.suggestion.path_patterns import make_path_rules

pytestmark = pytest.mark.core

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
