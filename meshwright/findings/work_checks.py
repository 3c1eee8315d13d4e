"""Checks of work that all devices along a mesh axis do in full.

    env = jax.vmap(reset)(jax.random.split(key, 8192))    # made in the function: nothing shards it
    env, steps = jax.lax.scan(tick, env, length=64)

No argument has rows that could be sharded over 'env', so the compiler has no reason to divide
anything, unless the function constrains what it makes.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from meshwright.findings.forward_layouts import ForwardLayouts
from meshwright.findings.program_facts import ProgramFacts
from meshwright.findings.wording import axes_str
from meshwright.jaxpr.values import TO_LOCAL, Block, Step, Value, steps_in
from partitioning.amounts import bytes_str, share_str
from partitioning.plan.findings import Finding
from partitioning.products.flops import PRODUCTS, product_flops
from partitioning.rules import axis_sizes, sharding_axes

_SMALL = 8  # elements of a key or a number that something large is made from
_SHARE = 0.5  # of the work, that could be divided
_LEAST = 1e6  # FLOPs of products, or bytes, that are worth a finding
_DRAWN = ('random_bits', 'random_split')
_TRIED = 3  # sizes of what is made inside


def find_whole_work(facts: ProgramFacts) -> Iterator[Finding]:
    """Work on what the function makes itself, that a mesh axis which nothing uses could divide."""
    unused = [axis for axis in facts.sizes if axis not in _used_axes(facts)]
    if not unused or facts.batch:
        return
    made: dict[int, Value] = {}
    for step in facts.steps:
        for value in step.outputs if _is_made_inside(step) else ():
            made.setdefault(value.shape[0], value)
    for axis in unused:
        size = facts.sizes[axis]
        for rows in sorted((n for n in made if n % size == 0 and n > size), reverse=True)[:_TRIED]:
            whole, divided = _work(_laid_out_with(facts, axis, rows), axis)
            kind = 'FLOPs' if whole['FLOPs'] >= _LEAST else 'bytes'
            if whole[kind] < _LEAST or divided[kind] < _SHARE * whole[kind]:
                continue
            work = f'{whole[kind]:.3g} FLOPs of products'
            if kind == 'bytes':
                work = f'{bytes_str(round(whole[kind]))} of results'
            yield Finding(
                'warning',
                'whole work',
                made[rows].line,
                f'nothing is sharded over {axis!r}, so the {size} devices along it all compute the '
                f'same: {share_str(divided[kind] / whole[kind])} of the {work} are for the '
                f'{rows:,} rows of what is made here from a number or a key; write '
                f'with_sharding_constraint(x, {axes_str([(axis,)])}) for it, so that each device '
                f'has {rows // size:,} rows, and 1/{size} of that work and of its memory',
            )
            break


def _used_axes(facts: ProgramFacts) -> set[str]:
    """The mesh axes that shard an argument, a result, or anything that the function lays out."""
    used = {a for axes in facts.axes for own in axes for a in own}
    for result in facts.results:
        spec = getattr(result, 'spec', None) or ()
        used |= {a for entry in spec for a in sharding_axes(entry)}
    for step in facts.steps:
        used |= {a for value in step.outputs for own in value.axes for a in own or ()}
        if step.name == TO_LOCAL:
            used |= {*step.params['axes']}
    return used


def _is_made_inside(step: Step) -> bool:
    """Whether a step makes an array of rows from a number or a key, or from nothing."""
    return (
        not step.bodies
        and not step.is_border
        and all(len(value.shape) > 0 for value in step.outputs)
        and all(value.size <= _SMALL for value in step.inputs)
        and any(value.size > _SMALL for value in step.outputs)
    )


def _laid_out_with(facts: ProgramFacts, axis: str, rows: int) -> Block:
    """The function whose arrays of so many rows, made inside, are sharded over an axis."""
    block = facts.write_out()
    for step in steps_in(block):
        # What is drawn with a key for each row has the rows of the keys.
        has_rows = _is_made_inside(step) or step.name in _DRAWN
        for value in step.outputs if has_rows else ():
            if value.shape[:1] == (rows,):
                value.fix([(axis,), *[None] * (len(value.shape) - 1)])
    ForwardLayouts(block, axis_sizes(facts.mesh))
    return block


def _work(block: Block, axis: str) -> tuple[dict[str, float], dict[str, float]]:
    """The FLOPs of products and the bytes of other results, and those that an axis divides."""
    whole: dict[str, float] = collections.defaultdict(float)
    divided: dict[str, float] = collections.defaultdict(float)
    pending = [(block, 1)]
    while pending:
        one, times = pending.pop()
        for step in one.steps:
            pending += [(body, times * step.times) for body in step.bodies]
            if step.bodies:
                continue
            kind = 'FLOPs' if step.name in PRODUCTS else 'bytes'
            work = float(times * sum(value.nbytes for value in step.outputs))
            if kind == 'FLOPs':
                shapes = (value.shape for value in (*step.inputs[:2], step.outputs[0]))
                work = times * product_flops(step.name, step.params, *shapes)
            whole[kind] += work
            arrays = [*step.inputs, *step.outputs]
            if any(axis in (own or ()) for value in arrays for own in value.axes):
                divided[kind] += work
    return whole, divided
