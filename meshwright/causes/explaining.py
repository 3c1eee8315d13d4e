"""The cause of every exchange, of the largest buffers and of every copy in a program."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright.causes.advice import Advisor
from meshwright.causes.cause import Cause
from meshwright.causes.compiler_log import Rematerialization, find_rematerializations
from meshwright.causes.evidence import find_evidence
from meshwright.causes.known_layouts import KnownLayouts, names_by_axes
from meshwright.causes.making_causes import what_is
from meshwright.causes.memory_causes import explain_buffer, explain_replicated
from meshwright.causes.reasons import explain_exchange
from meshwright.causes.value_graph import ValueGraph
from meshwright.causes.value_matching import Matcher
from meshwright.jaxpr.linked_dimensions import LinkedDimensions
from meshwright.jaxpr.naming import TracedValues, trace_values
from meshwright.program.collectives import Collective
from meshwright.program.costs import ProgramCosts
from meshwright.program.hlo_text import HloProgram, parse_hlo
from meshwright.program.peak_memory import LiveArray
from meshwright.user_lines import user_line
from partitioning.plan.rows import PlanRow
from partitioning.rules import LogicalAxisRules, axis_sizes

_NUM_BUFFERS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The causes of what a program exchanges and holds.

    Attributes:
      collectives: each collective with its cause, in the order of the costs.
      buffers: the largest arrays at the peak, each with its cause.
      replicated: the arguments that devices hold several times, the largest first.
      rematerialized: the compiler's warnings of involuntary full rematerialization.
    """

    collectives: tuple[tuple[Collective, Cause | None], ...]
    buffers: tuple[tuple[LiveArray, Cause | None], ...]
    replicated: tuple[tuple[PlanRow, Cause], ...]
    rematerialized: tuple[tuple[str, Cause | None], ...]

    @property
    def weighed(self) -> tuple[tuple[float, Cause], ...]:
        """Every cause with its bytes per device, those of most bytes first."""
        found = [(c.total_bytes, cause) for c, cause in self.collectives if cause is not None]
        found += [(live.nbytes, cause) for live, cause in self.buffers if cause is not None]
        found += [(row.bytes_per_device, cause) for row, cause in self.replicated]
        return tuple(sorted(found, key=lambda pair: -pair[0]))

    @property
    def avoidable(self) -> tuple[Cause, ...]:
        """The causes of what the layout does not need, those of most bytes first."""
        return tuple(cause for _, cause in self.weighed if cause.avoidable)


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

    Nothing is compiled; `confirm_change` compiles.

    Usage:
      traced = step.trace(state, batch)
      compiled = traced.lower().compile()
      explanation = explain_program(
          compiled.as_text(), traced.jaxpr, read_costs(compiled, mesh), mesh=mesh,
          rows=[*plan.rows, *rows_of_batch], rules=partitioner.logical_axis_rules)

    Args:
      text: `compiled.as_text()`.
      jaxpr: the ClosedJaxpr of the same trace, or None.
      costs: what `read_costs` or `costs_of_text` reads from the program.
      mesh: the mesh, or the size of each of its axes.
      rows: the layout of each argument, in the order of `jax.tree.leaves`; None where it is not
        known.
      rules: the logical axis rules under which the function was traced.
      log: what the compiler wrote to the standard error of the process.
    """
    program = parse_hlo(text)
    traced, advisor = advise(jaxpr, mesh=mesh, rows=rows, rules=rules)
    layouts = advisor.layouts
    matcher = Matcher(program, traced, layouts.sizes)
    replicated = [(row, explain_replicated(row, advisor)) for row in layouts.rows.values()]
    collectives = tuple((c, _of_collective(c, matcher, advisor)) for c in costs.collectives)
    exchanges = {c.instruction: cause for c, cause in collectives}
    replicated.sort(key=lambda pair: -pair[0].bytes_per_device)
    return Explanation(
        collectives=collectives,
        buffers=tuple(
            (live, explain_buffer(live, matcher, advisor, exchanges))
            for live in costs.at_peak.arrays[:_NUM_BUFFERS]
        ),
        replicated=tuple((row, cause) for row, cause in replicated if cause is not None),
        rematerialized=tuple(
            (found.message, _of_warning(found, program, traced, matcher, advisor))
            for found in find_rematerializations(log)
        ),
    )


def advise(
    jaxpr: Any,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    rows: Sequence[PlanRow | None] = (),
    rules: LogicalAxisRules = (),
) -> tuple[TracedValues, Advisor]:
    """Returns the values of a traced function, and what knows its layouts and their changes.

    Args:
      jaxpr, mesh, rows, rules: as for `explain_program`.
    """
    traced = TracedValues((), (), (), LinkedDimensions())
    if jaxpr is not None:
        traced = trace_values(jaxpr, rows, names_by_axes(rules))
    layouts = KnownLayouts(rules, axis_sizes(mesh), rows, traced.links)
    return traced, Advisor(layouts, ValueGraph(traced), traced.links)


def _of_collective(collective: Collective, matcher: Matcher, advisor: Advisor) -> Cause | None:
    evidence = find_evidence(collective, matcher, advisor.layouts)
    return None if evidence is None else explain_exchange(evidence, advisor)


def _of_warning(
    found: Rematerialization,
    program: HloProgram,
    traced: TracedValues,
    matcher: Matcher,
    advisor: Advisor,
) -> Cause | None:
    """The cause of a warning, whose array is the part of some value that a device has."""
    line = program.sources.get(found.frame, '') if found.frame else ''
    shape = tuple(int(n) for n in re.findall(r'\d+', found.array.partition('[')[2]))
    near = [
        v
        for v in traced.values
        if matcher.is_shard(shape, v.shape) and (not line or v.stack[:1] == (line,))
    ]
    constrained = [v for v in near if v.layout is not None]
    if not near:
        return None
    value = (constrained or near)[0]
    changes = []
    if value.layout is not None:
        wanted = advisor.layouts.wanted(value.dims, value.shape)
        if any(wanted) and wanted != value.layout:
            changes = list(advisor.replace_constraints([value], value))
    changes += [] if changes else list(advisor.lay_out(value, value.layout or ()))
    return Cause(
        source=user_line(value.stack),
        array=what_is(value),
        logical_axes=value.names,
        rule='',
        reason=(
            f'the compiler has no exchange that leads from {found.before} to {found.after}, so '
            'every device makes the array whole and keeps its part'
        ),
        change=str(changes[0]) if changes else '',
        avoidable=True,
        candidates=tuple(changes),
    )
