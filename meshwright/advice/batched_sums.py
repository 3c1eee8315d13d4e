"""Caches that are sharded along a dimension over which a product sums, though its batch would do.

    keys = (batch, 8, length, 128) as PartitionSpec('data', None, None, 'model')
    scores = jnp.einsum('bkgd,bktd->bkgt', q, keys)     # sums over the 128, which 'model' shards

Sharded along the 8 heads, each device has all that its scores are a sum of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.advice.origins import Origins
from meshwright.advice.surroundings import Candidate, Surroundings
from meshwright.advice.variants import Layout
from meshwright.causes.cause import StateChange
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import spec_text
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.primitives import ELEMENTWISE, SCATTERS
from meshwright.jaxpr.values import Step, Value
from partitioning.plan.rows import PlanRow

_SAME = ELEMENTWISE | SCATTERS | KINDS.keys() | {'dynamic_update_slice'}


def shard_batches(around: Surroundings, origins: Origins) -> Iterator[Candidate]:
    """Arguments like caches, with the axes of a summed dimension at a batch dimension of a product.

    Args:
      around: the arrays of the function.
      origins: the steps of the function, and its arguments.
    """
    seen = set[tuple[str, Layout]]()
    for step in origins.steps:
        if step.name != 'dot_general' or step.place.is_backward:
            continue
        summed, batch = step.params['dimension_numbers']
        for value, sums, stacked in zip(step.inputs[:2], summed, batch, strict=True):
            row, ahead = origins.argument_of(value, _alike)
            if row is None or row.role != 'other' or value.manual:
                continue
            if len(row.shape) != len(value.shape) + ahead:
                continue
            now = axes_of_row(row)
            for c in (d + ahead for d in sums):
                n = math.prod(origins.sizes.get(a, 1) for a in now[c])
                dims = [d + ahead for d in stacked if d + ahead > 0]
                fits = [d for d in dims if not now[d] and row.shape[d] % n == 0]
                if n == 1 or not fits:
                    continue
                best = fits[-1]  # the rows of the batch come first
                new = list(now)
                new[best], new[c] = now[c], ()
                if (row.path, tuple(new)) not in seen:
                    seen.add((row.path, tuple(new)))
                    yield Candidate(_change(around, row, tuple(new)), of_state=True)


def _alike(step: Step, value: Value) -> Value | None:
    """The operand that a value is an updated, cast or scaled copy of."""
    if step.name not in _SAME:
        return None
    return next((one for one in step.inputs if one.shape == value.shape), None)


def _change(around: Surroundings, row: PlanRow, layout: Layout) -> StateChange:
    alike = [
        one
        for one in around.rows.values()
        if one.role == 'other' and one.shape == row.shape and axes_of_row(one) == axes_of_row(row)
    ]
    names = ' and '.join(one.path for one in alike[:3])
    more = f' and {len(alike) - 3} more' if len(alike) > 3 else ''
    return StateChange(
        layouts=tuple((one.path, layout) for one in alike),
        results=(),
        text=(
            f'lay out {names}{more} as {spec_text(layout)}, along a batch dimension of the '
            'products that use them, which then do not sum over devices'
        ),
    )
