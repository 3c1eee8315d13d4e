"""Faults of other kinds, written after the code that explains them, for figures that are blind."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.blame_programs.fault_kinds import (
    LINEN,
    PLAIN,
    Fault,
    constraints_of,
    edit,
    layout_fault,
    rules_fault,
)

_OF_MODEL = ("'mlp'", "'heads'", "'vocab'", "'model'")
_OF_ROWS = ("'batch'", "'data'")


def held_out_faults() -> Iterator[Fault]:
    """Yields every fault that seeds from 2 on draw from."""
    for program in ('linen_trainer', 'our_transformer'):
        yield from _rules(program)
    yield from _layouts()
    yield from _constraints('linen_trainer', LINEN)
    yield from _constraints('plain_trainer', PLAIN)
    yield from _losses()


def _rules(program: str) -> Iterator[Fault]:
    """Two rules that are dropped, rules of two axes, and rules for what should stay whole."""
    for kind, rules in (
        ('two dropped rules', {'mlp': None, 'heads': None}),
        ('two dropped rules', {'vocab': None, 'embed': None}),
        ('two dropped rules', {'vocab': None, 'mlp': None}),
        ('rule of two axes', {'mlp': ['data', 'model']}),
        ('rule of two axes', {'vocab': ['data', 'model']}),
        ('needless rule', {'length': 'model'}),
        ('needless rule', {'kv': 'data', 'embed': None}),
    ):
        yield rules_fault(program, kind, rules)


def _layouts() -> Iterator[Fault]:
    """Parameters over the axis of the batch in place of the other one."""
    for name, axes in (
        ('embedding', ('data', None)),
        ('out', (None, 'data', None)),
        ('qkv', (None, None, None, 'data', None)),
        ('up', (None, 'data', None)),
        ('down', (None, None, 'data')),
    ):
        yield layout_fault('axis of the batch', {name: axes})


def _constraints(program: str, file: str) -> Iterator[Fault]:
    """Constraints that forget the axis of a model, or shard another dimension over the rows'."""
    for found in constraints_of(file):
        entries = found.entries
        rows = next((n for n, entry in enumerate(entries) if entry in _OF_ROWS), 0)
        swapped = list(entries)
        swapped[rows : rows + 2] = swapped[rows : rows + 2][::-1]
        for kind, new in (
            ('forgotten axis of a model', [e if e not in _OF_MODEL else 'None' for e in entries]),
            ('rows on another dimension', swapped),
        ):
            if new != entries:
                yield found.relaid(program, file, kind, new)


def _losses() -> Iterator[Fault]:
    """Operations in the loss that need the whole vocabulary."""
    for program, file, logits, name in (
        ('linen_trainer', LINEN, 'logits_BLV', 'log_z_BL'),
        ('plain_trainer', PLAIN, 'logits', 'log_z'),
    ):
        old = f'    {name} = jax.nn.logsumexp({logits}, axis=-1)\n'
        for place, text in (
            ('argsort', f'jnp.take_along_axis({logits}, jnp.argsort({logits}), -1).sum(-1)'),
            ('pad', f'jax.nn.logsumexp(jnp.pad({logits}, ((0, 0), (0, 0), (1, 0))), axis=-1)'),
            ('cumlogsumexp', f'jax.lax.cumlogsumexp({logits}, axis=2)[..., -1]'),
            ('reshape', f'jax.nn.logsumexp({logits}.reshape({logits}.shape[0], -1), -1)[:, None]'),
        ):
            new = f'    {name} = {text}\n'
            kind = 'whole vocabulary in the loss'
            yield edit(program, file, kind, place, old, new, suggested=True)
