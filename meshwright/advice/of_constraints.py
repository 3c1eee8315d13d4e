"""Changes of constraints that are worth an estimate: other layouts, none, and new constraints.

For a hidden layer that a constraint lays out as PartitionSpec('model', 'data'), while the rows of
the batch are sharded over 'data' and the columns of the parameter that makes it over 'model':

    write with_sharding_constraint(x, PartitionSpec('data', 'model')) at model.py:31
    leave out the constraint at model.py:31
    ...
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence

from meshwright.advice.candidates import Candidate
from meshwright.advice.function_view import FunctionView, make_constraint, rearranged
from meshwright.advice.subject import Layout
from meshwright.causes.cause import Change, ConstraintRemoval, JoinedChange
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import spec_text
from meshwright.jaxpr.implied_exchanges import ADDED, KINDS, exchange_axes
from meshwright.jaxpr.values import Axes, Step, Value
from partitioning.products.flops import PRODUCTS

_MOST = 3  # constraints that only compiling can judge
_MOVING = ('all-gather', 'all-to-all', 'collective-permute')
_ADDED, _KEPT = 0.7, 0.3  # the weights of new constraints, next to other layouts of old ones
_AFTER = 0.97  # the weight of a second constraint, next to another layout of the first
_MOVED = ('all-gather', 'all-to-all')  # exchanges that layouts imply
_ELSEWHERE = 0.85  # the weight of a layout that only its bytes speak for
_LEFT_OUT = 0.8  # the weight of a gradient without a constraint, next to one like its parameter
_MADE = PRODUCTS | {'gather', 'add', 'custom_vjp_call', 'reduce_sum'}


def replace_constraints(view: FunctionView) -> Iterator[tuple[float, Candidate]]:
    """For each line with constraints, the layout that its array has elsewhere, or none."""
    sites = [(n, value) for n, value in view.constraints() if not _fits_dims(view, value)]
    alike: dict[tuple[Layout | None, Layout], dict[str, tuple[float, Value]]]
    alike = collections.defaultdict(dict)
    for weight, value in sites:
        if view.row_of_state(value) is not None or view.gathers_parameter(value):
            continue
        implied = view.implied(value)
        if implied != value.layout:
            alike[value.layout, implied].setdefault(value.line, (weight, value))
            others = (v for _, v in sites if v.line == value.line and v.shape != value.shape)
            shapes = tuple(v.shape for v in others if _is_alike(view, v, value, implied))
            change = make_constraint(value, implied, replaces=True, shapes=shapes)
            yield weight, Candidate(change)
        yield 0.9 * weight, Candidate(ConstraintRemoval(source=value.line))
    for (_, implied), places in alike.items():
        if len(places) > 1:  # one wrong spec in several places
            parts = (make_constraint(v, implied, replaces=True) for _, v in places.values())
            both = JoinedChange(parts=tuple(parts), text=_at_all(implied, list(places)))
            yield sum(weight for weight, _ in places.values()), Candidate(both)


def _at_all(layout: Layout, lines: Sequence[str]) -> str:
    return f'write with_sharding_constraint(x, {spec_text(layout)}) at {" and ".join(lines)}'


def lay_out_updates(view: FunctionView) -> Iterator[Candidate]:
    """For each line that constrains gradients or updates, the layouts of their parameters."""
    by_line: dict[str, list[Value]] = collections.defaultdict(list)
    for _, value in view.constraints():
        if view.row_of_state(value) is not None and view.implied(value) != value.layout:
            by_line[value.line].append(value)
    for line, found in by_line.items():
        shapes: dict[Layout, list[Value]] = collections.defaultdict(list)
        for value in found:
            shapes[view.implied(value)].append(value)
        parts = tuple(
            make_constraint(
                values[0], layout, replaces=True, shapes=tuple(v.shape for v in values[1:])
            )
            for layout, values in shapes.items()
        )
        text = '' if len(parts) == 1 else _like_parameters(view, found[0], line, len(found))
        yield Candidate(JoinedChange(parts=parts, text=text), of_state=True)
        yield Candidate(ConstraintRemoval(source=line), weight=_LEFT_OUT, of_state=True)


def _like_parameters(view: FunctionView, value: Value, line: str, count: int) -> str:
    row = view.row_of_state(value)
    assert row is not None
    return (
        f'write with_sharding_constraint(x, ...) with the layout of the parameter of x at {line}, '
        f'such as {spec_text(view.implied(value))} for {row.path}, for all {count} shapes there'
    )


def rearrange_constraints(view: FunctionView, change: Change | None) -> Iterator[Candidate]:
    """Other layouts at the line of a constraint that is better left out or replaced.

    Args:
      view: the function.
      change: a change at this line; None for the line with the most bytes around it.
    """
    sites = [value for _, value in view.constraints()]
    if change is not None:
        source = getattr(change, 'source', '')
        sites = [value for value in sites if value.line == source]
    sites = [
        value
        for value in sites
        if not _fits_dims(view, value) and view.row_of_state(value) is None
        if not view.gathers_parameter(value)
    ]
    for value in sites[: None if change is not None else 1]:
        layout = value.layout or ()
        for other in (*rearranged(layout), *_filled(view, layout)):
            if view.fits(other, value.shape):
                made = make_constraint(value, other, replaces=True)
                yield Candidate(made, weight=_ELSEWHERE)


def _is_alike(view: FunctionView, other: Value, value: Value, implied: Layout) -> bool:
    """Whether another array of the same line is laid out alike, and should be."""
    return other.layout == value.layout and view.implied(other) == implied


def _fits_dims(view: FunctionView, value: Value) -> bool:
    """Whether a constraint only says which of the layouts of its dimensions an array has.

    Under sequence parallelism, the length and the columns of a kernel are over the same axis.
    """
    if view.row_of_state(value) is not None:
        return view.implied(value) == value.layout
    layout = value.layout or ()
    implied = {a for own in view.implied(value) for a in own}
    lost = implied - {a for own in layout for a in own}
    pairs = zip(layout, value.dims, strict=True)
    return (
        not lost
        and any(layout)
        and all({*axes} <= {*(dim.axes if dim is not None else ())} for axes, dim in pairs)
    )


def _filled(view: FunctionView, layout: Layout) -> Iterator[Layout]:
    """Layouts that also use mesh axes which a layout does not use."""
    for axis in view.possible.layouts.unused_axes(layout):
        for number in range(len(layout)):
            if not layout[number]:
                yield tuple((axis,) if n == number else a for n, a in enumerate(layout))


def add_constraints(
    view: FunctionView, *, tensors_first: bool = False
) -> Iterator[tuple[float, Candidate]]:
    """Constraints on what products and lookups around the exchanges make.

    Args:
      view: the function.
      tensors_first: as for `view.implied`.
    """
    seen = set[tuple[str, tuple[int, ...]]]()
    for weight, value in sorted(view.near_values.values(), key=lambda pair: -pair[0]):
        key = value.line, value.shape
        if value.primitive not in _MADE or value.backward or value.manual or key in seen:
            continue
        value = _as_written(view, value)
        layout = view.implied(value, tensors_first=tensors_first)
        if len(value.shape) > 1 and any(layout) and value.layout is None:
            seen.add(key)
            yield _ADDED * weight, Candidate(make_constraint(value, layout))


def move_layouts(view: FunctionView) -> Iterator[tuple[float, Candidate]]:
    """Other layouts of what is exchanged in the forward pass, and of what is computed from it.

    An array that is gathered may have the layout that it moves to from the start, or what is
    computed from it may keep the layout that it has. Its mesh axes may shard another dimension: for
    the operands of a product that sums over devices, one that the product only maps. The arguments
    need not tell anything about these dimensions, as in an optimizer.
    """
    seen = set[Change]()
    for step in view.steps:
        nbytes = view.base.equations.get(id(step.place.equation), 0.0)
        if step.name not in ADDED or step.place.is_backward or not nbytes:
            continue
        for value, layout, weight in _other_layouts(view, step):
            one = view.traced_value(value)
            if one is None or one.manual or one.argument or one.layout is not None:
                continue
            if one.shape != value.shape or not any(layout) or len(layout) < 2 or not one.line:
                continue
            change = make_constraint(one, layout)
            if change not in seen and view.fits(layout, one.shape):
                seen.add(change)
                yield weight * nbytes, Candidate(change)


def _other_layouts(view: FunctionView, step: Step) -> Iterator[tuple[Value, Layout, float]]:
    """Layouts that may do without an exchange, each with the array and how likely it is."""
    given, made = view.before_exchange(step.inputs[0]), step.outputs[0]
    axes = {*exchange_axes(step)}
    if step.name not in _MOVED:  # sums that rows or parameters need are by design
        product = view.makers.get(id(given))
        if product is not None and product.name == 'dot_general':
            _, batch = product.params['dimension_numbers']
            for operand, dims in zip(product.inputs[:2], batch, strict=True):
                value = view.before_exchange(operand)
                yield from ((value, layout, 1.0) for layout in _elsewhere(value, axes, dims))
        return
    readers = view.readers.get(id(made), [])
    yield given, tuple(own or () for own in made.axes), _KEPT
    for reader in readers:
        for one in reader.outputs if reader.name not in KINDS else ():
            if one.shape == given.shape:
                yield one, tuple(own or () for own in given.axes), _KEPT
    if step.name == 'all-gather' and not any(one.name in PRODUCTS for one in readers):
        dims = range(len(given.shape))
        yield from ((given, layout, _KEPT) for layout in _elsewhere(given, axes, dims))


def _elsewhere(value: Value, axes: Collection[str], dims: Iterable[int]) -> Iterator[Layout]:
    """Layouts of an array with some mesh axes at another one of some dimensions."""
    now = [own or () for own in value.axes]
    moved = tuple(a for own in now for a in own if a in axes)
    rest = [tuple(a for a in own if a not in axes) for own in now]
    for d in dims:
        if moved and not now[d]:
            yield tuple(moved if e == d else kept for e, kept in enumerate(rest))


def _as_written(view: FunctionView, value: Value) -> Value:
    """The result of an einsum, whose product has other dimensions first; or the value itself."""
    users = [one for one in view.possible.graph.users(value) if not one.backward]
    is_turned = len(users) == 1 and users[0].primitive == 'transpose'
    return users[0] if is_turned and users[0].line == value.line else value


def find_pins(view: FunctionView) -> tuple[Candidate, ...]:
    """Constraints that only compiling can judge, the best first.

    If a program sends far more than its layouts need, a layout has spread in the compiler to where
    it does not fit: from a residual that is split along the sequence into the products of
    attention, for example. A constraint on one of these products stops it.

    Args:
      view: the function.
    """
    moved: dict[str, float] = collections.defaultdict(float)
    for c, evidence in view.exchanges:
        value = None if evidence is None else evidence.value
        if evidence is not None and value is not None and c.kind in _MOVING and not value.argument:
            for line in {evidence.made_at, evidence.used_at, value.line}:
                moved[line] += c.total_bytes
    added = [
        one for _, one in add_constraints(view, tensors_first=True) if _source(one.change) in moved
    ]
    added.sort(key=lambda one: -moved[_source(one.change)])
    return tuple(added[:_MOST])


def _source(change: Change) -> str:
    return str(getattr(change, 'source', ''))


def lay_out_experts(view: FunctionView) -> Iterator[Candidate]:
    """Constraints of one shape, with the experts over the axis of their kernels: each, and all.

    What goes into the experts may need another layout than what comes out of them, and may be made
    in the layout that it has now.
    """
    groups: dict[tuple[tuple[int, ...], object], list[Value]] = collections.defaultdict(list)
    for _, value in view.constraints():
        groups[value.shape, value.layout].append(value)
    for (count, axes), (shape, group) in (
        (stack, (value[0], found))
        for stack in dict.fromkeys(_stacks(view))
        for value, found in groups.items()
    ):
        layout = list(group[0].layout or ())
        rows = next((d for d, own in enumerate(layout) if {*axes} <= {*own}), None)
        number = next((d for d, n in enumerate(shape) if n == count and d != rows), None)
        if rows is None or number is None or layout[number] or len(shape) < 3:
            continue
        layout[rows] = tuple(a for a in layout[rows] if a not in axes)
        layout[number] = axes
        if view.fits(tuple(layout), shape):
            parts = [make_constraint(one, tuple(layout), replaces=True) for one in group]
            for part, one in zip(parts, group, strict=True):
                if len(parts) == 1 or _goes_into(view, one):
                    yield Candidate(part)
                    yield Candidate(dataclasses.replace(part, replaces=False), weight=_AFTER)
            if len(parts) > 1:
                yield Candidate(JoinedChange(parts=tuple(parts)))


def _goes_into(view: FunctionView, value: Value) -> bool:
    """Whether a product with a parameter takes a value."""
    operands = (o for one in view.possible.graph.products_of(value) for o in one.operands)
    rows = (view.rows.get(one.argument) for one in operands)
    return any(row is not None and row.role == 'parameters' for row in rows)


def _stacks(view: FunctionView) -> Iterator[tuple[int, Axes]]:
    """The number of experts, and the mesh axes of their kernels, of products stacked along them."""
    for value in view.values:
        if value.primitive != 'dot_general' or value.backward or value.maker is None:
            continue
        _, batches = value.maker.params['dimension_numbers']
        for operand, numbers in zip(value.maker.inputs[:2], batches, strict=True):
            row = view.rows.get(operand.argument)
            if (
                row is not None
                and row.role == 'parameters'
                and len(row.shape) == len(operand.shape)
            ):
                yield from (
                    (row.shape[d], axes_of_row(row)[d]) for d in numbers if axes_of_row(row)[d]
                )
