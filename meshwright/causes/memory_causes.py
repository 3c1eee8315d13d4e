"""Why an array is in memory, and why devices hold it several times."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.causes.advice import Advisor
from meshwright.causes.cause import Cause
from meshwright.causes.changes import Change, CodeChange, RuleChange
from meshwright.causes.data_flow import Place, is_exchange
from meshwright.causes.evidence import layout_of
from meshwright.causes.making_causes import over, what_is
from meshwright.causes.value_matching import Matcher
from meshwright.causes.whole_dimensions import written_otherwise
from meshwright.jaxpr.values import Value
from meshwright.program.hlo_text import ArrayType
from meshwright.program.peak_memory import LiveArray
from meshwright.user_lines import user_line
from partitioning.plan.rows import PlanRow


def explain_buffer(
    live: LiveArray, matcher: Matcher, advisor: Advisor, exchanges: Mapping[str, Cause | None]
) -> Cause | None:
    """Says why an array is in memory at the peak, or None if the program does not tell.

    Args:
      live: the array.
      matcher: finds the value that it holds.
      advisor: knows the rules, the layouts and the constraints.
      exchanges: the causes of the collectives, by the names of their instructions. The result of a
        collective has its cause.
    """
    if (exchange := exchanges.get(live.instruction)) is not None:
        return exchange
    place = matcher.flow.place_of(live.instruction)
    if place is None:
        return None
    array = _array_of(live, place)
    value = _value_of(place, array, matcher)
    source = matcher.source_of(place.instruction)
    if value is None:
        return Cause(
            source=source,
            array='',
            logical_axes=(),
            rule='',
            reason=f'the result of {live.op_name.rpartition("/")[2] or "an operation"}',
        )
    layouts = advisor.layouts
    layout = layout_of(value, array, layouts)
    unused = layouts.unused_axes(layout) if layout else ()
    source = source or user_line(value.stack)
    changes: list[Change] = [*written_otherwise(value, source, layouts)]
    needs_whole = bool(changes)
    changes += [*advisor.odd_rules(value), *advisor.odd_layouts(value)] if unused else []
    reason = f'{what_is(value)}, made by {value.primitive or "the caller"}'
    if value.loop and not value.backward:
        source = user_line(value.stack)
        reason = (
            f'{what_is(value)}, which the loop at {user_line(value.loop)} keeps for the backward '
            'pass in each iteration'
        )
    elif value.argument:
        reason = f'{value.argument}, gathered for use' if layout else value.argument
    elif value.gradient_of:
        reason = f'the gradient of {value.gradient_of}'
        changes += advisor.shard_more(value.gradient_of)
    if not value.argument and not value.gradient_of and unused:
        changes += advisor.shard_value(value, layout)
    if unused and (value.argument or changes):
        reason += f'; each device has all of it along {over(unused)}'
    avoidable = advisor.saves(changes) or needs_whole
    if value.loop and not value.backward:
        line = user_line(value.loop)
        text = f'recompute it: apply jax.checkpoint to the body of the loop at {line}'
        changes.append(CodeChange(source=line, text=text))
    rule = _rule_of(value, changes, advisor)
    return Cause(
        source=source,
        array=what_is(value),
        logical_axes=value.names,
        rule=rule,
        reason=reason,
        change=str(changes[0]) if changes else '',
        avoidable=avoidable,
        candidates=tuple(dict.fromkeys(changes)),
    )


def explain_replicated(row: PlanRow, advisor: Advisor) -> Cause | None:
    """Says why devices hold an argument several times, or None if they do not."""
    layouts = advisor.layouts
    unused = advisor.unused_by(row)
    if row.role == 'other':  # a batch is the same on all devices that compute with its rows
        unused = tuple(a for a in unused if a in layouts.batch_axes)
    if not unused or not row.shape:
        return None
    changes: list[Change] = list(advisor.shard_more(row.path))
    kept = [a for a in unused if a not in layouts.batch_axes]
    reason = f'all devices along {over(unused)} have the same copy: {row.reason}'
    if row.role == 'other' and set(unused) & set(layouts.batch_axes):
        reason = f'its rows are not sharded over {over(unused)}: {row.reason}'
    name = advisor.whole_name(row.path, kept or unused)
    rule = layouts.rule_for(name) if name else ''
    if not rule:
        rule = next((repr(tuple(d.rule)) for d in row.dimensions if d.rule is not None), '')
    return Cause(
        source='',
        array=row.path,
        logical_axes=tuple(row.logical_axes),
        rule=rule,
        reason=reason,
        change=str(changes[0]) if changes else '',
        avoidable=advisor.saves(changes) and bool(kept or row.role == 'other'),
        candidates=tuple(dict.fromkeys(changes)),
    )


def _array_of(live: LiveArray, place: Place) -> ArrayType:
    """The array of an instruction's result that has the type of a live array."""
    outputs = place.instruction.outputs
    return next((o for o in outputs if str(o) == live.array), outputs[0])


def _value_of(place: Place, array: ArrayType, matcher: Matcher) -> Value | None:
    instruction = place.instruction
    if not is_exchange(instruction):
        for value in matcher.values_of(instruction, array.shape)[:1]:
            if matcher.is_shard(array.shape, value.shape):
                return value
    for maker in matcher.flow.makers(place):
        argument = matcher.argument_of(maker)
        if argument is not None and matcher.is_shard(array.shape, argument.shape):
            return argument
        for value in matcher.values_of(maker.instruction, array.shape)[:1]:
            if matcher.is_shard(array.shape, value.shape):
                return value
    found = matcher.values_of(instruction, array.shape)
    return found[0] if found and re.match(r'\w', found[0].primitive) else None


def _rule_of(value: Value, changes: list[Change], advisor: Advisor) -> str:
    """The rule that leaves a value whole along mesh axes, or that of its first sharded name."""
    for change in changes:
        if isinstance(change, RuleChange):
            return advisor.layouts.rule_for(change.after[0][0])
    wanted = advisor.layouts.wanted(value.dims, value.shape)
    for name, axes in zip(value.names, wanted, strict=True):
        if axes:
            return advisor.layouts.rule_for(name)
    return ''
