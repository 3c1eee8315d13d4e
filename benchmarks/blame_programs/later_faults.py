"""Faults for seed 3, written after the search for suggestions, for figures that are blind again.

The kinds are others than those of `faults` and `held_out_faults`: layouts and constraints over too
many axes, or with two axes that have changed places, operations inside of the layers, activations
that nobody recomputes, and two faults of different kinds at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.blame_programs.fault_kinds import (
    LINEN,
    PLAIN,
    Fault,
    constraints_of,
    edit,
    layout_fault,
    rules_fault,
)
from benchmarks.blame_programs.held_out_faults import held_out_faults

_SEED_2 = Path(__file__).parents[1] / 'results' / 'blame' / 'seed_2.json'


def later_faults() -> Iterator[Fault]:
    """Yields the held-out faults that seed 2 has not drawn, and those of new kinds."""
    drawn = json.loads(_SEED_2.read_text())
    for fault in held_out_faults():
        if f'{fault["program"]}: {fault["kind"]}: {fault["place"]}' not in drawn:
            yield fault
    for program in ('linen_trainer', 'our_transformer'):
        yield from _rules(program)
    yield from _layouts()
    yield from _constraints('linen_trainer', LINEN)
    yield from _constraints('plain_trainer', PLAIN)
    yield from _operations()
    yield from _kept_activations()
    yield from _rules_and_lines()


def _rules(program: str) -> Iterator[Fault]:
    for kind, rules in (
        ('two faulty rules', {'heads': None, 'vocab': None}),
        ('two faulty rules', {'embed': None, 'mlp': None}),
        ('two faulty rules', {'mlp': 'data', 'vocab': 'data'}),
        ('two faulty rules', {'heads': 'data', 'mlp': None}),
        ('two faulty rules', {'length': 'model', 'vocab': None}),
        ('more axes than needed', {'heads': ['data', 'model']}),
        ('more axes than needed', {'embed': ['data', 'model']}),
        ('more axes than needed', {'batch': ['model', 'data']}),
        ('needless rule, others whole', {'length': 'data', 'batch': None}),
        ('needless rule, others whole', {'kv': 'model', 'mlp': None}),
    ):
        yield rules_fault(program, kind, rules)


def _layouts() -> Iterator[Fault]:
    both = ['data', 'model']
    for kind, layout in (
        ('parameter over both axes', {'embedding': [both, None]}),
        ('parameter over both axes', {'head': [None, both]}),
        ('parameter over both axes', {'up': [None, None, both]}),
        ('parameter over both axes', {'down': [None, both, None]}),
        ('two wrong layouts', {'up': [None, None, None], 'down': [None, None, None]}),
        ('two wrong layouts', {'qkv': [None] * 5, 'head': [None, None]}),
        ('two wrong layouts', {'out': [None, None, 'model'], 'head': ['model', None]}),
        ('two wrong layouts', {'embedding': [None, 'model'], 'up': [None, 'model', None]}),
        ('batch over other dimensions', {'batch': [None, 'data']}),
        ('batch over other dimensions', {'batch': [both, None]}),
        ('batch over other dimensions', {'batch': [None, 'model']}),
    ):
        yield layout_fault(kind, layout)


def _constraints(program: str, file: str) -> Iterator[Fault]:
    """Constraints that also shard the length, or whose two mesh axes have changed places."""
    for found in constraints_of(file):
        new = list(found.entries)
        used = [n for n, e in enumerate(new) if e in ("'mlp'", "'heads'", "'vocab'", "'model'")]
        rows = next(n for n, e in enumerate(new) if e in ("'batch'", "'data'"))
        if used:
            kind = "two axes of a constraint in each other's place"
            new[rows], new[used[0]] = new[used[0]], new[rows]
        else:
            kind = 'constraint that also shards the length'
            new[rows + 1] = "'mlp'" if file == LINEN else "'model'"
        yield found.relaid(program, file, kind, new)


def _operations() -> Iterator[Fault]:
    """Operations in the layers or in the loss that need a sharded dimension whole."""
    hidden = "        hidden_BLF = constrain(jax.nn.gelu(x_BLD @ up), ('batch', 'length', 'mlp'))\n"
    weights = '        weights = jax.nn.softmax(scores)\n'
    for place, old, new in (
        (
            'flip of the hidden layer',
            hidden,
            hidden.replace('x_BLD @ up', '(x_BLD @ up)[..., ::-1]'),
        ),
        ('sort of the hidden layer', hidden, hidden.replace('x_BLD @ up', 'jnp.sort(x_BLD @ up)')),
        (
            'cumsum over rows',
            hidden,
            hidden.replace('x_BLD @ up', 'jnp.cumsum(x_BLD, axis=0) @ up'),
        ),
        ('roll over heads', weights, weights.replace('scores)', 'jnp.roll(scores, 1, axis=1))')),
    ):
        yield edit('linen_trainer', LINEN, 'operation in a layer', place, old, new, suggested=True)
    hidden = "    hidden = lay_out(jax.nn.relu(x @ w['up']), P('data', None, 'model'))\n"
    for place, text in (
        ('roll over rows', "jnp.roll(x, 1, axis=0) @ w['up']"),
        ('flip of the hidden layer', "jnp.flip(x @ w['up'], -1)"),
        ('cumulative maximum', "jax.lax.cummax(x @ w['up'], axis=2)"),
        (
            'flattened',
            "jnp.roll((x @ w['up']).reshape(x.shape[0], -1), 1, -1).reshape(*x.shape[:2], -1)",
        ),
    ):
        new = hidden.replace("x @ w['up']", text)
        yield edit(
            'plain_trainer', PLAIN, 'operation in a layer', place, hidden, new, suggested=True
        )
    for program, file, logits, name in (
        ('linen_trainer', LINEN, 'logits_BLV', 'log_z_BL'),
        ('plain_trainer', PLAIN, 'logits', 'log_z'),
    ):
        old = f'    {name} = jax.nn.logsumexp({logits}, axis=-1)\n'
        for place, text in (
            ('median', f'jax.nn.logsumexp({logits}, axis=-1) + 0 * jnp.median({logits}, axis=-1)'),
            ('diff', f'jax.nn.logsumexp(jnp.diff({logits}, axis=-1), axis=-1)'),
            ('joined', f'jax.nn.logsumexp(jnp.concatenate([{logits}, -{logits}], -1), axis=-1)'),
            ('over rows', f'jax.nn.logsumexp(jnp.sort({logits}, axis=0), axis=-1)'),
        ):
            new = f'    {name} = {text}\n'
            kind = 'other operation in the loss'
            yield edit(program, file, kind, place, old, new, suggested=True)


def _kept_activations() -> Iterator[Fault]:
    """Layers whose activations are kept for the backward pass."""
    kind = 'nothing is recomputed'
    old = '            nn.remat(Layer),\n'
    new = old.replace('nn.remat(Layer)', 'Layer')
    yield edit('linen_trainer', LINEN, kind, 'remat', old, new, suggested=True)
    old = '    x, _ = jax.lax.scan(jax.checkpoint(layer), x, scanned)\n'
    new = old.replace('jax.checkpoint(layer)', 'layer')
    yield edit('plain_trainer', PLAIN, kind, 'checkpoint', old, new, suggested=True)


def _rules_and_lines() -> Iterator[Fault]:
    """A dropped rule, and a constraint elsewhere that forgets all dimensions."""
    old = "        return constrain(x_BLD + out_BLD, ('batch', 'length', 'embed')), None\n"
    other = "        x_BLD = constrain(table[tokens_BL], ('batch', 'length', 'embed'))\n"
    for name in ('vocab', 'mlp'):
        for line in (old, other):
            place = f'{name} None, {line.strip()[:40]}'
            new = line.replace("('batch', 'length', 'embed')", '(None, None, None)')
            fault = edit('linen_trainer', LINEN, 'rule and constraint', place, line, new)
            yield fault | {'rules': {name: None}}
