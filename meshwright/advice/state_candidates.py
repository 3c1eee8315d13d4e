"""Changes of what a function is given and returns: moments, results, and the rows of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.advice.surroundings import Candidate, Surroundings
from meshwright.causes.cause import StateChange
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import spec_text
from meshwright.jaxpr.values import Axes
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

_BATCH = 3.0  # the weight of sharding a batch that every device has


def lay_out_state(around: Surroundings) -> Iterator[Candidate]:
    """Moments like their parameters, results like what they replace, and the batch."""
    for change in (_moments(around), _results(around)):
        if change is not None:
            yield Candidate(change, of_state=True)
    is_whole = not any(axes_of_row(row)[0] for row in around.batch)
    for change in _batches(around):  # constraints alone would mend what comes after it
        yield Candidate(change, weight=_BATCH if is_whole else 1.0)


def _moments(around: Surroundings) -> StateChange | None:
    pairs = [
        (around.rows[moment], around.rows[owner])
        for moment, owner in around.subject.parameter_of.items()
        if axes_of_row(around.rows[moment]) != axes_of_row(around.rows[owner])
    ]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: -pair[0].bytes_per_device)
    (moment, owner), rest = pairs[0], len(pairs) - 1
    more = f', and {rest} more like their parameters' if rest else ''
    return StateChange(
        layouts=tuple((m.path, axes_of_row(o)) for m, o in pairs),
        results=(),
        text=(
            f'lay out {moment.path} as {spec_text(axes_of_row(owner))}, like its parameter '
            f'{owner.path}{more}'
        ),
    )


def _results(around: Surroundings) -> StateChange | None:
    """Results that replace an argument, in the layout of that argument."""
    call, found = around.subject.call, list[tuple[int, PlanRow]]()
    for number, aval in enumerate(call.jaxpr.out_avals):
        row = around.rows.get(around.subject.returned[number])
        spec = getattr(call.results[number], 'spec', None)
        if row is None or spec is None or tuple(aval.shape) != tuple(row.shape):
            continue
        entries = [*spec, *[None] * (len(row.shape) - len(spec))]
        held = tuple(map(sharding_axes, entries))
        if held != axes_of_row(row):
            found.append((number, row))
    if not found:
        return None
    (number, row), rest = found[0], len(found) - 1
    more = f', and {rest} more results like the arguments that they replace' if rest else ''
    return StateChange(
        layouts=(),
        results=tuple((n, axes_of_row(r)) for n, r in found),
        text=(
            f'return {row.path} as {spec_text(axes_of_row(row))} in out_shardings, like the '
            f'argument{more}'
        ),
    )


def _batches(around: Surroundings) -> Iterator[StateChange]:
    """The rows of the batch over mesh axes that constraints name, or over any."""
    if not around.batch:
        return
    largest = max(around.batch, key=lambda row: math.prod(row.shape))
    now = axes_of_row(largest)[0]
    votes = [around.possible.links.axes_of(row.path, 1)[0] for row in around.batch]
    asked = list(dict.fromkeys(axes for axes in votes if axes and axes != now))
    if not asked and not now:
        axes = [a for a, size in around.possible.layouts.sizes.items() if size > 1]
        asked = [(axis,) for axis in axes] + ([tuple(axes)] if len(axes) > 1 else [])
    same = [r for r in around.batch if r.shape[0] == largest.shape[0]]
    for wanted in asked:
        if around.possible.layouts.divides(wanted, largest.shape[0]):
            layouts = tuple((r.path, (wanted, *_without(r, wanted))) for r in same)
            paths = ' and '.join(r.path for r in same[:3])
            text = f'shard the rows of the batch: lay out {paths} as {spec_text(layouts[0][1])}'
            yield StateChange(layouts=layouts, results=(), text=text)


def _without(row: PlanRow, axes: Axes) -> list[Axes]:
    """The layout of all dimensions but the first, without some mesh axes."""
    return [tuple(a for a in held if a not in axes) for held in axes_of_row(row)[1:]]
