"""Lookups in wide arrays: of rows that are projected afterwards, and of few rows of whole tables.

    messages = nodes[senders] @ w              # nodes (4096, 1024) over 'data', w (1024, 64)
    messages = (nodes @ w)[senders]            # moves rows of 64 numbers, and not of 1,024

Any sum of rows may come between the two: a mean over neighbours, or the sum of all messages to a
node. Compilers move the rows as they are looked up.

A table of which a step looks up few rows has a gradient of zeros, nearly. It is summed in full over
all devices if each of them has the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.advice.candidates import GATHERS, SUMS, Candidate, Match, Told
from meshwright.advice.figures import LEAST_SAVED, shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.advice.subject import Layout
from meshwright.causes.cause import CodeChange, LayoutChange, over
from meshwright.causes.layouts import axes_of_row
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.implied_exchanges import ADDED
from meshwright.jaxpr.primitives import MOVES, SCATTERS
from meshwright.jaxpr.values import Axes, Step, Value
from partitioning.plan.rows import PlanRow
from partitioning.products.flops import PRODUCTS

_NARROWER = 0.6  # the share of the numbers of a row that may be left
_FEW = 0.125  # the share of the rows of a table that a step looks up
_MOST = 0.75  # the share of what a device holds of parameters that a table and its moments are
_LINEAR = MOVES | ADDED | SCATTERS | {'reduce_sum', 'add', 'sub', 'mul', 'div', 'neg'}
_KINDS = GATHERS | SUMS | {'all-to-all', 'collective-permute'}


class _Projected(NamedTuple):
    """A lookup whose rows are only projected.

    Attributes:
      step: the lookup.
      given: the array in which it looks up.
      axes: the mesh axes of its rows.
      products: the products with what it looks up, or with sums of that.
      width: the numbers that the products make of a row.
      sums: the rows of all sums in which the looked-up rows are added up before the products.
    """

    step: Step
    given: Value
    axes: Axes
    products: tuple[Step, ...]
    width: int
    sums: int


def find_early_lookups(view: FunctionView) -> Iterator[Told]:
    """Finds these lookups; those of one line are one change."""
    lines: dict[str, list[_Projected]] = {}
    for step in view.steps:
        if (one := _read(view, step)) is not None:
            lines.setdefault(view.line_of(step), []).append(one)
    for line, group in lines.items():
        yield from _tell(view, line, group)


def _read(view: FunctionView, step: Step) -> _Projected | None:
    """The lookup of a step, if its rows are wider than what products make of them."""
    if step.name != 'gather' or step.place.is_backward or len(step.inputs) != 2:
        return None
    given, made = view.before_exchange(step.inputs[0]), step.outputs[0]
    numbers = step.params['dimension_numbers']
    axes = tuple(a for a in (given.axes or [()])[0] or () if view.sizes.get(a, 1) > 1)
    rows = (0,)
    if numbers.start_index_map != rows or numbers.collapsed_slice_dims != rows or given.manual:
        return None
    whole = tuple(step.params['slice_sizes'])[1:] == given.shape[1:]
    if len(given.shape) != 2 or not whole or not axes or given.nbytes < LEAST:
        return None
    if given.shape[0] * given.shape[1] > made.size:  # it would project more rows than are used
        return None
    products, sums = _products(view, made)
    width = sum(one.outputs[0].shape[-1] for one in products)
    if not products or width > _NARROWER * given.shape[1]:
        return None
    return _Projected(step, given, axes, tuple(products), width, sums)


def _products(view: FunctionView, made: Value) -> tuple[list[Step], int]:
    """The products that sum over the columns of looked-up rows; [] if they are used otherwise.

    Returns:
      The products, and the rows of the sums in which rows are added up before them.
    """
    columns, found, sums = {id(made): len(made.shape) - 1}, list[Step](), 0
    for step in view.steps:
        given = [(n, one) for n, one in enumerate(step.inputs) if id(one) in columns]
        if not given or view.is_for_backward(step):
            continue
        number, value = given[0]
        d = columns[id(value)]
        if step.name == 'dot_general':
            if not _is_projection(step, number, d) or len(given) > 1:
                return [], 0
            found.append(step)
            continue
        after = _column_after(step, number, d)
        if after is None or (step.name in ('mul', 'div') and len(given) > 1):
            return [], 0
        columns |= {id(one): after for one in step.outputs}
        sums += step.outputs[0].shape[0] if step.name in SCATTERS else 0
    return found, sums


def _is_projection(step: Step, number: int, d: int) -> bool:
    """Whether a product sums over one dimension of an operand only, with a matrix."""
    summed, batch = step.params['dimension_numbers']
    matrix = step.inputs[1 - number]
    return tuple(summed[number]) == (d,) and not batch[0] and len(matrix.shape) == 2


def _column_after(step: Step, number: int, d: int) -> int | None:
    """The dimension of the columns in the result of a step that is linear in rows, if it is one."""
    if step.bodies or step.is_border or len(step.outputs) != 1:
        return None
    if step.name == 'concatenate':
        return d if step.params['dimension'] in (d, 0) else None
    if step.name not in _LINEAR or (step.name == 'div' and number == 1):
        return None
    if step.name in SCATTERS and (number != 2 or 'add' not in step.name):
        return None
    factors = find_factors(step)
    dim = factors.inputs[number][d]
    if not factors.known or len(dim) != 1 or dim[0] in factors.summed:
        return None
    if factors.sizes[dim[0]] != step.inputs[number].shape[d]:
        return None
    found = [e for e, own in enumerate(factors.outputs[0]) if own == dim]
    return found[0] if len(found) == 1 else None


def _more(view: FunctionView, one: _Projected) -> float:
    """What the gradient of projected rows sends if now nothing needs a gradient of the rows."""
    backward = [step for step in view.steps if step.place.is_backward]
    if not backward or any(s.name in SCATTERS and s.line == one.step.line for s in backward):
        return 0.0
    n = view.num_devices(one.axes)
    rows = 2 * one.given.shape[0] + one.sums  # summed over devices, and gathered for each sum
    return (n - 1) / n * rows * one.width * one.given.nbytes / one.given.size


def _tell(view: FunctionView, line: str, group: list[_Projected]) -> Iterator[Told]:
    first, saved, matches = group[0], 0.0, []
    for one in group:
        match = Match(
            axes=one.axes,
            kinds=_KINDS,
            lines=frozenset([line, one.step.line]),
            shapes=frozenset([shape_of(one.given), shape_of(one.step.outputs[0])]),
        )
        if match in matches:
            continue
        moved = view.sent_by(match)
        saved += (1 - one.width / one.given.shape[1]) * moved - _more(view, one)
        matches.append(match)
    if saved <= LEAST_SAVED * view.sends:
        return
    wide, narrow, where = first.given.shape[1], first.width, view.line_of(first.products[0])
    for match in matches:
        yield Told(
            match=match,
            line=line,
            why=(
                f'{line} looks up rows of {first.given.shape}, which are sharded over '
                f'{over(first.axes)}, and {where} makes {narrow:,} numbers of the {wide:,} of each'
            ),
            change=CodeChange(
                source=line,
                text=(
                    f'project before the lookup at {line}: write (x @ w)[rows] in place of '
                    f'x[rows] @ w, with the matrix of {where}, so that rows of {narrow:,} numbers '
                    f'move, and not of {wide:,}'
                ),
            ),
            effect=view.saving(saved),
        )


def lay_out_tables(view: FunctionView) -> Iterator[Candidate]:
    """Tables that are whole on each device, are most of all parameters, and are hardly looked up.

    Parameters may be whole by choice, as in data parallel training. But the gradient of such a
    table is summed over all devices in full, and nearly all of it is zeros.
    """
    state = [row for row in view.rows.values() if row.role in ('parameters', 'optimizer')]
    total = sum(row.bytes_per_device for row in state)
    axes = view.rows_axes
    for row in state:
        shape, looked_up = tuple(row.shape), _rows_looked_up(view, row)
        moments = [m for m, owner in view.subject.parameter_of.items() if owner == row.path]
        held = sum(view.rows[path].bytes_per_device for path in (row.path, *moments))
        if row.role != 'parameters' or len(shape) < 2 or any(axes_of_row(row)) or not looked_up:
            continue
        if looked_up > _FEW * shape[0] or held < _MOST * total or not axes:
            continue
        layout: Layout = (axes, *[()] * (len(shape) - 1))
        if view.fits(layout, shape):
            yield Candidate(LayoutChange(path=row.path, layout=layout), keeps_layout=False)


def _rows_looked_up(view: FunctionView, row: PlanRow) -> int:
    """How many rows of a table lookups take; 0 if anything else uses it."""
    found = 0
    for value in view.values:
        if value.backward or value.primitive not in PRODUCTS | {'gather'}:
            continue
        if value.primitive == 'gather' and value.operands[0].argument == row.path:
            found += value.size // math.prod(row.shape[1:])
        elif any(one.argument == row.path for one in value.operands):
            return 0
    return found
