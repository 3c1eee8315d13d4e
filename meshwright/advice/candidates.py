"""The changes that are worth an estimate: moments, results, the batch, constraints, parameters.

They follow from names, uses and the bytes around them. For a hidden layer of 'data' rows that a
constraint lays out as PartitionSpec('model', 'data'), while the rows of the batch are sharded over
'data' and the columns of the parameter that makes it over 'model':

    write with_sharding_constraint(x, PartitionSpec('data', 'model')) at model.py:31
    leave out the constraint at model.py:31
    ...
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from meshwright.advice.variants import Layout, Subject
from meshwright.causes.cause import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    LayoutChange,
    StateChange,
)
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.possible_changes import PossibleChanges
from meshwright.causes.wording import spec_text
from meshwright.jaxpr.naming import TracedValues
from meshwright.jaxpr.primitives import CONSTRAINTS
from meshwright.jaxpr.values import Axes, Value
from partitioning.plan.rows import PlanRow
from partitioning.products.flops import PRODUCTS
from partitioning.rules import sharding_axes

_ELSEWHERE = 0.85  # the weight of a layout that only its bytes speak for
_BATCH = 3.0  # the weight of sharding a batch that every device has
_NEAR = 40  # values around an exchange that are looked at
_MADE = PRODUCTS | {'gather', 'add', 'custom_vjp_call', 'reduce_sum'}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change that is worth an estimate.

    Attributes:
      change: the change.
      keeps_layout: whether all parameters keep their layout.
      weight: how likely it is what the author meant, next to others that save as much.
    """

    change: Change
    keeps_layout: bool = True
    weight: float = 1.0


class Candidates:
    """Lists changes, those with the most bytes around them first.

    Args:
      subject: the function.
      traced: its values.
      possible: what is known of their layouts.
      equations: the bytes of the exchanges around each equation, by its id.
    """

    def __init__(
        self,
        subject: Subject,
        traced: TracedValues,
        possible: PossibleChanges,
        equations: Mapping[int, float],
    ):
        self._subject, self._traced, self._possible = subject, traced, possible
        self._rows = subject.by_path
        self._batch = [r for r in self._rows.values() if r.role == 'other' and r.shape]
        self._near_values: dict[int, tuple[float, Value]] = {}
        self._parameters: dict[str, float] = collections.defaultdict(float)
        self._weigh(equations)

    def _weigh(self, equations: Mapping[int, float]) -> None:
        """Gives the bytes of each exchange to the values and the parameters around it."""
        graph = self._possible.graph
        for value in self._traced.values:
            nbytes = equations.get(id(value.place.equation), 0.0)
            if not nbytes:
                continue
            for number, near in enumerate(itertools.islice(graph.near(value), _NEAR)):
                twin = graph.forward_twin(near) or near
                weight, _ = self._near_values.get(id(twin), (0.0, twin))
                self._near_values[id(twin)] = weight + nbytes / (2 + number), twin
                for operand in (*near.operands, near):
                    if operand.argument:
                        self._parameters[operand.argument] += nbytes / (2 + number)

    @property
    def rows_axes(self) -> Axes:
        """The mesh axes over which the rows of the batch are sharded, or should be."""
        votes: collections.Counter[Axes] = collections.Counter()
        for row in self._batch:
            votes[axes_of_row(row)[0]] += 1
        found = [axes for axes, _ in votes.most_common() if axes]
        return found[0] if found else self._possible.layouts.batch_axes

    def row_of(self, path: str) -> PlanRow | None:
        """The layout of an argument."""
        return self._rows.get(path)

    # Arguments and results

    def of_state(self) -> Iterator[Candidate]:
        """Moments like their parameters, results like what they replace, and the batch."""
        for change in (self._moments(), self._results()):
            if change is not None:
                yield Candidate(change)
        is_whole = not any(axes_of_row(row)[0] for row in self._batch)
        for change in self._batches():  # constraints alone would mend what comes after it
            yield Candidate(change, weight=_BATCH if is_whole else 1.0)

    def _moments(self) -> StateChange | None:
        pairs = [
            (self._rows[moment], self._rows[owner])
            for moment, owner in self._subject.parameter_of.items()
            if axes_of_row(self._rows[moment]) != axes_of_row(self._rows[owner])
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

    def _results(self) -> StateChange | None:
        """Results that replace an argument, in the layout of that argument."""
        call, found = self._subject.call, list[tuple[int, PlanRow]]()
        for number, aval in enumerate(call.jaxpr.out_avals):
            row = self._rows.get(self._subject.replaced[number])
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
            text=f'return {row.path} as {spec_text(axes_of_row(row))}, like the argument{more}',
        )

    def _batches(self) -> Iterator[StateChange]:
        """The rows of the batch over mesh axes that constraints name, or over any."""
        if not self._batch:
            return
        largest = max(self._batch, key=lambda row: math.prod(row.shape))
        now = axes_of_row(largest)[0]
        votes = [self._possible.links.axes_of(row.path, 1)[0] for row in self._batch]
        asked = list(dict.fromkeys(axes for axes in votes if axes and axes != now))
        if not asked and not now:
            axes = [a for a, size in self._possible.layouts.sizes.items() if size > 1]
            asked = [(axis,) for axis in axes] + ([tuple(axes)] if len(axes) > 1 else [])
        same = [r for r in self._batch if r.shape[0] == largest.shape[0]]
        for wanted in asked:
            if self._possible.layouts.divides(wanted, largest.shape[0]):
                layouts = tuple((r.path, (wanted, *_without(r, wanted))) for r in same)
                paths = ' and '.join(r.path for r in same[:3])
                text = f'shard the rows of the batch: lay out {paths} as {spec_text(layouts[0][1])}'
                yield StateChange(layouts=layouts, results=(), text=text)

    # Constraints

    def of_constraints(self) -> Iterator[tuple[float, Candidate]]:
        """For each line with constraints, the layout that its array has elsewhere, or none."""
        sites = [
            (weight, value) for weight, value in self._constraints() if not self._fits_dims(value)
        ]
        for weight, value in sites:
            implied = self.implied(value)
            if implied != value.layout:
                others = (v for _, v in sites if v.line == value.line and v.shape != value.shape)
                alike = tuple(v.shape for v in others if self._is_alike(v, value, implied))
                change = _constraint(value, implied, replaces=True)
                yield weight, Candidate(dataclasses.replace(change, shapes=alike))
            yield 0.9 * weight, Candidate(ConstraintRemoval(source=value.line))

    def around(self, change: Change | None) -> Iterator[Candidate]:
        """Other layouts at the line of a constraint that is better left out or replaced.

        Args:
          change: a change at this line; None for the line with the most bytes around it.
        """
        sites = [value for _, value in self._constraints()]
        if change is not None:
            source = getattr(change, 'source', '')
            sites = [value for value in sites if value.line == source]
        sites = [value for value in sites if not self._fits_dims(value)]
        for value in sites[: None if change is not None else 1]:
            layout = value.layout or ()
            for other in (*_rearranged(layout), *self._filled(layout)):
                if self._fits(other, value.shape):
                    change = _constraint(value, other, replaces=True)
                    yield Candidate(change, weight=_ELSEWHERE)

    def _is_alike(self, other: Value, value: Value, implied: Layout) -> bool:
        """Whether another array of the same line is laid out alike, and should be."""
        return other.layout == value.layout and self.implied(other) == implied

    def _fits_dims(self, value: Value) -> bool:
        """Whether a constraint only says which of the layouts of its dimensions an array has.

        Under sequence parallelism, the length and the columns of a kernel are over the same axis.
        """
        layout = value.layout or ()
        lost = {a for own in self.implied(value) for a in own} - {a for own in layout for a in own}
        pairs = zip(layout, value.dims, strict=True)
        return (
            not lost
            and any(layout)
            and all({*axes} <= {*(dim.axes if dim is not None else ())} for axes, dim in pairs)
        )

    def _filled(self, layout: Layout) -> Iterator[Layout]:
        """Layouts that also use mesh axes which a layout does not use."""
        for axis in self._possible.layouts.unused_axes(layout):
            for number in range(len(layout)):
                if not layout[number]:
                    yield tuple((axis,) if n == number else a for n, a in enumerate(layout))

    def _constraints(self) -> list[tuple[float, Value]]:
        sites: dict[tuple[str, tuple[int, ...]], tuple[float, Value]] = {}
        for value in self._traced.values:
            if value.primitive not in CONSTRAINTS or value.layout is None or value.backward:
                continue
            if len(value.shape) < 2 or value.manual:
                continue
            weight, _ = self._near_values.get(id(value), (0.0, value))
            held, _ = sites.get((value.line, value.shape), (0.0, value))
            sites[value.line, value.shape] = held + weight, value
        return sorted(sites.values(), key=lambda pair: -pair[0])

    def of_missing(self) -> Iterator[tuple[float, Candidate]]:
        """Constraints on what products and lookups around the exchanges make."""
        seen = set[tuple[str, tuple[int, ...]]]()
        for weight, value in sorted(self._near_values.values(), key=lambda pair: -pair[0]):
            key = value.line, value.shape
            if value.primitive not in _MADE or value.backward or value.manual or key in seen:
                continue
            layout = self.implied(value)
            if len(value.shape) > 1 and any(layout) and value.layout is None:
                seen.add(key)
                yield weight, Candidate(_constraint(value, layout))

    def implied(self, value: Value) -> Layout:
        """The mesh axes of the dimensions of a value in the arguments that they come from.

        Rows of the batch come first. Parameters shard activations over the axes of tensors only.
        """
        rows_axes, taken = self.rows_axes, set[str]()
        found: list[Axes] = [()] * len(value.shape)
        for is_row in (True, False):
            for number, dim in enumerate(value.dims):
                row = self._rows.get(dim.argument) if dim else None
                if dim is None or row is None or (row.role == 'other') != is_row:
                    continue
                if is_row:
                    axes = rows_axes if dim.number == 0 else axes_of_row(row)[dim.number]
                else:
                    kept = axes_of_row(row)[dim.number] if dim.number < len(row.shape) else ()
                    axes = tuple(a for a in kept if a not in rows_axes)
                fits = self._possible.layouts.divides(axes, value.shape[number])
                if axes and fits and not taken & {*axes}:
                    found[number] = axes
                    taken |= {*axes}
        return tuple(found)

    # Parameters

    def of_parameters(self) -> Iterator[tuple[float, Candidate]]:
        """Parameters around the exchanges, with the same mesh axes at other dimensions."""
        groups: dict[tuple[object, ...], list[PlanRow]] = collections.defaultdict(list)
        for row in self._rows.values():
            if row.role == 'parameters' and len(row.shape) > 1:
                groups[re.sub(r'\d+', '', row.path), row.shape, str(row.spec)].append(row)
        for rows in groups.values():
            weight = sum(self._parameters.get(row.path, 0.0) for row in rows)
            now = axes_of_row(rows[0])
            if not weight or not any(now) or self._is_looked_up(rows[0]):
                continue
            uses = list(self._possible.like_its_uses(rows[0]))
            held = {axis for axes in now for axis in axes}  # sharding over fewer is another matter
            fitting = [u.layout for u in uses if held <= {a for axes in u.layout for a in axes}]
            others = dict.fromkeys([*fitting, *self._moved(rows[0])])
            for number, layout in enumerate(others):
                if self._fits(layout, rows[0].shape) and layout != now:
                    paths = [row.path for row in rows]
                    change = LayoutChange(path=paths[0], layout=layout, likewise=tuple(paths[1:]))
                    yield weight / (1 + 0.1 * number), Candidate(change, keeps_layout=False)

    def _moved(self, row: PlanRow) -> Iterator[Layout]:
        """Layouts with the same mesh axes at other dimensions; the dimension of layers stays."""
        now, stacked = axes_of_row(row), self._is_scanned(row)
        for layout in _rearranged(now):
            if sorted(layout) == sorted(now) and (not stacked or layout[0] == now[0]):
                yield layout

    def _is_looked_up(self, row: PlanRow) -> bool:
        """Whether the rows of a table are looked up, and are sharded over an axis of tensors."""
        for value in self._traced.values:
            if value.primitive == 'gather' and value.operands[0].argument == row.path:
                dims = [d for d in value.contracted if d is not None and d.argument == row.path]
                return any({*d.axes} - {*self.rows_axes} for d in dims)
        return False

    def _is_scanned(self, row: PlanRow) -> bool:
        value = next((v for v in self._traced.arguments if v.argument == row.path), None)
        return value is not None and any(
            v.argument == row.path and len(v.shape) < len(row.shape)
            for used in self._traced.values
            for v in used.operands
        )

    def _fits(self, layout: Layout, shape: Sequence[int]) -> bool:
        pairs = zip(layout, shape, strict=True)
        return all(self._possible.layouts.divides(axes, size) for axes, size in pairs)


def _rearranged(layout: Layout) -> Iterator[Layout]:
    """Layouts in which two dimensions have changed places, or one has lost its mesh axes."""
    for one, other in itertools.combinations(range(len(layout)), 2):
        if layout[one] != layout[other]:
            new = list(layout)
            new[one], new[other] = new[other], new[one]
            yield tuple(new)
    sharded = [number for number, axes in enumerate(layout) if axes]
    if len(sharded) > 1:
        for number in sharded:
            yield tuple(() if n == number else axes for n, axes in enumerate(layout))


def _without(row: PlanRow, axes: Axes) -> list[Axes]:
    """The layout of all dimensions but the first, without some mesh axes."""
    return [tuple(a for a in held if a not in axes) for held in axes_of_row(row)[1:]]


def _constraint(value: Value, layout: Layout, *, replaces: bool = False) -> ConstraintChange:
    return ConstraintChange(
        source=value.line,
        shape=value.shape,
        names=(None,) * len(value.shape),
        layout=layout,
        replaces=replaces,
    )
