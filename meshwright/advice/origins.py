"""Where the values of a program come from: the steps that make them, and the arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.values import Axes, Step, Value, steps_in, ties
from partitioning.plan.rows import PlanRow


class Origins:
    """Where the values of a program come from.

    Args:
      laid_out: the program, with the layout of its arrays.
      rows: the layout of each array of the arguments.

    Attributes:
      sizes: the size of each mesh axis.
      steps: all steps, also those of loops and calls.
    """

    def __init__(self, laid_out: TracedProgram, rows: Sequence[PlanRow | None]):
        self.sizes = laid_out.axis_sizes
        self.steps = list(steps_in(laid_out.block))
        self._makers = {id(value): step for step in self.steps for value in step.outputs}
        # What a value inside of a loop or a call is outside, and whether a loop takes it apart.
        self._outer = {
            id(tie.inner): (tie.outer, tie.stacked)
            for step in self.steps
            for tie in ties(step)
            if not tie.output
        }
        inputs = laid_out.block.inputs
        self._rows = {id(value): row for value, row in zip(inputs, rows, strict=False)}

    def before_exchange(self, value: Value) -> Value:
        """The array before the exchanges that its layout implies."""
        while (step := self._makers.get(id(value))) is not None and step.name in KINDS:
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
        while id(value) not in self._rows:
            if into_loops and id(value) in self._outer:
                value, stacked = self._outer[id(value)]
                loops += stacked
                continue
            step = self._makers.get(id(value))
            operand = None if step is None else before(step, value)
            if operand is None:
                return None, 0
            value = operand
        return self._rows[id(value)], loops

    def depends_on(self, value: Value, axes: Axes) -> bool:
        """Whether an array is computed from arguments that are sharded over mesh axes."""
        pending, seen = [value], set[int]()
        while pending:
            one = pending.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if id(one) in self._rows:
                if {*axes} & {axis for own in one.axes for axis in own or ()}:
                    return True
            elif id(one) in self._outer:
                pending.append(self._outer[id(one)][0])
            elif (step := self._makers.get(id(one))) is not None:
                pending += step.inputs
        return False
