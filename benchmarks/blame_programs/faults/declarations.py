"""Faults of what a program declares: names of parameters, results, and what it keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.blame_programs.faults.fault import FILES, ROOT, Fault, edit

_LINEN = FILES['linen_trainer']


def name_faults(program: str, box: str) -> Iterator[Fault]:
    """Yields parameters whose names are missing or swapped; `box` makes initializers with names."""
    for line in (ROOT / FILES[program]).read_text().splitlines():
        found = re.search(rf"\b{box}\(('\w+'(?:, '\w+')+)\)", line)
        if not found:
            continue
        names = found[1].split(', ')
        path = re.search(r"param\('(\w+)'", line)
        assert path is not None
        for kind, new in (
            ('unnamed parameter', ['None'] * len(names)),
            ('swapped names', names[::-1]),
        ):
            text = line.replace(found[1], ', '.join(new))
            fault = edit(program, FILES[program], kind, path[1], f'{line}\n', f'{text}\n')
            yield fault | {'layout': {path[1]: None}}


def result_faults() -> Iterator[Fault]:
    """Yields steps that return something large, which the partitioner replicates."""
    old = '    return new, value\n'
    for place, text in (
        ('gradient', "gradient['layers']['up']"),
        ('updates', "updates['layers']['down']"),
        ('logits', "MODEL.apply({'params': state.params}, batch['inputs'])"),
    ):
        new = old.replace('return new, value', f'return new, (value, {text})')
        yield edit('linen_trainer', _LINEN, 'whole result', place, old, new, suggested=True)


def kept_activations() -> Iterator[Fault]:
    """Yields layers whose activations are kept for the backward pass."""
    for program, place, line, without in (
        ('linen_trainer', 'remat', '            nn.remat(Layer),\n', '            Layer,\n'),
        (
            'plain_trainer',
            'checkpoint',
            '    x, _ = jax.lax.scan(jax.checkpoint(layer), x, scanned)\n',
            '    x, _ = jax.lax.scan(layer, x, scanned)\n',
        ),
    ):
        kind = 'nothing is recomputed'
        yield edit(program, FILES[program], kind, place, line, without, suggested=True)


def rules_and_constraints() -> Iterator[Fault]:
    """Yields a dropped rule together with a constraint elsewhere that forgets all dimensions."""
    result = "        return constrain(x_BLD + out_BLD, ('batch', 'length', 'embed')), None\n"
    lookup = "        x_BLD = constrain(table[tokens_BL], ('batch', 'length', 'embed'))\n"
    for name in ('vocab', 'mlp'):
        for line in (result, lookup):
            place = f'{name} None, {line.strip()[:40]}'
            new = line.replace("('batch', 'length', 'embed')", '(None, None, None)')
            fault = edit('linen_trainer', _LINEN, 'rule and constraint', place, line, new)
            yield fault | {'rules': {name: None}}
