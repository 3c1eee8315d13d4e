"""Other layouts of arguments that are worth an estimate: of parameters, the state, and the batch.

Under fully sharded training on data=4, fsdp=4, a batch that is laid out as PartitionSpec('data')
makes the devices along 'fsdp' compute parts of the same rows, and sum or gather activations.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator, Sequence

from meshwright.advice.candidates import Candidate
from meshwright.advice.function_view import FunctionView, rearranged
from meshwright.advice.subject import Layout
from meshwright.causes.cause import (
    ConstraintChange,
    JoinedChange,
    LayoutChange,
    SingleChange,
    StateChange,
    over,
)
from meshwright.causes.layouts import axes_of_row, sharding_of_row
from meshwright.causes.row_axes import is_meant_for_rows
from meshwright.causes.wording import layouts_text, spec_text
from meshwright.jaxpr.primitives import CONSTRAINTS
from meshwright.jaxpr.values import Axes, Value
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

_GENERAL = ('kernel', 'weight', 'weights', 'w', 'value', '')  # names of the matrix of any layer
_ALL = 1e15  # comes before all others
_WHOLE = 1.2  # the weight of the layout that all other parameters of a shape have
_BATCH = 3.0  # the weight of sharding a batch that every device has


def lay_out_arguments(view: FunctionView) -> Iterator[tuple[float, Candidate]]:
    """Arguments around the exchanges, with the same mesh axes at other dimensions or like peers.

    A parameter that lacks mesh axes gets the layout of the parameters of its shape that have them.
    Other arguments, such as caches, keep the layout of their rows.
    """
    groups = _groups(view)
    peers = [(rows, _peer_layout(view, rows[0])) for rows in groups]
    unused = [(rows, peer) for rows, peer in peers if rows[0].path not in view.used]
    changes = [_change(rows, peer) for rows, peer in unused if peer is not None]
    if len(changes) > 1:  # averages of all parameters
        every = [(path, one.layout) for one in changes for path in (one.path, *one.likewise)]
        both = JoinedChange(parts=tuple(changes), text=f'lay out {layouts_text(every)}')
        yield _ALL, Candidate(both, False, _WHOLE)
    for rows, peer in peers:
        weight = sum(view.parameters.get(row.path, 0.0) for row in rows)
        now, is_given = axes_of_row(rows[0]), rows[0].role == 'other'
        if peer is not None:
            yield max(weight, 1.0), Candidate(_change(rows, peer), False, _WHOLE, like_most=True)
        if not weight or not any(now) or _is_looked_up(view, rows[0]):
            continue
        kept = [now[0][:n] for n in range(1, len(now[0]))] + [now[0]]  # rows stay divided
        others = [one for one in _moved(view, rows[0]) if not is_given or one[0] in kept]
        if not is_given:
            held = {axis for axes in now for axis in axes}  # sharding over fewer is another matter
            uses = [change.layout for change in view.possible.like_its_uses(rows[0])]
            fit = [one for one in uses if held <= {a for axes in one for a in axes}]
            others = list(dict.fromkeys([*fit, *others]))
        for number, layout in enumerate(others):
            if view.fits(layout, rows[0].shape) and layout not in (now, peer):
                yield weight / (1 + 0.1 * number), Candidate(_change(rows, layout), is_given)


def _groups(view: FunctionView) -> list[list[PlanRow]]:
    """The matrices among the parameters, and other stacks of them, each with its like."""
    groups: dict[tuple[object, ...], list[PlanRow]] = collections.defaultdict(list)
    for row in view.rows.values():
        if row.role == 'parameters' and len(row.shape) > 1:
            groups[_name(row.path), row.shape, str(row.spec)].append(row)
        elif row.role == 'other' and len(row.shape) > 2:
            groups['', row.shape, str(row.spec)].append(row)
    return list(groups.values())


def _name(path: str) -> str:
    """The end of a path that says which parameter of a layer it is: 'gate', or 'gate/kernel'."""
    parts = re.sub(r'\d+', '', path).split('/')
    first = next((n for n in reversed(range(len(parts))) if parts[n] not in _GENERAL), 0)
    return '/'.join(parts[first:])


def _change(rows: Sequence[PlanRow], layout: Layout) -> LayoutChange:
    paths = [row.path for row in rows]
    return LayoutChange(path=paths[0], layout=layout, likewise=tuple(paths[1:]))


def _peer_layout(view: FunctionView, row: PlanRow) -> Layout | None:
    """The layout of the parameters of the same shape that are sharded over more axes, if any.

    Or else the layout that most of them have, over the same axes.
    """
    if row.role == 'other':
        return None
    like = [r for r in view.rows.values() if r.role == 'parameters' and r.shape == row.shape]
    now, found = axes_of_row(row), collections.Counter(map(axes_of_row, like))
    mine, held = {*_names(now)}, [(one, {*_names(one)}) for one, _ in found.most_common()]
    more = next((one for one, axes in held if mine < axes), None)
    alike = next((one for one, axes in held if mine == axes and found[one] > found[now]), None)
    return more or alike


def _moved(view: FunctionView, row: PlanRow) -> Iterator[Layout]:
    """Layouts with the same mesh axes at other dimensions; the dimension of layers stays.

    Other arguments, such as caches, may have one of several axes of a dimension at another one.
    """
    now, stacked = axes_of_row(row), _is_scanned(view, row)
    for layout in (*rearranged(now), *(_split(now) if row.role == 'other' else ())):
        if _names(layout) == _names(now) and (not stacked or layout[0] == now[0]):
            yield layout


def _split(layout: Layout) -> Iterator[Layout]:
    """Layouts in which a dimension gives the last of its mesh axes to a whole dimension."""
    for d, axes in enumerate(layout):
        for e in (n for n, other in enumerate(layout) if len(axes) > 1 and not other):
            yield tuple(
                axes[:-1] if n == d else axes[-1:] if n == e else a for n, a in enumerate(layout)
            )


def _names(layout: Layout) -> list[str]:
    return sorted(axis for axes in layout for axis in axes)


def _is_looked_up(view: FunctionView, row: PlanRow) -> bool:
    """Whether the rows of a table are looked up, and are sharded over an axis of tensors."""
    for value in view.values:
        if value.primitive == 'gather' and value.operands[0].argument == row.path:
            dims = [d for d in value.contracted if d is not None and d.argument == row.path]
            return any({*d.axes} - {*view.rows_axes} for d in dims)
    return False


def _is_scanned(view: FunctionView, row: PlanRow) -> bool:
    value = next((v for v in view.traced.arguments if v.argument == row.path), None)
    return value is not None and any(
        v.argument == row.path and len(v.shape) < len(row.shape)
        for used in view.values
        for v in used.operands
    )


def lay_out_state(view: FunctionView) -> Iterator[Candidate]:
    """Moments like their parameters, results like what they replace, and the batch."""
    for change in (_moments(view), _results(view)):
        if change is not None:
            yield Candidate(change, of_state=True)
    is_whole = not any(axes_of_row(row)[0] for row in view.batch)
    for change in _batches(view):  # constraints alone would mend what comes after it
        yield Candidate(change, weight=_BATCH if is_whole else 1.0)


def _moments(view: FunctionView) -> StateChange | None:
    """Moments like their parameter, or like another moment of it that is divided further.

    A step may keep parameters whole and divide their moments (ZeRO-1).
    """
    owners: dict[str, list[PlanRow]] = {}
    for moment, owner in view.subject.parameter_of.items():
        owners.setdefault(owner, [view.rows[owner]]).append(view.rows[moment])
    pairs = list[tuple[PlanRow, PlanRow]]()
    for alike in owners.values():
        wanted = max(alike, key=lambda row: _shards(view, row))  # the parameter, if several are
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


def _shards(view: FunctionView, row: PlanRow) -> int:
    sizes = view.sizes
    return math.prod(sizes[axis] for axes in axes_of_row(row) for axis in axes)


def _results(view: FunctionView) -> StateChange | None:
    """Results that replace an argument, in the layout of that argument."""
    call, found = view.subject.call, list[tuple[int, PlanRow]]()
    for number, aval in enumerate(call.jaxpr.out_avals):
        row = view.rows.get(view.subject.returned[number])
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


def _batches(view: FunctionView) -> Iterator[StateChange]:
    """The rows of the batch over mesh axes that constraints name, or over any."""
    if not view.batch:
        return
    largest = max(view.batch, key=lambda row: math.prod(row.shape))
    now = axes_of_row(largest)[0]
    votes = [view.possible.links.axes_of(row.path, 1)[0] for row in view.batch]
    asked = list(dict.fromkeys(axes for axes in votes if axes and axes != now))
    if not asked and not now:  # other dimensions may be sharded on purpose, after that of the time
        held = sharding_of_row(largest)
        axes = [a for a, size in view.sizes.items() if size > 1 and a not in held]
        asked = [(axis,) for axis in axes] + ([tuple(axes)] if len(axes) > 1 else [])
    same = [r for r in view.batch if r.shape[0] == largest.shape[0]]
    for wanted in asked:
        if view.possible.layouts.divides(wanted, largest.shape[0]):
            layouts = tuple((r.path, (wanted, *_without(r, wanted))) for r in same)
            moved = [one for one in layouts if one[1] != axes_of_row(view.rows[one[0]])]
            text = f'shard the rows of the batch: lay out {layouts_text(moved)}'
            yield StateChange(layouts=layouts, results=(), text=text)


def _without(row: PlanRow, axes: Axes) -> list[Axes]:
    """The layout of all dimensions but the first, without some mesh axes."""
    return [tuple(a for a in held if a not in axes) for held in axes_of_row(row)[1:]]


def find_missing_rows(view: FunctionView) -> Candidate | None:
    """The batch laid out over the axes that it lacks; None if it has all, or they do not fit it."""
    parameters = {path: row for path, row in view.rows.items() if row.role == 'parameters'}
    if not view.batch or not parameters:
        return None
    largest = max(view.batch, key=lambda row: math.prod(row.shape))
    now = axes_of_row(largest)[0]
    used = {a for row in parameters.values() for a in sharding_of_row(row)}
    held = {a for row in view.batch for a in sharding_of_row(row)}
    axes = tuple(
        axis
        for axis, size in view.sizes.items()
        if size > 1 and axis in used - held
        if is_meant_for_rows(axis, view.values, parameters)
    )
    wanted = (*now, *axes)
    if not axes or largest.shape[0] % view.num_devices(wanted):
        return None
    same = [r for r in view.batch if r.shape[0] == largest.shape[0] and axes_of_row(r)[0] == now]
    parts: list[SingleChange] = [_batch(same, wanted, axes), *_constraints(view, now, wanted)]
    has = {path: {*axes} & sharding_of_row(r) for path, r in view.rows.items()}
    example = max(parameters.values(), key=lambda row: (bool(has[row.path]), math.prod(row.shape)))
    why = (
        f'parameters such as {example.path}, {spec_text(axes_of_row(example))}, are sharded over '
        f'{over(axes)}, and the {largest.shape[0]:,} rows of {largest.path}, '
        f'{spec_text(axes_of_row(largest))}, are not: the devices along {over(axes)} compute with '
        'the same rows, and exchange activations in place of parameters'
    )
    change = parts[0] if len(parts) == 1 else JoinedChange(parts=tuple(parts))
    return Candidate(change, row_axes=axes, array=largest.path, why=why)


def _batch(same: list[PlanRow], wanted: Axes, axes: Axes) -> StateChange:
    layouts = tuple((row.path, (wanted, *axes_of_row(row)[1:])) for row in same)
    text = f'shard the rows of the batch over {over(axes)}, too: lay out {layouts_text(layouts)}'
    return StateChange(layouts=layouts, results=(), text=text)


def _constraints(view: FunctionView, now: Axes, wanted: Axes) -> list[ConstraintChange]:
    """The constraints that divide the rows as the batch does now, over all axes."""
    found: dict[tuple[str, tuple[int, ...]], ConstraintChange] = {}
    for value in view.values:
        if value.primitive in CONSTRAINTS and not value.backward and _of_rows(value, now):
            layout = tuple(wanted if axes == now else axes for axes in value.layout or ())
            found[value.line, value.shape] = ConstraintChange(
                source=value.line,
                shape=value.shape,
                names=(None,) * len(value.shape),
                layout=layout,
                replaces=True,
            )
    return list(found.values())


def _of_rows(value: Value, now: Axes) -> bool:
    is_state = value.argument or value.gradient_of or value.update_of
    return bool(now) and not is_state and now in (value.layout or ())
