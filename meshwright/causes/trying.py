"""Compiles a function again with a change, to see what the change saves.

Rules are changed by tracing the function again. The other changes edit the traced function, as if
they were written in its code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.causes.cause import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    JoinedChange,
    LayoutChange,
    RuleChange,
)
from meshwright.causes.editing import edit_jaxpr
from meshwright.causes.explaining import Explanation, explain_program
from meshwright.program.costs import ProgramCosts, read_costs, read_text
from partitioning.plan.rows import PlanRow
from partitioning.rules import AxisRules, LogicalAxisRules, MeshAxes, from_tuple

# A change helps if it saves more than this share of the exchanged bytes plus the peak memory.
_LEAST = 1e-3

Retrace = Callable[[LogicalAxisRules], jax.stages.Traced]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledFunction:
    """A function that was compiled, and what is needed to compile it again with a change.

    Attributes:
      traced: the trace.
      compiled: the program.
      costs: the costs of the program.
      mesh: the mesh.
      rules: the rules under which it was traced.
      rows: the layout of each argument.
      retrace: traces the function under other rules, with the layouts that these give to its
        arguments and results; None if that is not possible.
    """

    traced: jax.stages.Traced
    compiled: jax.stages.Compiled
    costs: ProgramCosts
    mesh: Mesh
    rules: LogicalAxisRules = ()
    rows: Sequence[PlanRow | None] = ()
    retrace: Retrace | None = None

    def explain(self, log: str = '') -> Explanation:
        """The cause of every exchange, of the largest buffers and of every copy.

        Args:
          log: what the compiler wrote to the standard error of the process.
        """
        return explain_program(
            read_text(self.compiled),
            self.traced.jaxpr,
            self.costs,
            mesh=self.mesh,
            rows=self.rows,
            rules=self.rules,
            log=log,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedChange:
    """What a change does to a program, in bytes per device.

    Attributes:
      change: the change.
      exchanged: the bytes that a device sends in one call, before and after.
      peak: the peak of its memory, before and after.
    """

    change: Change
    exchanged: tuple[float, float]
    peak: tuple[int, int]

    @property
    def saved(self) -> float:
        """The exchanged bytes and the memory that the change saves, together."""
        return self.exchanged[0] + self.peak[0] - self.exchanged[1] - self.peak[1]

    @property
    def helps(self) -> bool:
        """Whether the change saves more than it costs."""
        return self.saved > _LEAST * (self.exchanged[0] + self.peak[0])


def try_change(
    function: CompiledFunction, change: Change, changed: jax.stages.Traced | None = None
) -> TriedChange | None:
    """Compiles a function with a change.

    Args:
      function: the function as it is.
      change: the change.
      changed: the trace of the changed function. A CodeChange needs it, because only the caller
        can change the code.

    Returns:
      What the change does, or None if it cannot be made here.
    """
    try:
        after = _apply(function, change, changed)
    except ValueError:  # the rules, the layout or the constraint do not fit the function
        return None
    if after is None:
        return None
    return TriedChange(
        change=change,
        exchanged=(_exchanged(function.costs), _exchanged(after.costs)),
        peak=(_peak(function.costs), _peak(after.costs)),
    )


def _apply(
    function: CompiledFunction, change: Change, changed: jax.stages.Traced | None = None
) -> CompiledFunction | None:
    """The compiled function with a change, or None if it cannot be made here.

    Raises:
      ValueError: if the change does not fit the function.
    """
    if changed is not None:
        return _compile(function, changed)
    if isinstance(change, JoinedChange):
        result: CompiledFunction | None = function
        for part in change.parts:
            result = None if result is None else _apply(result, part)
        return result
    if isinstance(change, RuleChange):
        if function.retrace is None:
            return None
        rules = _with_rules(function.rules, change)
        traced = function.retrace(rules)
        return _compile(dataclasses.replace(function, rules=rules), traced)
    if isinstance(change, ConstraintChange | ConstraintRemoval):
        edited = edit_jaxpr(function.traced.jaxpr, change, function.mesh)
        return _compile_flat(function, edited, _layouts_of(function.compiled))
    if isinstance(change, LayoutChange):
        layouts = _with_layout(function, change)
        return None if layouts is None else _compile_flat(function, function.traced.jaxpr, layouts)
    return None


def _with_rules(rules: LogicalAxisRules, change: RuleChange) -> AxisRules:
    """The rules with a change: each name has its new axes where its first rule stood."""
    given, new = AxisRules(rules), dict(change.after)
    changed: list[tuple[str, MeshAxes]] = []
    for name, axes in given:
        if name not in change.names:
            changed.append((name, axes))
        elif name in new:
            changed.append((name, new.pop(name)))
    return given.with_rules([*changed, *new.items()])


def _compile(function: CompiledFunction, traced: jax.stages.Traced) -> CompiledFunction:
    compiled = traced.lower().compile()
    costs = read_costs(compiled, function.mesh)
    return dataclasses.replace(function, traced=traced, compiled=compiled, costs=costs)


def _compile_flat(
    function: CompiledFunction, jaxpr: Any, layouts: Mapping[str, Any]
) -> CompiledFunction:
    """Compiles a ClosedJaxpr as a function of flat arguments, under the same rules."""
    flat = jax.extend.core.jaxpr_as_fun(jaxpr)
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.in_avals]
    with jax.set_mesh(function.mesh):
        traced = jax.jit(flat, **layouts).trace(*abstract)
        return _compile(dataclasses.replace(function, retrace=None), traced)


def _layouts_of(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """The flat shardings of the arguments and results of a program, as `jax.jit` takes them."""
    # Arguments that the program does not use have None in place of a sharding.
    in_tree: Any = compiled.in_tree
    out_tree: Any = compiled.out_tree
    donated = [i for i, x in enumerate(jax.tree.leaves(compiled.args_info)) if x.donated]
    return {
        'in_shardings': tuple(in_tree.flatten_up_to(compiled.input_shardings)),
        'out_shardings': list(out_tree.flatten_up_to(compiled.output_shardings)),
        'donate_argnums': tuple(donated),
    }


def _with_layout(function: CompiledFunction, change: LayoutChange) -> dict[str, Any] | None:
    """Gives an argument, and the arrays that follow it, another layout.

    The optimizer state of a parameter follows it, and so do the results that replace them; the
    arrays of a batch follow each other.
    """
    layouts = _layouts_of(function.compiled)
    spec = PartitionSpec(*(from_tuple(axes) for axes in change.layout))
    sharding = NamedSharding(function.mesh, spec)
    if change.result is not None:
        layouts['out_shardings'][change.result] = sharding
        return layouts
    paths = (change.path, *change.likewise)
    rows = [row for row in function.rows if row is not None and row.path in paths]
    if not rows or len(function.rows) != len(function.traced.jaxpr.in_avals):
        return None
    inputs, outputs = list(layouts['in_shardings']), layouts['out_shardings']
    before = next(s for s, r in zip(inputs, function.rows, strict=True) if r is rows[0])
    for number, row in enumerate(function.rows):
        if row is None or row.shape != rows[0].shape or inputs[number] != before:
            continue
        if any(row is changed or _follows(row, changed) for changed in rows):
            inputs[number] = sharding
    for number, aval in enumerate(function.traced.jaxpr.out_avals):
        held = outputs[number]
        same_shape = held is not None and aval.shape == rows[0].shape
        if same_shape and held.is_equivalent_to(before, aval.ndim):
            outputs[number] = sharding
    layouts['in_shardings'] = tuple(inputs)
    return layouts


def _follows(row: PlanRow, changed: PlanRow) -> bool:
    """Whether an array is laid out like another one of its batch, or like its parameter."""
    if changed.role == 'other':
        return row.role == 'other' and row.path.partition('/')[0] == changed.path.partition('/')[0]
    tail = f'/{changed.path.partition("/")[2]}'
    return row.role in ('parameters', 'optimizer') and f'/{row.path}'.endswith(tail)


def _exchanged(costs: ProgramCosts) -> float:
    return sum(c.total_bytes for c in costs.collectives)


def _peak(costs: ProgramCosts) -> int:
    return costs.memory.peak if costs.memory is not None else costs.at_peak.nbytes
