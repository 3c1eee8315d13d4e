"""The order in which `benchmarks/blame.py` draws faults, by seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from benchmarks.blame_programs.faults.constraints import constraint_faults, other_program_faults
from benchmarks.blame_programs.faults.declarations import (
    kept_activations,
    name_faults,
    result_faults,
    rules_and_constraints,
)
from benchmarks.blame_programs.faults.fault import Fault
from benchmarks.blame_programs.faults.layouts import layout_faults
from benchmarks.blame_programs.faults.losses import loss_faults, other_program_losses
from benchmarks.blame_programs.faults.operations import gradient_faults, operation_faults
from benchmarks.blame_programs.faults.rules import rule_faults

_DEVELOPMENT = 0.4  # the share of the faults of set 1 that the code was written with
_DRAWN_BY_SEED_2 = 29  # seed 3 draws from the faults that seed 2 has left


def draw_faults(seed: int) -> Iterator[Fault]:
    """Yields faults in a random order, in which programs and kinds take turns.

    Seed 0 has two fifths of set 1, and seed 1 has the rest: no figure contains a fault that the
    code was written with. The seeds 2 to 5 draw from the sets of the same number, and seed 3 also
    from the faults of set 2 that seed 2 has left.
    """
    faults = list(fault_set(max(seed, 1)))
    if seed == 3:
        drawn = {f['key'] for f in itertools.islice(draw_faults(2), _DRAWN_BY_SEED_2)}
        faults = [f for f in fault_set(2) if f['key'] not in drawn] + faults
    piles: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        piles.setdefault((fault['program'], fault['kind']), []).append(fault)
    generator = random.Random(seed)
    for key, pile in piles.items():
        random.Random(0).shuffle(pile)
        cut = round(len(pile) * _DEVELOPMENT)
        if seed <= 1:
            piles[key] = pile[:cut] if seed == 0 else pile[cut:]
        generator.shuffle(piles[key])
    order = sorted(piles)
    generator.shuffle(order)
    while any(piles.values()):
        for key in order:
            if piles[key]:
                yield piles[key].pop()


def fault_set(number: int) -> Iterator[Fault]:
    """Yields all faults of a set, each with the `key` that names it in results."""
    for fault in _of_set(number):
        yield {**fault, 'key': f'{fault["program"]}: {fault["kind"]}: {fault["place"]}'}


def _of_set(number: int) -> Iterator[Fault]:
    yield from rule_faults(number)
    yield from layout_faults(number)
    if number == 5:
        for program in ('vision_trainer', 'translation_trainer', 'experts_trainer'):
            yield from other_program_faults(program)
            yield from other_program_losses(program)
        yield from name_faults('vision_trainer', 'box')
        yield from name_faults('translation_trainer', 'boxed')
        return
    yield from constraint_faults(number)
    if number == 1:
        yield from loss_faults(number)
        yield from name_faults('linen_trainer', 'kernel')
        yield from result_faults()
    elif number == 2:
        yield from loss_faults(number)
    elif number == 3:
        yield from operation_faults(number)
        yield from loss_faults(number)
        yield from kept_activations()
        yield from rules_and_constraints()
    else:
        yield from gradient_faults()
        yield from operation_faults(number)
