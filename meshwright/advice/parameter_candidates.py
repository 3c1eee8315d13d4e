"""Other layouts of parameters that are worth an estimate."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence

from meshwright.advice.surroundings import Candidate, Surroundings, rearranged
from meshwright.advice.variants import Layout
from meshwright.causes.cause import JoinedChange, LayoutChange
from meshwright.causes.layouts import axes_of_row
from partitioning.plan.rows import PlanRow

_ALL = 1e15  # comes before all others
_WHOLE = 1.2  # the weight of the layout that all other parameters of a shape have


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
