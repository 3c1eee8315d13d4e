"""Rows of a sharded batch in another order, which gathers all rows on all devices.

    partner = jax.random.permutation(key, len(images))
    mixed = 0.7 * images + 0.3 * images[partner]

A device needs rows of all others. If each device only takes rows of its own, nothing is sent:

    parts = images.reshape(devices, -1, *images.shape[1:])
    partner = jnp.roll(parts, shift, axis=1).reshape(images.shape)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from meshwright.advice.advised import Told
from meshwright.advice.estimates import shape_of
from meshwright.causes.cause import CodeChange, Effect, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation
from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.primitives import MOVES
from meshwright.jaxpr.values import Axes, Step, Value, steps_in, ties
from meshwright.program.collectives import Collective
from meshwright.user_lines import user_line
from partitioning.plan.rows import PlanRow

_SUMS = ('all-reduce', 'reduce-scatter')
_LEAST = 4096  # bytes of the rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PermutedRows(Told):
    """Rows that are taken in an order which is computed.

    Attributes:
      shape: the sizes of the array above 1, sorted.
    """

    shape: tuple[int, ...]

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        if not {*collective.axes} <= {*self.axes} or evidence is None:
            return False
        value = evidence.value
        here = self.line in (evidence.made_at, evidence.used_at, collective.source)
        if value is None or shape_of(value) != self.shape or value.gradient_of:
            return False
        return here and not (collective.kind in _SUMS and value.contracted)


class Origins:
    """Where the values of a program come from.

    Args:
      laid_out: the program, with the layout of its arrays.
      rows: the layout of each array of the arguments.
    """

    def __init__(self, laid_out: TracedProgram, rows: Sequence[PlanRow | None]):
        self.steps = list(steps_in(laid_out.block))
        self.makers = {id(value): step for step in self.steps for value in step.outputs}
        self.outer = {
            id(tie.inner): (tie.outer, tie.stacked, step)
            for step in self.steps
            for tie in ties(step)
            if not tie.output
        }
        self.rows: Mapping[int, PlanRow | None] = {
            id(value): row for value, row in zip(laid_out.block.inputs, rows, strict=False)
        }

    def before_exchange(self, value: Value) -> Value:
        """The array before the exchanges that its layout implies."""
        while (step := self.makers.get(id(value))) is not None and step.name in KINDS:
            value = step.inputs[0]
        return value

    def argument_of(self, value: Value) -> PlanRow | None:
        """The argument that an array is, cast or moved, or None."""
        while id(value) not in self.rows:
            step = self.makers.get(id(value))
            if id(value) in self.outer:
                value = self.outer[id(value)][0]
            elif step is not None and step.inputs and step.name in MOVES | KINDS.keys():
                value = step.inputs[0]
            else:
                return None
        return self.rows[id(value)]

    def depends_on(self, value: Value, axes: Axes) -> bool:
        """Whether an array is computed from arguments that are sharded over mesh axes."""
        pending, seen = [value], set[int]()
        while pending:
            one = pending.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if id(one) in self.rows:
                if {*axes} & {axis for own in one.axes for axis in own or ()}:
                    return True
            elif id(one) in self.outer:
                pending.append(self.outer[id(one)][0])
            elif (step := self.makers.get(id(one))) is not None:
                pending += step.inputs
        return False


def find_permuted_rows(
    laid_out: TracedProgram,
    rows: Sequence[PlanRow | None],
    explanation: Explanation,
    peak: int,
) -> Iterator[PermutedRows]:
    """Finds the rows of a sharded batch that are taken in an order which the rows do not decide.

    An order that follows from the rows, such as that of the experts of tokens, is needed.

    Args:
      laid_out: the function, with the layout of its arrays.
      rows: the layout of each array of the arguments.
      explanation: the causes of the exchanges of the function.
      peak: the peak of its memory, in bytes.
    """
    origins, pairs = Origins(laid_out, rows), explanation.collectives
    sends = sum(c.total_bytes for c, _ in pairs)
    seen = set[tuple[str, tuple[int, ...]]]()
    for step in origins.steps:
        made = _describe(step, origins, laid_out.axis_sizes)
        if made is None or (made.line, made.shape) in seen:
            continue
        seen.add((made.line, made.shape))
        evidence = zip(pairs, explanation.evidence, strict=True)
        saved = sum(c.total_bytes for (c, _), e in evidence if made.is_of(c, e))
        if saved:
            effect = Effect(sent=(sends, sends - saved), peak=(peak, peak))
            yield dataclasses.replace(made, effect=effect)


def _describe(step: Step, origins: Origins, sizes: Mapping[str, int]) -> PermutedRows | None:
    if step.name != 'gather' or step.place.is_backward or len(step.inputs) != 2:
        return None
    given, made = origins.before_exchange(step.inputs[0]), step.outputs[0]
    numbers = step.params['dimension_numbers']
    if given.shape != made.shape or given.manual or given.nbytes < _LEAST:
        return None
    if len(numbers.start_index_map) != 1 or numbers.start_index_map != numbers.collapsed_slice_dims:
        return None
    (d,) = numbers.start_index_map
    kept = [n for n in range(len(made.shape)) if n != d]
    whole = all(step.params['slice_sizes'][n] == given.shape[n] for n in kept)
    axes = tuple(a for a in given.axes[d] or () if sizes.get(a, 1) > 1)
    if [*numbers.offset_dims] != kept or not whole or not axes:
        return None
    if not {*axes} <= {*(made.axes[d] or ())} or origins.depends_on(step.inputs[1], axes):
        return None
    row = origins.argument_of(given)
    if row is not None and row.role != 'other':  # a lookup in a table
        return None
    n, line = math.prod(sizes[a] for a in axes), user_line(step.place.lines)
    each, rest = given.shape[d] // n, ', '.join(str(given.shape[k]) for k in kept)
    return PermutedRows(
        line=line,
        axes=axes,
        shape=shape_of(given),
        why=(
            f'{line} takes the {given.shape[d]:,} rows of {given.shape}, which are sharded over '
            f'{over(axes)}, in an order that is computed, so that each device needs rows of all '
            'others, and gathers all'
        ),
        change=CodeChange(
            source=line,
            text=(
                f'take rows of the same device at {line}: reshape to ({n}, {each}'
                f'{", " + rest if d == 0 and rest else ", ..."}), permute or jnp.roll along the '
                f'dimension of {each:,}, and reshape back, or permute in a shard_map'
            ),
        ),
    )
