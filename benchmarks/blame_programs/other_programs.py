"""Faults for seed 5: those that users make most, in three programs that no other seed has.

The programs are a classifier of images with flax's own constraints, an encoder and a decoder with
the names of T5, and layers of experts in plain jax on mesh axes with other names.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.blame_programs.fault_kinds import (
    ROOT,
    Fault,
    constraints_of,
    edit,
    layout_fault,
    rules_fault,
)
from benchmarks.blame_programs.faults import name_faults

_FILES = {
    name: f'benchmarks/blame_programs/{name}.py'
    for name in ('vision_trainer', 'translation_trainer', 'experts_trainer')
}
# What takes the place of the sum over a one-hot array, and of the sum over all outputs.
_FOUND = {
    'vision_trainer': ('logits_BC', "batch['labels']", 'jnp.sum(logits_BC * hot_BC, axis=-1)'),
    'translation_trainer': (
        'logits_BLV',
        "jnp.roll(batch['targets'], -1, axis=1)",
        'jnp.sum(logits_BLV * hot_BLV, axis=-1)',
    ),
    'experts_trainer': ('logits', "batch['targets']", 'jnp.sum(logits * hot, axis=-1)'),
}
_MADE = (
    ('sort', 'jax.nn.logsumexp(jnp.sort({}, axis=-1), axis=-1)'),
    ('flip', 'jax.nn.logsumexp(jnp.flip({}, axis=-1), axis=-1)'),
    ('top_k', 'jax.nn.logsumexp(jax.lax.top_k({}, 128)[0], axis=-1)'),
)


def other_programs() -> Iterator[Fault]:
    """Yields every fault that seed 5 draws from."""
    yield from _rules('vision_trainer', ('classes', 'mlp', 'heads'))
    yield from _rules('translation_trainer', ('vocab', 'mlp', 'joined_kv'))
    yield from _layouts()
    for program in _FILES:
        yield from _constraints(program)
        yield from _loss(program)
    yield from name_faults('vision_trainer', _FILES['vision_trainer'], 'box')
    yield from name_faults('translation_trainer', _FILES['translation_trainer'], 'boxed')


def _rules(program: str, names: tuple[str, ...]) -> Iterator[Fault]:
    for name in ('batch', 'embed', *names):
        yield rules_fault(program, 'dropped rule', {name: None})
    for name in names:
        yield rules_fault(program, 'swapped axes', {name: 'data', 'embed': 'model'})
        yield rules_fault(program, 'wrong axis', {name: 'data'})
    for name in names[1:]:
        yield rules_fault(program, 'two dropped rules', {names[0]: None, name: None})
    yield rules_fault(program, 'wrong axis', {'batch': 'model'})


def _layouts() -> Iterator[Fault]:
    program = 'experts_trainer'
    ranks = {'table': 2, 'unembed': 2, 'query': 4, 'merge': 4, 'grow': 4, 'shrink': 4}
    for name, rank in ranks.items():
        whole = [None] * rank
        yield layout_fault('dropped rule', {name: whole}, program)
        yield layout_fault('unsharded optimizer', {f'second/{name}': whole}, program)
    for kind, name, axes in (
        ('swapped axes', 'table', ('dp', 'tp')),
        ('swapped axes', 'unembed', ('tp', 'dp')),
        ('swapped axes', 'grow', (None, 'dp', 'tp', None)),
        ('swapped axes', 'shrink', (None, 'dp', None, 'tp')),
        ('wrong axis', 'query', (None, 'dp', None, 'tp')),
        ('wrong axis', 'grow', (None, None, 'dp', 'tp')),
        ('wrong axis', 'merge', (None, None, 'tp', 'dp')),
        ('wrong axis', 'batch', ('tp', None)),
        ('dropped rule', 'batch', (None, None)),
    ):
        yield layout_fault(kind, {name: axes}, program)


def _constraints(program: str) -> Iterator[Fault]:
    """Constraints that are missing, or that forget one or all dimensions."""
    text = (ROOT / _FILES[program]).read_text()
    for found in constraints_of(_FILES[program]):
        if text.count(f'{found.line}\n') > 1:
            continue
        missing = found.line.replace(found.call, found.value)
        place = f'{found.line.strip()[:60]} -> {found.value[-40:]}'
        old, new = f'{found.line}\n', f'{missing}\n'
        yield edit(program, _FILES[program], 'missing constraint', place, old, new)
        for rows in ("'batch'", "'dp'"):
            if rows in found.entries:
                forgotten = ['None' if e == rows else e for e in found.entries]
                yield found.relaid(program, _FILES[program], 'wrong constraint', forgotten)
        if set(found.entries) - {"'batch'", "'dp'", "'length'", 'None'}:
            whole = ['None'] * len(found.entries)
            yield found.relaid(program, _FILES[program], 'constraint of nothing', whole)


def _loss(program: str) -> Iterator[Fault]:
    """Operations in the loss that need all outputs of a row on one device."""
    file = _FILES[program]
    logits, targets, found = _FOUND[program]
    taken = f'jnp.take_along_axis({logits}, {targets}[..., None], axis=-1)[..., 0]'
    flat = (
        f'{logits}.reshape(-1)[jnp.arange({targets}.size) * {logits}.shape[-1] + '
        f'{targets}.reshape(-1)].reshape({targets}.shape)'
    )
    for place, text in (('take_along_axis', taken), ('flat index', flat)):
        yield edit(program, file, 'gather in the loss', place, found, text, suggested=True)
    whole = f'jax.nn.logsumexp({logits}, axis=-1)'
    for place, form in _MADE:
        text = form.format(logits)
        yield edit(program, file, 'all outputs in the loss', place, whole, text, suggested=True)
