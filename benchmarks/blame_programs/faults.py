"""The faults that `benchmarks/blame.py` seeds: changes of a rule, of a layout, or of a line."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.blame_programs.fault_kinds import (
    LINEN,
    PLAIN,
    ROOT,
    Constraint,
    Fault,
    constraints_of,
    edit,
    layout_fault,
    rules_fault,
)

DEVELOPMENT = 0.4  # the share of the faults that the code was written with


def draw_faults(seed: int, faults: Iterable[Fault] | None = None) -> Iterator[Fault]:
    """Yields faults in a random order, in which programs and kinds take turns.

    Seed 0 has two fifths of all faults, and seed 1 has the rest: what the code was written with
    is never part of its figures. Other seeds draw from the faults that they are given.
    """
    piles: dict[tuple[str, str], list[Fault]] = {}
    for fault in all_faults() if faults is None else faults:
        piles.setdefault((fault['program'], fault['kind']), []).append(fault)
    generator = random.Random(seed)
    for key, pile in piles.items():
        random.Random(0).shuffle(pile)
        cut = round(len(pile) * DEVELOPMENT)
        if faults is None:
            piles[key] = pile[:cut] if seed == 0 else pile[cut:]
        generator.shuffle(piles[key])
    order = sorted(piles)
    generator.shuffle(order)
    while any(piles.values()):
        for key in order:
            if piles[key]:
                fault = piles[key].pop()
                yield {**fault, 'key': f'{fault["program"]}: {fault["kind"]}: {fault["place"]}'}


def all_faults() -> Iterator[Fault]:
    """Yields every fault."""
    for program in ('linen_trainer', 'our_transformer'):
        yield from rule_faults(program)
    yield from layout_faults()
    yield from constraint_faults('linen_trainer', LINEN)
    yield from constraint_faults('plain_trainer', PLAIN)
    yield from own_constraint_faults()
    yield from loss_faults()
    yield from name_faults('linen_trainer', LINEN, 'kernel')
    yield from result_faults()


def rule_faults(program: str) -> Iterator[Fault]:
    """Rules that are dropped, swapped, or name another axis."""

    def fault(kind: str, **rules: Any) -> Fault:
        return rules_fault(program, kind, rules)

    for name in ('batch', 'vocab', 'mlp', 'heads', 'embed'):
        yield fault('dropped rule', **{name: None})
    for name in ('vocab', 'mlp', 'heads'):
        yield fault('swapped axes', **{name: 'data', 'embed': 'model'})
        yield fault('wrong axis', **{name: 'data'})
    yield fault('wrong axis', embed='model')
    yield fault('wrong axis', batch='model')
    yield fault('wrong axis', heads=None, kv='model')
    yield fault('wrong axis', batch=['data', 'model'])


def layout_faults() -> Iterator[Fault]:
    """PartitionSpecs of parameters, of their momentum and of the batch."""

    def fault(kind: str, name: str, *axes: Any) -> Fault:
        return layout_fault(kind, {name: axes})

    ranks = {'embedding': 2, 'head': 2, 'down': 3, 'out': 3, 'qkv': 5, 'up': 3}
    for name, rank in ranks.items():
        yield fault('dropped rule', name, *[None] * rank)
        yield fault('unsharded optimizer', f'momentum/{name}', *[None] * rank)
    yield fault('swapped axes', 'embedding', None, 'model')
    yield fault('swapped axes', 'head', 'model', None)
    yield fault('swapped axes', 'down', None, None, 'model')
    yield fault('swapped axes', 'out', None, None, 'model')
    yield fault('swapped axes', 'up', None, 'model', None)
    yield fault('swapped axes', 'qkv', None, None, 'model', None, None)
    yield fault('wrong axis', 'qkv', None, None, None, None, 'model')
    yield fault('wrong axis', 'up', None, None, 'data')
    yield fault('wrong axis', 'down', None, 'data', None)
    yield fault('wrong axis', 'head', None, 'data')
    yield fault('wrong axis', 'batch', 'model', None)
    yield fault('dropped rule', 'batch', None, None)


def constraint_faults(program: str, file: str) -> Iterator[Fault]:
    """Constraints that are missing, or that forget one or all dimensions."""
    for found in constraints_of(file):

        def fault(kind: str, text: str, found: Constraint = found) -> Fault:
            new = found.line.replace(found.call, text)
            place = f'{found.line.strip()[:60]} -> {text[-60:]}'
            return edit(program, file, kind, place, f'{found.line}\n', f'{new}\n')

        def other(entries: list[str], found: Constraint = found) -> str:
            return f'{found.function}({found.value}, {found.write(entries)})'

        yield fault('missing constraint', found.value)
        yield fault('wrong constraint', other(['None'] * len(found.entries)))
        forgotten = [e if e not in ("'batch'", "'data'") else 'None' for e in found.entries]
        if forgotten != found.entries and set(forgotten) != {'None'}:
            yield fault('wrong constraint', other(forgotten))


def own_constraint_faults() -> Iterator[Fault]:
    """Constraints of the trainer's own model that are missing or wrong."""
    edits = [
        (
            'train/models/layers.py',
            "constrain(hidden_BLF, ('batch', 'length', 'mlp'))",
            'hidden_BLF',
            'constrain(hidden_BLF, (None, None, None))',
        ),
        (
            'train/models/layers.py',
            '        branch_BLD = named(lay_out_residual(branch_BLD), out)\n',
            '        branch_BLD = named(branch_BLD, out)\n',
            '        branch_BLD = named(constrain(branch_BLD, (None, None, None)), out)\n',
        ),
        (
            'train/models/layers.py',
            '        return lay_out_residual(x_BLD + branch_BLD)\n',
            '        return x_BLD + branch_BLD\n',
            '        return constrain(x_BLD + branch_BLD, (None, None, None))\n',
        ),
        (
            'train/models/layers.py',
            "    x_BLD = named(lay_out_residual(x_BLD), 'residual')\n",
            "    x_BLD = named(x_BLD, 'residual')\n",
            "    x_BLD = named(constrain(x_BLD, (None, None, None)), 'residual')\n",
        ),
        (
            'train/models/layers.py',
            "    normed_BLD = constrain(normed_BLD, ('batch', length_name('projection'), "
            "'embed'))\n",
            '',
            '    normed_BLD = constrain(normed_BLD, (None, None, None))\n',
        ),
        (
            'train/models/attention.py',
            "    q_BLHN = named(constrain(q_BLHN, ('batch', 'length', 'heads', 'kv')), 'query')\n",
            "    q_BLHN = named(q_BLHN, 'query')\n",
            "    q_BLHN = named(constrain(q_BLHN, (None, None, None, None)), 'query')\n",
        ),
        (
            'train/models/attention.py',
            "    v_BSKN = named(constrain(v_BSKN, ('batch', 'length', c.kv_heads_axis, 'kv')), "
            "'value')\n",
            "    v_BSKN = named(v_BSKN, 'value')\n",
            "    v_BSKN = named(constrain(v_BSKN, ('batch', 'length', None, 'kv')), 'value')\n",
        ),
        (
            'train/models/attention.py',
            "    attended_BLHN = constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv'))\n",
            '',
            "    attended_BLHN = constrain(attended_BLHN, (None, 'length', 'heads', 'kv'))\n",
        ),
        (
            'train/models/embedding.py',
            "    return constrain(rows_BLD, ('batch', 'length', 'embed'))\n",
            '    return rows_BLD\n',
            '    return constrain(rows_BLD, (None, None, None))\n',
        ),
        (
            'train/models/embedding.py',
            '    rows_BLD = constrain(rows_BLD, (batch, length, columns))\n',
            '    rows_BLD = rows_BLD + 0\n',
            '    rows_BLD = constrain(rows_BLD, (None, None, None))\n',
        ),
    ]
    for file, old, missing, wrong in edits:
        for kind, new in (('missing constraint', missing), ('wrong constraint', wrong)):
            # The number of lines stays, so that lines keep their numbers.
            new = new if new or not old.endswith('\n') else '\n'
            place = f'{Path(file).name} {old.strip()[:50]} -> {new.strip()[:50]}'
            yield edit('our_transformer', file, kind, place, old, new)


def loss_faults() -> Iterator[Fault]:
    """Operations in the loss that need the logits of all tokens."""
    linen_old = (
        '    hot_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1])\n'
        '    found_BL = jnp.sum(logits_BLV * hot_BLV, axis=-1)\n'
    )
    plain_old = (
        "    hot = jax.nn.one_hot(batch['targets'], VOCAB)\n"
        '    found = jnp.sum(logits * hot, axis=-1)\n'
    )
    linen_z = '    log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)\n'
    plain_z = '    log_z = jax.nn.logsumexp(logits, axis=-1)\n'
    taken = [
        (
            'flat index',
            'jnp.take(logits.reshape(-1), jnp.arange(targets.size) * logits.shape[-1] + '
            'targets.reshape(-1)).reshape(targets.shape)',
        ),
        ('index', 'logits[jnp.arange(BATCH)[:, None], jnp.arange(LENGTH)[None], targets]'),
        (
            'vmap',
            'jax.vmap(lambda row, n: row[n])(logits.reshape(-1, VOCAB), '
            'targets.reshape(-1)).reshape(targets.shape)',
        ),
        ('take_along_axis', 'jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]'),
    ]
    sums = [
        ('sort', 'jnp.log(jnp.sum(jnp.exp(jnp.sort(logits, axis=-1)), axis=-1))'),
        ('top_k', 'jax.nn.logsumexp(jax.lax.top_k(logits, 64)[0], axis=-1)'),
        ('cumsum', 'jnp.log(jnp.cumsum(jnp.exp(logits), axis=-1)[..., -1])'),
        ('roll', 'jax.nn.logsumexp(jnp.roll(logits, 1, axis=-1), axis=-1)'),
        ('flip', 'jax.nn.logsumexp(logits[..., ::-1], axis=-1)'),
    ]

    def linen(text: str) -> str:
        return re.sub(r'\btargets\b', 'targets_BL', re.sub(r'\blogits\b', 'logits_BLV', text))

    def plain(text: str) -> str:
        return re.sub(r'\btargets\b', "batch['targets']", text)

    for program, file, old, name, write in (
        ('linen_trainer', LINEN, linen_old, 'found_BL', linen),
        ('plain_trainer', PLAIN, plain_old, 'found', plain),
    ):
        for place, text in taken:
            new = f'\n    {name} = {write(text)}\n'
            yield edit(program, file, 'gather in the loss', place, old, new, suggested=True)
    for program, file, old, name, write in (
        ('linen_trainer', LINEN, linen_z, 'log_z_BL', linen),
        ('plain_trainer', PLAIN, plain_z, 'log_z', plain),
    ):
        for place, text in sums:
            new = f'    {name} = {write(text)}\n'
            kind = 'whole vocabulary in the loss'
            yield edit(program, file, kind, place, old, new, suggested=True)


def name_faults(program: str, file: str, box: str) -> Iterator[Fault]:
    """Parameters whose names are missing or swapped.

    Args:
      program, file: the program.
      box: its function that makes an initializer with names.
    """
    for line in (ROOT / file).read_text().splitlines():
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
            fault = edit(program, file, kind, path[1], f'{line}\n', f'{text}\n')
            yield fault | {'layout': {path[1]: None}}


def result_faults() -> Iterator[Fault]:
    """Steps that return something large, which the partitioner replicates."""
    old = '    return new, value\n'
    for place, text in (
        ('gradient', "gradient['layers']['up']"),
        ('updates', "updates['layers']['down']"),
        ('logits', "MODEL.apply({'params': state.params}, batch['inputs'])"),
    ):
        new = old.replace('return new, value', f'return new, (value, {text})')
        yield edit('linen_trainer', LINEN, 'whole result', place, old, new, suggested=True)
