"""Faults of rules: logical axes on other mesh axes, or on none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.blame_programs.faults.fault import Fault, rules_fault

_BOTH = ['data', 'model']
Table = tuple[tuple[str, dict[str, Any]], ...]

_SET_1: Table = (
    *(('dropped rule', {name: None}) for name in ('batch', 'vocab', 'mlp', 'heads', 'embed')),
    *(('swapped axes', {name: 'data', 'embed': 'model'}) for name in ('vocab', 'mlp', 'heads')),
    *(('wrong axis', {name: 'data'}) for name in ('vocab', 'mlp', 'heads')),
    ('wrong axis', {'embed': 'model'}),
    ('wrong axis', {'batch': 'model'}),
    ('wrong axis', {'heads': None, 'kv': 'model'}),
    ('wrong axis', {'batch': _BOTH}),
)
_SET_2: Table = (
    ('two dropped rules', {'mlp': None, 'heads': None}),
    ('two dropped rules', {'vocab': None, 'embed': None}),
    ('two dropped rules', {'vocab': None, 'mlp': None}),
    ('rule of two axes', {'mlp': _BOTH}),
    ('rule of two axes', {'vocab': _BOTH}),
    ('needless rule', {'length': 'model'}),
    ('needless rule', {'kv': 'data', 'embed': None}),
)
_SET_3: Table = (
    ('two faulty rules', {'heads': None, 'vocab': None}),
    ('two faulty rules', {'embed': None, 'mlp': None}),
    ('two faulty rules', {'mlp': 'data', 'vocab': 'data'}),
    ('two faulty rules', {'heads': 'data', 'mlp': None}),
    ('two faulty rules', {'length': 'model', 'vocab': None}),
    ('more axes than needed', {'heads': _BOTH}),
    ('more axes than needed', {'embed': _BOTH}),
    ('more axes than needed', {'batch': _BOTH[::-1]}),
    ('needless rule, others whole', {'length': 'data', 'batch': None}),
    ('needless rule, others whole', {'kv': 'model', 'mlp': None}),
)
_SET_4: Table = (
    ('three dropped rules', {'mlp': None, 'heads': None, 'vocab': None}),
    ('three dropped rules', {'embed': None, 'heads': None, 'vocab': None}),
    ('three dropped rules', {'embed': None, 'mlp': None, 'heads': None}),
    ('layers over devices', {'layers': 'data', 'embed': None}),
    ('layers over devices', {'layers': 'model', 'mlp': None, 'heads': None}),
    ('layers over devices', {'layers': 'data'}),
    ('embed over the axis of models', {'embed': 'model', 'mlp': None, 'heads': None}),
    ('embed over the axis of models', {'embed': 'model', 'vocab': None}),
    ('a name of attention on another axis', {'kv': 'model', 'heads': None}),
    ('a name of attention on another axis', {'kv': 'data', 'heads': None}),
    ('a name of attention on another axis', {'heads': None, 'length': 'model'}),
    ('rows on both axes', {'batch': _BOTH, 'mlp': None}),
    ('rows on both axes', {'batch': _BOTH, 'vocab': None, 'heads': None}),
)


def rule_faults(number: int) -> Iterator[Fault]:
    """Yields the faults of rules in a set."""
    if number == 5:
        yield from _of_names('vision_trainer', ('classes', 'mlp', 'heads'))
        yield from _of_names('translation_trainer', ('vocab', 'mlp', 'joined_kv'))
        return
    for program in ('linen_trainer', 'our_transformer'):
        for kind, rules in (_SET_1, _SET_2, _SET_3, _SET_4)[number - 1]:
            yield rules_fault(program, kind, rules)


def _of_names(program: str, names: tuple[str, ...]) -> Iterator[Fault]:
    for name in ('batch', 'embed', *names):
        yield rules_fault(program, 'dropped rule', {name: None})
    for name in names:
        yield rules_fault(program, 'swapped axes', {name: 'data', 'embed': 'model'})
        yield rules_fault(program, 'wrong axis', {name: 'data'})
    for name in names[1:]:
        yield rules_fault(program, 'two dropped rules', {names[0]: None, name: None})
    yield rules_fault(program, 'wrong axis', {'batch': 'model'})
