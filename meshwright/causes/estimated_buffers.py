"""The causes of buffers that are known by formula, where there is no compiled program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright.causes.cause import Cause
from meshwright.causes.known_layouts import KnownLayouts, names_by_axes
from meshwright.causes.making_causes import what_is
from meshwright.causes.shard_shapes import shard_counts, shard_dimensions
from meshwright.jaxpr.naming import trace_values
from meshwright.jaxpr.values import Value
from meshwright.program.peak_memory import LiveArray
from meshwright.user_lines import user_line
from partitioning.plan.rows import PlanRow
from partitioning.rules import LogicalAxisRules, axis_sizes


def explain_estimate(
    arrays: Sequence[LiveArray],
    jaxpr: Any,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    rows: Sequence[PlanRow | None] = (),
    rules: LogicalAxisRules = (),
) -> tuple[tuple[LiveArray, Cause | None], ...]:
    """Finds the values of a traced function that buffers are, with their logical axes.

    Args:
      arrays: the buffers, from `estimate_memory`.
      jaxpr: the ClosedJaxpr of the same function.
      mesh, rows, rules: as for `explain_program`.
    """
    traced = trace_values(jaxpr, rows, names_by_axes(rules))
    layouts, values = KnownLayouts(rules, axis_sizes(mesh), rows, traced.links), traced.values
    by_line: dict[str, list[Value]] = {}
    for value in values:
        for line in {*value.stack[:1], *value.loop[:1]}:
            by_line.setdefault(line, []).append(value)
    return tuple((a, _explain(a, by_line.get(a.source, ()), layouts)) for a in arrays)


def _explain(array: LiveArray, candidates: Sequence[Value], layouts: KnownLayouts) -> Cause | None:
    """The cause of a buffer, from the values that its line makes."""
    shape = tuple(int(n) for n in re.findall(r'\d+', array.array.partition('[')[2]))
    counts = shard_counts(layouts.sizes)
    fitting = [v for v in candidates if shard_dimensions(shape, v.shape, counts) is not None]
    if not fitting:
        return None
    value = max(fitting, key=lambda v: _agreement(array, v))
    return Cause(
        source=user_line(value.stack) or array.source,
        array=what_is(value),
        logical_axes=value.names,
        rule='',
        reason=f'{what_is(value)}, made by {array.op_name.rpartition("/")[2] or value.primitive}',
    )


def _agreement(array: LiveArray, value: Value) -> int:
    """How well a value agrees with a buffer: by its operation, its pass, and its known names."""
    operation = array.op_name.rpartition('/')[2]
    backward = 'transpose(' in array.op_name
    named = sum(name is not None for name in value.names)
    return 4 * (value.primitive == operation) + 2 * (value.backward == backward) + bool(named)
