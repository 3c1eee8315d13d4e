"""The check of exchanges that another way of writing the same avoids, from the trace alone.

`explain` finds more, because it reads the compiled program and tries changes. What is found here
needs neither: a gather in a shard_map of which each device keeps a part, or a sum of a large
product of small factors, is in the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.sharding import AxisType, Mesh

from meshwright.advice.figures import estimate_program
from meshwright.advice.function_view import FunctionView
from meshwright.advice.searching import TOLD_BY_TRACE, with_effect
from meshwright.advice.subject import make_subject
from meshwright.calls.held import HeldArray
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation, list_possible_changes
from meshwright.jax_private import TracedCall
from meshwright.jaxpr import TracedProgram, lay_out_trace
from meshwright.jaxpr.exchange_list import exchanges_of, walk_exchanges
from meshwright.jaxpr.naming import TracedValues
from meshwright.program.collectives import Collective
from partitioning.plan.findings import Finding

_LEAST = 0.1  # the share of what a device sends that a change has to save by formula


def find_needless_exchanges(
    traced: TracedCall, mesh: Mesh, held: Sequence[HeldArray]
) -> Iterator[Finding]:
    """Exchanges that the same mathematics does not need, each place once.

    Args:
      traced: the function.
      mesh: its mesh.
      held: the arrays of its arguments.
    """
    if AxisType.Explicit in mesh.axis_types:
        return
    view, seen = _view(traced, mesh, held), set[str]()
    if not view.sends:
        return
    for find in TOLD_BY_TRACE:
        for told in find(view):
            told = told if told.effect is not None else with_effect(view, told)
            if told.effect is None or told.line in seen or not told.line:
                continue
            sent, sends = told.effect.sent
            if sent - sends >= _LEAST * view.sends:
                seen.add(told.line)
                message = f'{told.why}; {told.change.text}'
                yield Finding('warning', 'needless exchange', told.line, message)


def _view(traced: TracedCall, mesh: Mesh, held: Sequence[HeldArray]) -> FunctionView:
    rows = [array.row for array in held]
    laid_out = lay_out_trace(traced, mesh)
    values, possible = list_possible_changes(traced.jaxpr, mesh=mesh, rows=rows)
    pairs = list(_exchanges(laid_out, values))
    explanation = Explanation(
        collectives=tuple((collective, None) for collective, _ in pairs),
        buffers=(),
        replicated=(),
        rematerialized=(),
        evidence=tuple(evidence for _, evidence in pairs),
        traced=values,
        possible=possible,
    )
    base = estimate_program(laid_out)
    assert base is not None
    return FunctionView(make_subject(traced, mesh, rows, values), laid_out, explanation, base, None)


def _exchanges(
    laid_out: TracedProgram, values: TracedValues
) -> Iterator[tuple[Collective, Evidence]]:
    """The exchanges by formula, each with the value that it moves."""
    made = {(id(v.place.equation), v.shape): v for v in (*values.values, *values.arguments)}
    for step, axes, times in walk_exchanges(laid_out):
        given = step.inputs[0]
        line = step.line
        value = made.get((id(given.place.equation), given.shape), given)
        for one in exchanges_of(step, axes, laid_out, times):
            yield (
                one,
                Evidence(
                    kind=one.kind,
                    axes=one.axes,
                    value=value,
                    made_at=value.line or line,
                    used_at=line,
                    asked_at=line,
                    path=step.op_name,
                ),
            )
