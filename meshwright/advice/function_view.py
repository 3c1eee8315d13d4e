"""A function as the finders of changes see it: its arrays, where they come from, its exchanges.

For a hidden layer between an exchange of 8 MB and a product with 'params/up', a `FunctionView`
knows that 4 MB of exchanges are near the layer and near 'params/up', that the layer should be
sharded as the rows of the batch and the columns of 'params/up' are, and which argument the layer
is computed from.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from meshwright.advice.candidates import Match
from meshwright.advice.figures import Estimate
from meshwright.advice.subject import Layout, Subject
from meshwright.causes.cause import ConstraintChange, Effect
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation
from meshwright.causes.layouts import axes_of_row, sharding_of_row
from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.primitives import CONSTRAINTS, MOVES
from meshwright.jaxpr.values import TO_GLOBAL, Axes, Dims, Step, Value, readers_of, steps_in, ties
from meshwright.jaxpr.varying import Varying
from meshwright.program.collectives import Collective
from meshwright.user_lines import user_line
from partitioning.hardware import Chip
from partitioning.plan.rows import PlanRow
from partitioning.products.flops import PRODUCTS

LEAST = 4096  # bytes of an array on a device that is worth a change
_NEAR = 40  # values around an exchange that are looked at
_FREE = 0.9  # the share of the memory of a device that a function may use with a change


class FunctionView:
    """A function with the layout of its arrays, and the exchanges of its compiled program.

    Args:
      subject: the function.
      laid_out: its steps, with the layout of their arrays.
      explanation: the causes of its exchanges.
      base: what it sends and holds by formula.
      chip: the chip.

    Attributes:
      rows: the layout of each argument, by its path.
      sizes: the size of each mesh axis.
      steps: all steps, with the steps inside loops and calls.
      values: the values of the trace, with their names.
      exchanges: each exchange of the compiled program, with what it moves.
      sends: the bytes that a device sends in the compiled program.
      near_values: the bytes of the exchanges around each value, by its id.
      parameters: the bytes of the exchanges around each argument, by its path.
    """

    def __init__(
        self,
        subject: Subject,
        laid_out: TracedProgram,
        explanation: Explanation,
        base: Estimate,
        chip: Chip | None,
    ):
        self.subject, self.laid_out, self.base = subject, laid_out, base
        self.explanation = explanation
        self.traced, self.possible = explanation.traced, explanation.possible
        self.rows, self.sizes = subject.by_path, laid_out.axis_sizes
        self.values = self.traced.values
        known = zip(explanation.collectives, explanation.evidence, strict=True)
        self.exchanges: list[tuple[Collective, Evidence | None]] = [(c, e) for (c, _), e in known]
        self.sends = sum(c.total_bytes for c, _ in self.exchanges)
        self.batch = [r for r in self.rows.values() if r.role == 'other' and r.shape]
        self.near_values: dict[int, tuple[float, Value]] = {}
        self.parameters: dict[str, float] = collections.defaultdict(float)
        self._limit = None if chip is None else _FREE * chip.hbm_bytes_per_device
        self._weigh()
        self.steps = list(steps_in(laid_out.block))
        self.makers = {id(value): step for step in self.steps for value in step.outputs}
        pairs = [tie for step in self.steps for tie in ties(step)]
        # What a value inside of a loop or a call is outside, and whether a loop takes it apart.
        self._outer = {id(t.inner): (t.outer, t.stacked) for t in pairs if not t.output}
        self._inner = {id(tie.outer): tie.inner for tie in pairs if tie.output}
        inputs = laid_out.block.inputs
        self._given = {id(value): row for value, row in zip(inputs, subject.rows, strict=False)}

    def _weigh(self) -> None:
        """Gives the bytes of each exchange to the values and the parameters around it."""
        graph = self.possible.graph
        for value in self.values:
            nbytes = self.base.equations.get(id(value.place.equation), 0.0)
            if not nbytes:
                continue
            for number, near in enumerate(itertools.islice(graph.near(value), _NEAR)):
                twin = graph.forward_twin(near) or near
                weight, _ = self.near_values.get(id(twin), (0.0, twin))
                self.near_values[id(twin)] = weight + nbytes / (2 + number), twin
                for operand in (*near.operands, near):
                    if operand.argument:
                        self.parameters[operand.argument] += nbytes / (2 + number)

    # Exchanges

    def num_devices(self, axes: Iterable[str]) -> int:
        """The number of devices along mesh axes."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def sent_by(self, match: Match) -> float:
        """The bytes of the exchanges that come from a place."""
        return sum(c.total_bytes for c, e in self.exchanges if match.fits(c, e))

    def saving(self, nbytes: float) -> Effect:
        """What a change does with which a device sends so many bytes less, and holds the same."""
        peak = self.base.peak
        return Effect(sent=(self.sends, self.sends - nbytes), peak=(peak, peak))

    # Where arrays come from

    @functools.cached_property
    def readers(self) -> dict[int, list[Step]]:
        """The steps that read each value, by its id."""
        return readers_of(self.steps)

    @functools.cached_property
    def _by_equation(self) -> dict[int, list[Value]]:
        """The values of the trace that each equation makes, by its id."""
        found: dict[int, list[Value]] = collections.defaultdict(list)
        for value in self.values:
            found[id(value.place.equation)].append(value)
        return found

    def traced_value(self, value: Value) -> Value | None:
        """The value of the trace, with its names, that a laid-out array is."""
        step = self.makers.get(id(value))
        made = [] if step is None else self._by_equation.get(id(step.place.equation), [])
        return next((one for one in made if one.shape == value.shape), None)

    def is_used(self, value: Value) -> bool:
        """Whether more of a value is used than its shape, as by jnp.zeros_like."""
        pending, results = [value], set(map(id, self.traced.results))
        while pending:
            one = pending.pop()
            users = self.possible.graph.users(one)
            if id(one) in results or any(user.primitive not in MOVES for user in users):
                return True
            pending += users
        return False

    def is_for_backward(self, step: Step) -> bool:
        """Whether a step is of a backward pass, or takes something out of a shard_map for it."""
        return step.place.is_backward or (
            step.name == TO_GLOBAL
            and all(
                one.place.is_backward or one.is_border
                for made in step.outputs
                for one in self.readers.get(id(made), [])
            )
        )

    def line_of(self, step: Step) -> str:
        """The user's 'file:line' of a step: the line that calls a helper, and not the helper's."""
        return user_line(step.place.lines, self.traced.helpers or frozenset())

    @functools.cached_property
    def varying(self) -> Varying:
        """Along which axes the devices of shard_maps have different arrays."""
        return Varying(self.laid_out.block)

    def before_exchange(self, value: Value) -> Value:
        """The array before the exchanges that its layout implies."""
        while (step := self.makers.get(id(value))) is not None and step.name in KINDS:
            value = step.inputs[0]
        return value

    def argument_of(
        self,
        value: Value,
        before: Callable[[Step, Value], Value | None],
        *,
        into_loops: bool = True,
    ) -> tuple[PlanRow | None, int]:
        """The argument that an array is made of, and how many loops take the argument apart.

        Args:
          value: the array.
          before: the operand of the step that makes a value to follow, or None to find nothing.
          into_loops: whether the array may be inside of loops and calls.
        """
        loops = 0
        while id(value) not in self._given:
            if into_loops and id(value) in self._outer:
                value, stacked = self._outer[id(value)]
                loops += stacked
                continue
            step = self.makers.get(id(value))
            operand = None if step is None else before(step, value)
            if operand is None:
                return None, 0
            value = operand
        return self._given[id(value)], loops

    def sources_of(self, value: Value) -> list[Value]:
        """The arrays that an array is computed from, or is a copy of, also in loops and calls."""
        if id(value) in self._given:
            return []
        if id(value) in self._outer:
            return [self._outer[id(value)][0]]
        if id(value) in self._inner:
            return [self._inner[id(value)]]
        step = self.makers.get(id(value))
        return [] if step is None else step.inputs

    def depends_on(self, value: Value, axes: Axes) -> bool:
        """Whether an array is computed from arguments that are sharded over mesh axes."""
        pending, seen = [value], set[int]()
        while pending:
            one = pending.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            is_sharded = {*axes} & {axis for own in one.axes for axis in own or ()}
            if id(one) in self._given and is_sharded:
                return True
            pending += self.sources_of(one)
        return False

    # What is known of their layouts

    def can_hold(self, nbytes: float) -> bool:
        """Whether devices have room for so many bytes more, as far as is known."""
        return self._limit is None or self.base.peak + nbytes <= self._limit

    @functools.cached_property
    def used(self) -> frozenset[str]:
        """The paths of the arguments that products and lookups take, unlike averages of them."""
        uses = (v for v in self.values if v.primitive in PRODUCTS | {'gather'})
        return frozenset(one.argument for value in uses for one in value.operands)

    @functools.cached_property
    def rows_axes(self) -> Axes:
        """The mesh axes over which the rows of the batch are sharded, or should be."""
        votes: collections.Counter[Axes] = collections.Counter()
        for row in self.batch:
            votes[axes_of_row(row)[0]] += 1
        found = [axes for axes, _ in votes.most_common() if axes]
        return found[0] if found else self.possible.layouts.batch_axes

    @functools.cached_property
    def data_axes(self) -> frozenset[str]:
        """The mesh axes over which any dimension of the batch is sharded."""
        given = [row for row in self.rows.values() if row.role == 'other']
        return frozenset(axis for row in given for axes in axes_of_row(row) for axis in axes)

    def constraints(self) -> list[tuple[float, Value]]:
        """The constraints of the forward pass by line and shape, with the bytes around them."""
        sites: dict[tuple[str, tuple[int, ...]], tuple[float, Value]] = {}
        for value in self.values:
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
        lost = sharding_of_row(row) - {a for o in value.layout for a in o}
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
