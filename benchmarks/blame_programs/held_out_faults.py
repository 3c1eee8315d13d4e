"""Faults of other kinds, written after the code that explains them, for figures that are blind."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.blame_programs.faults import LINEN, PLAIN, ROOT, Fault

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
        place = ', '.join(f'{name} {axes}' for name, axes in rules.items())
        yield {'program': program, 'kind': kind, 'place': place, 'rules': rules}


def _layouts() -> Iterator[Fault]:
    """Parameters over the axis of the batch in place of the other one."""
    for name, axes in (
        ('embedding', ('data', None)),
        ('out', (None, 'data', None)),
        ('qkv', (None, None, None, 'data', None)),
        ('up', (None, 'data', None)),
        ('down', (None, None, 'data')),
    ):
        yield {
            'program': 'plain_trainer',
            'kind': 'axis of the batch',
            'place': f'{name} {axes}',
            'layout': {name: list(axes)},
        }


def _constraints(program: str, file: str) -> Iterator[Fault]:
    """Constraints that forget the axis of a model, or shard another dimension over the rows'."""
    for line in (ROOT / file).read_text().splitlines():
        found = re.search(r'\b(?:constrain|lay_out)\(.*, (\(.*?\)|P\(.*?\))\)', line)
        if not found or 'import' in line:
            continue
        names = found[1]
        entries = re.findall(r"'\w+'|None", names)
        opening = names[: names.index('(') + 1]
        rows = next((n for n, entry in enumerate(entries) if entry in _OF_ROWS), 0)
        swapped = list(entries)
        swapped[rows : rows + 2] = swapped[rows : rows + 2][::-1]
        for kind, new in (
            ('forgotten axis of a model', [e if e not in _OF_MODEL else 'None' for e in entries]),
            ('rows on another dimension', swapped),
        ):
            if new == entries:
                continue
            written = f'{opening}{", ".join(new)})'
            yield {
                'program': program,
                'kind': kind,
                'place': f'{line.strip()[:60]} -> {written}',
                'file': file,
                'old': f'{line}\n',
                'new': f'{line.replace(names, written)}\n',
            }


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
            yield {
                'program': program,
                'kind': 'whole vocabulary in the loss',
                'place': place,
                'file': file,
                'old': old,
                'new': f'    {name} = {text}\n',
                'suggested': old,
            }
