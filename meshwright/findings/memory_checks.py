"""Checks of what a backward pass keeps in memory.

    jax.checkpoint(lambda x: jax.lax.scan(block, x, layers)[0])(x)      # 12 layers

    jax.lax.scan(jax.checkpoint(block), x, layers)[0]

The first computes all layers again at once, and keeps what each of them saves for its gradient. The
second keeps the inputs of the layers, and computes one after the other again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.findings.program_facts import ProgramFacts
from meshwright.jaxpr.values import Block, Step, loop_counts, ties
from partitioning.amounts import bytes_str
from partitioning.plan.findings import Finding
from partitioning.rules import axis_sizes

_AGAIN = 'rematted_computation'  # how jax calls what a checkpoint computes again
_SHARE = 0.25  # of the arguments of a device, for what a loop keeps too much to be told
_TIMES = 2  # how many times less the loop would keep
_LEAST = 2**16  # bytes


def find_kept_layers(facts: ProgramFacts) -> Iterator[Finding]:
    """Loops that a checkpoint computes again as a whole, and then keeps what all layers save."""
    total = sum(map(facts.shard_bytes, range(len(facts.held))))
    weights, seen = set(map(facts.path, facts.weights)), set[str]()
    for step in _outside_of_loops(facts.block):
        if step.name != 'scan' or _AGAIN not in step.place.path or step.line in seen:
            continue
        if not any(t.stacked and t.outer.argument in weights for t in ties(step)):
            continue  # of parts of a sequence, for example
        carried, kept = _kept(facts, step)
        after = carried * step.times + kept / step.times
        if kept < _TIMES * after or kept - after < max(_SHARE * total, _LEAST):
            continue
        seen.add(step.line)
        yield Finding(
            'warning',
            'checkpoint',
            step.line,
            f'jax.checkpoint is around this loop of {step.times:,} iterations, so that the '
            f'backward pass computes all of them again and keeps what all save, {bytes_str(kept)} '
            'on each device; write jax.checkpoint around the body of the loop, and not around the '
            'loop: it then keeps their inputs and what one iteration saves, '
            f'{bytes_str(math.ceil(after))}',
        )


def _outside_of_loops(block: Block) -> Iterator[Step]:
    """The steps that run once: what a loop computes again is a group of layers, or a stage."""
    for step in block.steps:
        yield step
        for body in step.bodies if step.times == 1 else ():
            yield from _outside_of_loops(body)


def _kept(facts: ProgramFacts, step: Step) -> tuple[int, int]:
    """The bytes on a device of what a loop carries, and of what it stacks of all iterations."""
    _, carry = loop_counts(step)
    parts = [value.shard_bytes(axis_sizes(facts.mesh)) for value in step.outputs]
    return sum(parts[:carry]), sum(parts[carry:])
