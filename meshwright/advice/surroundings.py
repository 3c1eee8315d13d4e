"""What is known of the arrays around the exchanges of a function, from which changes follow.

For a hidden layer between an exchange of 8 MB and a product with 'params/up', `Surroundings` knows
that 4 MB of exchanges are near the layer and near 'params/up', and that the layer should be sharded
as the rows of the batch and the columns of 'params/up' are.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from meshwright.advice.variants import Layout, Subject
from meshwright.causes.cause import Change, ConstraintChange
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.possible_changes import PossibleChanges
from meshwright.jaxpr.naming import TracedValues
from meshwright.jaxpr.primitives import CONSTRAINTS
from meshwright.jaxpr.values import Axes, Dims, Value
from partitioning.plan.rows import PlanRow
from partitioning.products.flops import PRODUCTS

REMOVED = 0.95  # the weight of leaving a constraint out: others may want it
_NEAR = 40  # values around an exchange that are looked at


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change that is worth an estimate.

    Attributes:
      change: the change.
      keeps_layout: whether all parameters keep their layout.
      weight: how likely it is what the author meant, next to others that save as much.
      of_state: whether it only lays out gradients, updates and moments.
    """

    change: Change
    keeps_layout: bool = True
    weight: float = 1.0
    of_state: bool = False


class Surroundings:
    """The arrays of a function, with the bytes of the exchanges around each of them.

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
        self.subject, self.traced, self.possible = subject, traced, possible
        self.rows = subject.by_path
        self.batch = [r for r in self.rows.values() if r.role == 'other' and r.shape]
        self.near_values: dict[int, tuple[float, Value]] = {}
        self.parameters: dict[str, float] = collections.defaultdict(float)
        self._weigh(equations)

    def _weigh(self, equations: Mapping[int, float]) -> None:
        """Gives the bytes of each exchange to the values and the parameters around it."""
        graph = self.possible.graph
        for value in self.traced.values:
            nbytes = equations.get(id(value.place.equation), 0.0)
            if not nbytes:
                continue
            for number, near in enumerate(itertools.islice(graph.near(value), _NEAR)):
                twin = graph.forward_twin(near) or near
                weight, _ = self.near_values.get(id(twin), (0.0, twin))
                self.near_values[id(twin)] = weight + nbytes / (2 + number), twin
                for operand in (*near.operands, near):
                    if operand.argument:
                        self.parameters[operand.argument] += nbytes / (2 + number)

    @functools.cached_property
    def used(self) -> frozenset[str]:
        """The paths of the arguments that products and lookups take, unlike averages of them."""
        uses = (v for v in self.traced.values if v.primitive in PRODUCTS | {'gather'})
        return frozenset(one.argument for value in uses for one in value.operands)

    @property
    def rows_axes(self) -> Axes:
        """The mesh axes over which the rows of the batch are sharded, or should be."""
        votes: collections.Counter[Axes] = collections.Counter()
        for row in self.batch:
            votes[axes_of_row(row)[0]] += 1
        found = [axes for axes, _ in votes.most_common() if axes]
        return found[0] if found else self.possible.layouts.batch_axes

    def constraints(self) -> list[tuple[float, Value]]:
        """The constraints of the forward pass by line and shape, with the bytes around them."""
        sites: dict[tuple[str, tuple[int, ...]], tuple[float, Value]] = {}
        for value in self.traced.values:
            if value.primitive not in CONSTRAINTS or value.layout is None or value.backward:
                continue
            if len(value.shape) < 2 or value.manual:
                continue
            weight, _ = self.near_values.get(id(value), (0.0, value))
            held, _ = sites.get((value.line, value.shape), (0.0, value))
            sites[value.line, value.shape] = held + weight, value
        return sorted(sites.values(), key=lambda pair: -pair[0])

    def implied(self, value: Value, *, tensors_first: bool = False) -> Layout:
        """The mesh axes of the dimensions of a value in the arguments that they come from.

        Rows of the batch come first. Parameters shard activations over the axes of tensors only. A
        gradient and an update have the layout of their array.

        Args:
          value: the value.
          tensors_first: whether an axis of heads and of the sequence is for the heads, as between
            the products of attention under sequence parallelism.
        """
        if (row := self.row_of_state(value)) is not None:
            return axes_of_row(row)
        rows_axes, taken = self.rows_axes, set[str]()
        found: list[Axes] = [()] * len(value.shape)
        for is_row in (True, False):
            for number, dim in enumerate(_dims_of(value)):
                row = self.rows.get(dim.argument) if dim else None
                if dim is None or row is None or (row.role == 'other') != is_row:
                    continue
                if is_row:
                    axes = rows_axes if dim.number == 0 else axes_of_row(row)[dim.number]
                    if tensors_first and dim.number:
                        continue
                else:
                    kept = axes_of_row(row)[dim.number] if dim.number < len(row.shape) else ()
                    axes = tuple(a for a in kept if a not in rows_axes)
                fits = self.possible.layouts.divides(axes, value.shape[number])
                if axes and fits and not taken & {*axes}:
                    found[number] = axes
                    taken |= {*axes}
        return tuple(found)

    def gathers_parameter(self, value: Value) -> bool:
        """Whether a constraint makes a parameter whole along axes of the rows, for its use.

        Its backward pass asks for a whole gradient. Formulas see a sum on all devices there, and
        compilers scatter it.
        """
        row = self.rows.get(value.argument)
        if row is None or row.role != 'parameters' or value.layout is None:
            return False
        lost = {a for axes in axes_of_row(row) for a in axes} - {a for o in value.layout for a in o}
        return bool(lost) and lost <= {*self.rows_axes}

    def row_of_state(self, value: Value) -> PlanRow | None:
        """The array whose gradient or update a value is, if it has its shape and is laid out."""
        row = self.rows.get(value.gradient_of or value.update_of)
        if row is None or tuple(row.shape) != value.shape or not any(axes_of_row(row)):
            return None
        return row

    def fits(self, layout: Layout, shape: Sequence[int]) -> bool:
        """Whether the devices of a layout divide all dimensions."""
        pairs = zip(layout, shape, strict=True)
        return all(self.possible.layouts.divides(axes, size) for axes, size in pairs)


def _dims_of(value: Value) -> Dims:
    """The dimensions of a value; an array whose rows were put into another order keeps its own."""
    given = value.operands[0] if value.operands else value
    if value.primitive != 'gather' or given.shape != value.shape:
        return value.dims
    return tuple(own or before for own, before in zip(value.dims, given.dims, strict=True))


def rearranged(layout: Layout) -> Iterator[Layout]:
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


def make_constraint(
    value: Value,
    layout: Layout,
    *,
    replaces: bool = False,
    shapes: tuple[tuple[int, ...], ...] = (),
) -> ConstraintChange:
    """A constraint on a value, or another layout in place of the constraint that it has."""
    return ConstraintChange(
        source=value.line,
        shape=value.shape,
        names=(None,) * len(value.shape),
        layout=layout,
        replaces=replaces,
        shapes=shapes,
    )
