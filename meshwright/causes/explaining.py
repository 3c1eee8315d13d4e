"""The cause of every exchange, of the largest buffers and of every copy in a program.

Nothing is compiled. `choosing.find_change` compiles with the changes that the causes suggest.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright.causes.buffers import explain_buffer, explain_replicated
from meshwright.causes.cause import Cause, what_is
from meshwright.causes.evidence import Evidence, find_evidence
from meshwright.causes.exchanges import explain_exchange
from meshwright.causes.layouts import KnownLayouts, names_by_axes
from meshwright.causes.possible_changes import PossibleChanges
from meshwright.causes.value_graph import ValueGraph
from meshwright.causes.value_matching import Matcher
from meshwright.jaxpr.linked_dimensions import LinkedDimensions
from meshwright.jaxpr.naming import TracedValues, trace_values
from meshwright.program.collectives import Collective
from meshwright.program.costs import ProgramCosts
from meshwright.program.hlo_text import HloProgram, parse_hlo
from meshwright.program.peak_memory import LiveArray
from partitioning.plan.rows import PlanRow
from partitioning.rules import LogicalAxisRules, axis_sizes

_NUM_BUFFERS = 20
_WARNING = re.compile(
    r'Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from '
    r'sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) (?:efficiently |without doing a full '
    r'rematerialization of the tensor )?for HLO operation:? %[\w.\-]+ = (?P<array>\w+\[[\d,]*\])'
)
_FRAME = re.compile(r'stack_frame_id=(\d+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The causes of what a program exchanges and holds.

    Attributes:
      collectives: each collective with its cause, in the order of the costs.
      buffers: the largest arrays at the peak, each with its cause.
      replicated: the arguments that devices hold several times, the largest first.
      rematerialized: the compiler's warnings about arrays that it makes whole on every device, each
        with its cause.
      evidence: what each collective moves, in their order.
      traced: the values of the function.
      possible: the changes that one can write for it.
    """

    collectives: tuple[tuple[Collective, Cause | None], ...]
    buffers: tuple[tuple[LiveArray, Cause | None], ...]
    replicated: tuple[tuple[PlanRow, Cause], ...]
    rematerialized: tuple[tuple[str, Cause | None], ...]
    evidence: tuple[Evidence | None, ...]
    traced: TracedValues
    possible: PossibleChanges

    @property
    def weighed(self) -> tuple[tuple[float, Cause], ...]:
        """Every cause with its bytes per device, the largest first."""
        found = [(c.total_bytes, cause) for c, cause in self.collectives if cause is not None]
        found += [(live.nbytes, cause) for live, cause in self.buffers if cause is not None]
        found += [(row.bytes_per_device, cause) for row, cause in self.replicated]
        return tuple(sorted(found, key=lambda pair: -pair[0]))

    @property
    def suspects(self) -> tuple[Cause, ...]:
        """The causes of exchanges and buffers that the layout seems not to need, largest first."""
        return tuple(cause for _, cause in self.weighed if cause.suspect)


def explain_program(
    text: str,
    jaxpr: Any,
    costs: ProgramCosts,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    rows: Sequence[PlanRow | None] = (),
    rules: LogicalAxisRules = (),
    log: str = '',
) -> Explanation:
    """Finds the line, the array and the rule of every exchange and of the largest buffers.

    Nothing is compiled; `find_change` compiles to compare changes.

    Usage:
      traced = step.trace(state, batch)
      compiled = traced.lower().compile()
      explanation = explain_program(
          compiled.as_text(), traced.jaxpr, read_costs(compiled, mesh), mesh=mesh,
          rows=[*plan.rows, *rows_of_batch], rules=partitioner.logical_axis_rules)

    Args:
      text: `compiled.as_text()`.
      jaxpr: the ClosedJaxpr of the same trace, or None.
      costs: the result of `read_costs` or `costs_of_text` for the program.
      mesh: the mesh, or the size of each of its axes.
      rows: the layout of each argument, in the order of `jax.tree.leaves`; None where it is not
        known.
      rules: the logical axis rules under which the function was traced.
      log: what the compiler wrote to the standard error of the process.
    """
    program = parse_hlo(text)
    traced, possible = list_possible_changes(jaxpr, mesh=mesh, rows=rows, rules=rules)
    layouts = possible.layouts
    matcher = Matcher(program, traced, layouts.sizes)
    evidence = tuple(find_evidence(c, matcher, layouts) for c in costs.collectives)
    collectives = tuple(
        (c, explain_exchange(e, possible) if e else None)
        for c, e in zip(costs.collectives, evidence, strict=True)
    )
    exchanges = {c.instruction: cause for c, cause in collectives}
    replicated = [(row, explain_replicated(row, possible)) for row in layouts.rows.values()]
    replicated.sort(key=lambda pair: -pair[0].bytes_per_device)
    return Explanation(
        collectives=collectives,
        buffers=tuple(
            (live, explain_buffer(live, matcher, possible, exchanges))
            for live in costs.at_peak.arrays[:_NUM_BUFFERS]
        ),
        replicated=tuple((row, cause) for row, cause in replicated if cause is not None),
        rematerialized=tuple(_explain_warnings(log, program, traced, matcher)),
        evidence=evidence,
        traced=traced,
        possible=possible,
    )


def list_possible_changes(
    jaxpr: Any,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    rows: Sequence[PlanRow | None] = (),
    rules: LogicalAxisRules = (),
) -> tuple[TracedValues, PossibleChanges]:
    """Returns the values of a traced function, and the changes that can be written for it.

    Args:
      jaxpr, mesh, rows, rules: as for `explain_program`.
    """
    traced = TracedValues((), (), LinkedDimensions())
    if jaxpr is not None:
        traced = trace_values(jaxpr, rows, names_by_axes(rules))
    layouts = KnownLayouts(rules, axis_sizes(mesh), rows, traced.links)
    return traced, PossibleChanges(layouts, ValueGraph(traced), traced.links)


def _explain_warnings(
    log: str, program: HloProgram, traced: TracedValues, matcher: Matcher
) -> Iterator[tuple[str, Cause | None]]:
    """Yields the warnings of full rematerialization in the log of a compiler, with their causes.

    A warning has the shape of a shard, and the number of a stack frame in the text of the program:

        Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...}
        efficiently for HLO operation %copy.9 = f32[4,16,32]{2,1,0} ..., stack_frame_id=16}
    """
    marked = (line.partition('Involuntary full') for line in log.splitlines())
    for message in dict.fromkeys(mark + rest for _, mark, rest in marked if mark):
        warning, frame = _WARNING.search(message), _FRAME.search(message)
        if warning is None:
            yield message, None
            continue
        shape = tuple(int(n) for n in re.findall(r'\d+', warning['array'].partition('[')[2]))
        line = program.sources.get(int(frame[1]), '') if frame else ''
        near = [
            value
            for value in traced.values
            if matcher.is_shard(shape, value.shape) and (not line or value.stack[:1] == (line,))
        ]
        near.sort(key=lambda value: value.layout is None)  # constraints come first
        cause = None
        for value in near[:1]:
            cause = Cause(
                source=value.line,
                array=what_is(value),
                logical_axes=value.names,
                rule='',
                why=(
                    f'the compiler has no exchange that leads from {warning["before"]} to '
                    f'{warning["after"]}, so every device makes the array whole and keeps its part'
                ),
                suspect=True,
            )
        yield message, cause
