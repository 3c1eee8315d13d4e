"""Other layouts that are worth an estimate: of parameters, moments, results, and the batch."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator, Sequence

from meshwright.advice.surroundings import Candidate, Surroundings, rearranged
from meshwright.advice.variants import Layout
from meshwright.causes.cause import JoinedChange, LayoutChange, StateChange
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import spec_text
from meshwright.jaxpr.values import Axes
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

_ALL = 1e15  # comes before all others
_WHOLE = 1.2  # the weight of the layout that all other parameters of a shape have
_BATCH = 3.0  # the weight of sharding a batch that every device has


def lay_out_parameters(around: Surroundings) -> Iterator[tuple[float, Candidate]]:
    """Parameters around the exchanges, with the same mesh axes at other dimensions or like peers.

    A parameter that lacks mesh axes gets the layout of the parameters of its shape that have them.
    """
    groups = _groups(around)
    peers = [(rows, _peer_layout(around, rows[0])) for rows in groups]
    unused = [(rows, peer) for rows, peer in peers if rows[0].path not in around.used]
    changes = [_change(rows, peer) for rows, peer in unused if peer is not None]
    if len(changes) > 1:  # averages of all parameters
        yield _ALL, Candidate(JoinedChange(parts=tuple(changes)), False, _WHOLE)
    for rows in groups:
        weight = sum(around.parameters.get(row.path, 0.0) for row in rows)
        now = axes_of_row(rows[0])
        peer = _peer_layout(around, rows[0])
        if peer is not None:
            yield max(weight, 1.0), Candidate(_change(rows, peer), False, _WHOLE)
        if not weight or not any(now) or _is_looked_up(around, rows[0]):
            continue
        uses = list(around.possible.like_its_uses(rows[0]))
        held = {axis for axes in now for axis in axes}  # sharding over fewer is another matter
        fitting = [u.layout for u in uses if held <= {a for axes in u.layout for a in axes}]
        others = dict.fromkeys([*fitting, *_moved(around, rows[0])])
        for number, layout in enumerate(others):
            if around.fits(layout, rows[0].shape) and layout not in (now, peer):
                yield weight / (1 + 0.1 * number), Candidate(_change(rows, layout), False)


def _groups(around: Surroundings) -> list[list[PlanRow]]:
    """The matrices among the parameters, each with its like in other layers."""
    groups: dict[tuple[object, ...], list[PlanRow]] = collections.defaultdict(list)
    for row in around.rows.values():
        if row.role == 'parameters' and len(row.shape) > 1:
            groups[re.sub(r'\d+', '', row.path), row.shape, str(row.spec)].append(row)
    return list(groups.values())


def _change(rows: Sequence[PlanRow], layout: Layout) -> LayoutChange:
    paths = [row.path for row in rows]
    return LayoutChange(path=paths[0], layout=layout, likewise=tuple(paths[1:]))


def _peer_layout(around: Surroundings, row: PlanRow) -> Layout | None:
    """The layout of the parameters of the same shape that are sharded over more axes, if any."""
    mine = {axis for axes in axes_of_row(row) for axis in axes}
    found: collections.Counter[Layout] = collections.Counter()
    for other in around.rows.values():
        if other.role == 'parameters' and other.shape == row.shape:
            layout = axes_of_row(other)
            if mine < {axis for axes in layout for axis in axes}:
                found[layout] += 1
    return found.most_common(1)[0][0] if found else None


def _moved(around: Surroundings, row: PlanRow) -> Iterator[Layout]:
    """Layouts with the same mesh axes at other dimensions; the dimension of layers stays."""
    now, stacked = axes_of_row(row), _is_scanned(around, row)
    for layout in rearranged(now):
        if sorted(layout) == sorted(now) and (not stacked or layout[0] == now[0]):
            yield layout


def _is_looked_up(around: Surroundings, row: PlanRow) -> bool:
    """Whether the rows of a table are looked up, and are sharded over an axis of tensors."""
    for value in around.traced.values:
        if value.primitive == 'gather' and value.operands[0].argument == row.path:
            dims = [d for d in value.contracted if d is not None and d.argument == row.path]
            return any({*d.axes} - {*around.rows_axes} for d in dims)
    return False


def _is_scanned(around: Surroundings, row: PlanRow) -> bool:
    value = next((v for v in around.traced.arguments if v.argument == row.path), None)
    return value is not None and any(
        v.argument == row.path and len(v.shape) < len(row.shape)
        for used in around.traced.values
        for v in used.operands
    )


def lay_out_state(around: Surroundings) -> Iterator[Candidate]:
    """Moments like their parameters, results like what they replace, and the batch."""
    for change in (_moments(around), _results(around)):
        if change is not None:
            yield Candidate(change, of_state=True)
    is_whole = not any(axes_of_row(row)[0] for row in around.batch)
    for change in _batches(around):  # constraints alone would mend what comes after it
        yield Candidate(change, weight=_BATCH if is_whole else 1.0)


def _moments(around: Surroundings) -> StateChange | None:
    """Moments like their parameter, or like another moment of it that is divided further.

    A step may keep parameters whole and divide their moments (ZeRO-1).
    """
    owners: dict[str, list[PlanRow]] = {}
    for moment, owner in around.subject.parameter_of.items():
        owners.setdefault(owner, [around.rows[owner]]).append(around.rows[moment])
    pairs = list[tuple[PlanRow, PlanRow]]()
    for alike in owners.values():
        wanted = max(alike, key=lambda row: _shards(around, row))  # the parameter, if several are
        pairs += [(r, wanted) for r in alike[1:] if axes_of_row(r) != axes_of_row(wanted)]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: -pair[0].bytes_per_device)
    (coarse, like), rest = pairs[0], len(pairs) - 1
    is_parameter = like.path in owners
    more = f', and {rest} more like their {"parameters" if is_parameter else "twins"}'
    return StateChange(
        layouts=tuple((m.path, axes_of_row(o)) for m, o in pairs),
        results=(),
        text=(
            f'lay out {coarse.path} as {spec_text(axes_of_row(like))}, like its '
            f'{"parameter" if is_parameter else "twin"} {like.path}{more if rest else ""}'
        ),
    )


def _shards(around: Surroundings, row: PlanRow) -> int:
    sizes = around.possible.layouts.sizes
    return math.prod(sizes[axis] for axes in axes_of_row(row) for axis in axes)


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
