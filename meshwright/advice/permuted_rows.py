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
from collections.abc import Iterator

from meshwright.advice.advised import Told
from meshwright.advice.estimates import shape_of
from meshwright.advice.origins import Origins
from meshwright.causes.cause import CodeChange, Effect, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.primitives import MOVES
from meshwright.jaxpr.values import Step, Value
from meshwright.program.collectives import Collective
from meshwright.user_lines import user_line

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


def find_permuted_rows(
    origins: Origins, explanation: Explanation, peak: int
) -> Iterator[PermutedRows]:
    """Finds the rows of a sharded batch that are taken in an order which the rows do not decide.

    An order that follows from the rows, such as tokens ordered by their experts, is needed.

    Args:
      origins: the steps of the function, and its arguments.
      explanation: the causes of the exchanges of the function.
      peak: the peak of its memory, in bytes.
    """
    pairs = explanation.collectives
    sends = sum(c.total_bytes for c, _ in pairs)
    seen = set[tuple[str, tuple[int, ...]]]()
    for step in origins.steps:
        made = _describe(step, origins)
        if made is None or (made.line, made.shape) in seen:
            continue
        seen.add((made.line, made.shape))
        evidence = zip(pairs, explanation.evidence, strict=True)
        saved = sum(c.total_bytes for (c, _), e in evidence if made.is_of(c, e))
        if saved:
            effect = Effect(sent=(sends, sends - saved), peak=(peak, peak))
            yield dataclasses.replace(made, effect=effect)


def _moved(step: Step, value: Value) -> Value | None:
    """What a value is cast or moved from."""
    return step.inputs[0] if step.inputs and step.name in MOVES | KINDS.keys() else None


def _describe(step: Step, origins: Origins) -> PermutedRows | None:
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
    axes = tuple(a for a in given.axes[d] or () if origins.sizes.get(a, 1) > 1)
    if [*numbers.offset_dims] != kept or not whole or not axes:
        return None
    if not {*axes} <= {*(made.axes[d] or ())} or origins.depends_on(step.inputs[1], axes):
        return None
    row, _ = origins.argument_of(given, _moved)
    if row is not None and row.role != 'other':  # a lookup in a table
        return None
    n, line = math.prod(origins.sizes[a] for a in axes), user_line(step.place.lines)
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
