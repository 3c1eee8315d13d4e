"""Rows that are chosen within groups, by their numbers among the rows of all groups.

    rows = (jnp.arange(sentences)[:, None] * beams + beam).reshape(-1)    # beam < beams
    cache = jnp.take(cache, rows, axis=0)      # dimension 0 is sharded over 'data'

A row only moves within its sentence, and each device has whole sentences. Compilers do not see it
in the numbers, and gather the cache. They see it if the sentences are a dimension of their own:

    cache = cache.reshape(sentences, beams, ...)
    cache = jax.vmap(lambda c, b: c[b])(cache, beam)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.advice.candidates import Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.causes.cause import CodeChange, over
from meshwright.jaxpr.primitives import ELEMENTWISE, MOVES, SCATTERS
from meshwright.jaxpr.values import Step, Value

_NEAR = 24  # steps that are walked back from the indices


class _Groups(NamedTuple):
    """Numbers of rows: the number of a group times the rows of each, and the place in the group.

    Attributes:
      step: what multiplies the number of the group.
      number: the number of groups.
      members: the rows of each.
    """

    step: Step
    number: int
    members: int


def find_grouped_rows(view: FunctionView) -> Iterator[Told]:
    """Finds lookups and updates of rows within groups that each device has whole."""
    found: dict[tuple[str, tuple[int, ...]], Told] = {}
    for step in view.steps:
        if step.name not in SCATTERS | {'gather'} or step.place.is_backward:
            continue
        given, numbers = view.before_exchange(step.inputs[0]), step.params['dimension_numbers']
        dims = getattr(numbers, 'start_index_map', None)
        dims = numbers.scatter_dims_to_operand_dims if dims is None else dims
        key = step.line, shape_of(given)
        if len(dims) != 1 or given.manual or key in found or given.shard_bytes(view.sizes) < LEAST:
            continue
        (d,) = dims
        axes = tuple(a for a in given.axes[d] or () if view.sizes[a] > 1)
        groups = _groups(step.inputs[1], given.shape[d], view) if axes else None
        n = view.num_devices(axes)
        if groups is not None and groups.number % n == 0:
            found[key] = _tell(view, step, given, d, groups)
    yield from found.values()


def _groups(indices: Value, size: int, view: FunctionView) -> _Groups | None:
    """The groups in which a dimension of a size is indexed, or None."""
    pending, seen = [indices], 0
    while pending and seen < _NEAR:
        step = view.makers.get(id(pending.pop(0)))
        seen += 1
        if step is None:
            continue
        if step.name == 'add':
            for value in step.inputs:
                found = _scaled(value, size, view)
                if found is not None:
                    return found
        if step.name in ELEMENTWISE | MOVES | {'broadcast_in_dim', 'concatenate'}:
            pending += [one for one in step.inputs if one.shape]
    return None


def _scaled(value: Value, size: int, view: FunctionView) -> _Groups | None:
    """The groups, if a value is the number of a group times the rows of a group."""
    step = view.makers.get(id(value))
    while step is not None and step.name in MOVES | {'broadcast_in_dim'}:
        step = view.makers.get(id(step.inputs[0]))
    if step is None or step.name != 'mul':
        return None
    for counted, factor in (step.inputs, step.inputs[::-1]):
        if factor.constant is None or np.size(factor.constant) != 1:
            continue
        members, made = int(np.ravel(factor.constant)[0]), view.makers.get(id(counted))
        while made is not None and made.name in MOVES | {'broadcast_in_dim'}:
            made = view.makers.get(id(made.inputs[0]))
        if made is None or made.name != 'iota' or members < 2:
            continue
        count = made.params['shape'][made.params['dimension']]
        if count * members == size:
            return _Groups(step, count, members)
    return None


def _tell(view: FunctionView, step: Step, given: Value, d: int, groups: _Groups) -> Told:
    line, numbered = view.line_of(step), view.line_of(groups.step)
    axes, count, members = given.axes[d] or (), groups.number, groups.members
    before = ', '.join(map(str, [*given.shape[:d], count, members]))
    shape = f'({before}{", ..." if d + 1 < len(given.shape) else ""})'
    does, takes = 'takes', step.name == 'gather'
    write = f'jnp.take_along_axis along dimension {d + 1}, or jax.vmap(lambda x, i: x[i]),'
    if not takes:
        does = 'updates'
        write = 'jax.vmap(lambda x, i, u: x.at[i].set(u)), or what is done in place of set,'
    return Told(
        match=Match(
            axes=tuple(view.sizes),
            lines=frozenset([line, step.line]),
            shapes=frozenset([shape_of(given)]),
        ),
        line=line,
        why=(
            f'{line} {does} rows of dimension {d} of {given.shape}, which is sharded over '
            f'{over(axes)}, by the numbers of {numbered}: one of {count:,} groups * {members:,} + '
            'a place in the group; each device has whole groups, but the compiler does not see '
            'it, and moves the rows of all'
        ),
        change=CodeChange(
            source=line,
            text=(
                f'choose within the groups at {line}: reshape to {shape}, use {write} with the '
                'groups as a batch and the places in the group as indices, without what '
                f'{numbered} adds to them, and reshape back; no row leaves its device'
            ),
        ),
    )
