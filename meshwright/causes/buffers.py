"""Why an array is in memory, and why devices hold it several times.

On a mesh of 4 'data' by 2 'model' devices, the largest array at the peak is f32[8,64], made at
model.py:30 by `tanh`. The traced function has a value of shape (32, 128) there, with the names
('batch', 'mlp'), so the array is one of 4 by 2 shards: the cause is "an activation, made by tanh"
with the rule ('batch', 'data'). An array of f32[8,128] would be whole along 'model'; the cause then
says so, and its change gives 'mlp' that axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.causes.cause import Cause, Change, RuleChange, over, what_is
from meshwright.causes.data_flow import Place
from meshwright.causes.evidence import layout_of
from meshwright.causes.layouts import KnownLayouts, names_by_axes, sharding_of_row
from meshwright.causes.possible_changes import PossibleChanges
from meshwright.causes.value_matching import Matcher
from meshwright.jaxpr import MemoryEstimate, TracedProgram
from meshwright.jaxpr.naming import name_values
from meshwright.jaxpr.values import Axes, Value
from meshwright.program.hlo_text import ArrayType
from meshwright.program.peak_memory import LiveArray
from meshwright.user_lines import user_line
from partitioning.plan.rows import PlanRow
from partitioning.rules import LogicalAxisRules


def explain_buffer(
    live: LiveArray,
    matcher: Matcher,
    possible: PossibleChanges,
    exchanges: Mapping[str, Cause | None],
) -> Cause | None:
    """Says why an array is in memory at the peak, or None if the program does not tell.

    Args:
      live: the array.
      matcher: finds the value that it holds.
      possible: the changes that can be written for the function.
      exchanges: the causes of the collectives, by the names of their instructions. The result of a
        collective has its cause.
    """
    if (exchange := exchanges.get(live.instruction)) is not None:
        return exchange
    place = matcher.flow.place_of(live.instruction)
    if place is None:
        return None
    outputs = place.instruction.outputs
    array = next((o for o in outputs if str(o) == live.array), outputs[0])
    value = _value_of(place, array, matcher)
    source = matcher.source_of(place.instruction)
    if value is None:
        return Cause(
            source=source,
            array='',
            logical_axes=(),
            rule='',
            why=f'the result of {live.op_name.rpartition("/")[2] or "an operation"}',
        )
    return _explain_value(value, source or value.line, array, possible)


def _explain_value(value: Value, source: str, array: ArrayType, possible: PossibleChanges) -> Cause:
    """The cause of an array that holds a value of the traced function."""
    layouts = possible.layouts
    layout = layout_of(value, array, layouts)
    unused = layouts.unused_axes(layout) if layout else ()
    unused = tuple(axis for axis in unused if axis not in value.manual)
    is_stacked = bool(value.loop) and not value.backward
    changes: list[Change] = []
    if unused:
        changes += [*possible.standard_rules(value), *possible.fitting_layouts(value)]
    if value.gradient_of and not is_stacked and not value.argument:
        changes += possible.shard_more(value.gradient_of)
    if unused and not value.argument and not value.gradient_of:
        changes += possible.shard_value(value, layout)
    suspect = possible.saves(changes)
    why = f'{what_is(value)}, made by {value.primitive or "the caller"}'
    if is_stacked:
        source, loop = value.line, user_line(value.loop)
        kept = 'keeps for the backward pass in' if possible.graph.has_backward else 'returns of'
        why = f'{what_is(value)}, which the loop at {loop} {kept} each iteration'
    elif value.argument:
        why = value.argument + (
            ', gathered for use' if _is_gathered(value, layout, layouts) else ''
        )
    elif value.gradient_of:
        why = what_is(value)
    if unused and (value.argument or changes):
        why += f'; each device has all of it along {over(unused)}'
    return Cause(
        source=source,
        array=what_is(value),
        logical_axes=value.names,
        rule=_rule_of(value, changes, possible),
        why=why,
        change=str(changes[0]) if changes else '',
        suspect=suspect,
        all_changes=tuple(dict.fromkeys(changes)),
    )


def _is_gathered(value: Value, layout: tuple[Axes, ...], layouts: KnownLayouts) -> bool:
    """Whether an array has all of an argument along a mesh axis that shards the argument."""
    row = layouts.rows.get(value.argument)
    if not layout or row is None:
        return False
    held = {axis for axes in layout for axis in axes} | value.manual
    return any(layouts.sizes.get(axis, 1) > 1 for axis in sharding_of_row(row) - held)


def explain_replicated(row: PlanRow, possible: PossibleChanges) -> Cause | None:
    """Says why devices hold an argument several times, or None if they do not."""
    layouts = possible.layouts
    unused = layouts.unused_by(row)
    if row.role == 'other':  # a batch is the same on all devices that compute with its rows
        unused = tuple(a for a in unused if a in layouts.batch_axes)
    if not unused or not row.shape:
        return None
    changes: list[Change] = list(possible.shard_more(row.path))
    kept = [a for a in unused if a not in layouts.batch_axes]
    why = f'all devices along {over(unused)} have the same copy: {row.reason}'
    if row.role == 'other':
        why = f'its rows are not sharded over {over(unused)}: {row.reason}'
    rules = (repr(tuple(d.rule)) for d in row.dimensions if d.rule is not None)
    rule = layouts.rule_for(possible.whole_name(row.path, kept or unused)) or next(rules, '')
    return Cause(
        source='',
        array=row.path,
        logical_axes=tuple(row.logical_axes),
        rule=rule,
        why=why,
        change=str(changes[0]) if changes else '',
        suspect=possible.saves(changes) and bool(kept or row.role == 'other'),
        all_changes=tuple(dict.fromkeys(changes)),
    )


def explain_estimate(
    estimate: MemoryEstimate,
    traced: TracedProgram,
    *,
    rows: Sequence[PlanRow | None] = (),
    rules: LogicalAxisRules = (),
) -> tuple[tuple[LiveArray, Cause], ...]:
    """Finds the causes of the buffers of an estimate, without a compiled program.

    Args:
      estimate: the estimate.
      traced: the function that was estimated. Its values are named.
      rows, rules: as for `explain_program`.
    """
    name_values(traced.block, rows, names_by_axes(rules))
    found = []
    for array, value in zip(estimate.buffers, estimate.values, strict=True):
        operation = array.op_name.rpartition('/')[2] or value.primitive
        cause = Cause(
            source=value.line or array.source,
            array=what_is(value),
            logical_axes=value.names,
            rule='',
            why=f'{what_is(value)}, made by {operation}',
        )
        found.append((array, cause))
    return tuple(found)


def _value_of(place: Place, array: ArrayType, matcher: Matcher) -> Value | None:
    """The value that an array holds.

    The result of an exchange or a move holds the value of the operation before it. The line and the
    operation count more than the shape if no value fits the array.
    """
    for maker in (place, *matcher.flow.makers(place)):
        argument = matcher.argument_of(maker)
        if argument is not None and matcher.is_shard(array.shape, argument.shape):
            return argument
        for value in matcher.values_of(maker.instruction, array.shape)[:1]:
            if matcher.is_shard(array.shape, value.shape):
                return value
    found = matcher.values_of(place.instruction, array.shape)
    return found[0] if found and found[0].primitive else None


def _rule_of(value: Value, changes: Sequence[Change], possible: PossibleChanges) -> str:
    """The rule that a change replaces, or the rule of the first sharded dimension of a value."""
    for change in changes:
        if isinstance(change, RuleChange):
            return possible.layouts.rule_for(change.names[0])
    wanted = possible.layouts.wanted(value.dims, value.shape)
    for name, axes in zip(value.names, wanted, strict=True):
        if axes:
            return possible.layouts.rule_for(name)
    return ''
