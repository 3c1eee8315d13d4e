"""Why a program exchanges data: the rule or the line, and what would remove it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from partitioning.aot.blame.advice import Advisor
from partitioning.aot.blame.cause import Cause
from partitioning.aot.blame.changes import Change, CodeChange, LayoutChange
from partitioning.aot.blame.evidence import Evidence
from partitioning.aot.blame.known_layouts import Axes
from partitioning.aot.blame.user_lines import user_line
from partitioning.aot.blame.value_graph import lacks
from partitioning.aot.blame.values import Value
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

# Operations by which a program itself asks for an exchange.
_ASKED = frozenset(
    [
        'psum',
        'psum2',
        'psum_invariant',
        'all_gather',
        'all_gather_invariant',
        'psum_scatter',
        'reduce_scatter',
        'ppermute',
        'all_to_all',
        'pmax',
        'pmin',
        'pmean',
        'pgather',
    ]
)
_NEAR = 8  # the number of products that are looked at
_ASKS = 'the program asks for it with'
# Operations that need a dimension whole, and what to write instead.
_WHOLE = {
    'gather': 'a one-hot product, such as jnp.sum(x * jax.nn.one_hot(indices, x.shape[-1]), -1)',
    'sort': 'an operation that does not sort over a sharded dimension',
    'top_k': 'an operation that does not sort over a sharded dimension',
    'cumsum': 'a sum over blocks of the dimension',
    'rev': 'an operation that does not reverse a sharded dimension',
}
# Logical axes over which tensor parallelism sums.
_OF_TENSORS = frozenset(
    ['mlp', 'heads', 'kv', 'joined_kv', 'vocab', 'kv_heads', 'expert_mlp', 'expert']
)


def explain_exchange(evidence: Evidence, advisor: Advisor) -> Cause:
    """Says why an exchange is there and what would remove it.

    Args:
      evidence: what it moves.
      advisor: knows the rules, the layouts and the constraints.
    """
    value = evidence.value
    if value is None:
        return Cause(
            source=evidence.made_at,
            array='',
            logical_axes=(),
            rule='',
            reason=f'an {evidence.kind} over {over(evidence.axes)}',
        )
    if evidence.path.rpartition('/')[2] in _ASKED:
        name = evidence.path.rpartition('/')[2]
        return _cause(advisor, evidence, f'{_ASKS} jax.lax.{name}', source=evidence.made_at)
    if evidence.kind in ('all-reduce', 'reduce-scatter'):
        return _explain_sum(evidence, value, advisor)
    if evidence.kind == 'all-gather' and value.argument:
        return _explain_gathered_argument(evidence, value, advisor)
    return _explain_moved_value(evidence, value, advisor)


def _explain_sum(evidence: Evidence, value: Value, advisor: Advisor) -> Cause:
    layouts, axes = advisor.layouts, evidence.axes
    by_rows = set(axes) <= set(layouts.batch_axes)
    if value.gradient_of:
        changes = list(advisor.shard_more(value.gradient_of, but=axes))
        reason = (
            f'each device along {over(axes)} has the gradient of {value.gradient_of} for its rows, '
            'and their sum is needed'
        )
        if not by_rows:
            reason = (
                f'{value.gradient_of} is not sharded over {over(axes)}, along which its gradient '
                'is computed in parts'
            )
        row = layouts.rows.get(value.gradient_of)
        unused = [a for a in advisor.unused_by(row) if a not in layouts.batch_axes] if row else []
        if unused:
            reason += f'; it is whole along {over(unused)}: {row.reason if row else ""}'
        rule = layouts.rule_for(advisor.whole_name(value.gradient_of, unused)) if unused else ''
        return _cause(
            advisor,
            evidence,
            reason,
            rule=rule or layouts.rule_for('batch'),
            changes=changes,
            avoidable=bool(unused),
            source=evidence.made_at,
        )
    summed = next((d for d in value.contracted if d and set(d.axes) & set(axes)), None)
    if summed is None:
        summed = next((d for d in value.contracted if d and d.name), None)
    name = summed.name if summed else None
    rule = layouts.rule_for(name)
    if value.size <= 1 or (by_rows and name in ('batch', 'length', None) and len(value.shape) < 2):
        reason = f'a sum over values on different devices along {over(axes)}'
        return _cause(advisor, evidence, reason, rule=rule, source=evidence.made_at)
    what = f'{name!r}' if name else 'a dimension'
    reason = f'the sum over {what} runs over devices along {over(axes)}, which have parts of it'
    if name and name not in ('batch', 'length') and layouts.is_unusual(name):
        standard = layouts.to_standard(name)
        return _cause(
            advisor,
            evidence,
            reason,
            rule=rule,
            changes=[standard],
            avoidable=True,
            source=evidence.made_at,
        )
    tensor = name in _OF_TENSORS and not by_rows
    if tensor:
        reason += ' (tensor parallelism)'
        return _cause(advisor, evidence, reason, rule=rule, source=evidence.made_at)
    changes = list(written_otherwise(value, evidence.made_at))
    changes += advisor.lay_out(value, evidence.layout)
    if summed is not None and summed.name is None:
        changes += advisor.other_layouts(summed.argument)
    if summed is not None and summed.name and set(summed.axes) & set(axes):
        changes += advisor.other_rules(summed.name)
    return _cause(
        advisor,
        evidence,
        reason,
        rule=rule,
        changes=changes,
        avoidable=True,
        source=evidence.made_at,
    )


def _explain_gathered_argument(evidence: Evidence, value: Value, advisor: Advisor) -> Cause:
    layouts, axes, moved = advisor.layouts, evidence.axes, evidence.moved
    row = layouts.rows.get(value.argument)
    name = moved.name if moved else None
    rule = layouts.rule_for(name)
    split = f'{value.argument} is sharded over {over(axes)}' + (f' along {name!r}' if name else '')
    if evidence.result is not None and not evidence.taken_by:
        wanted = layouts.wanted(value.dims, value.shape)
        change = LayoutChange(path=value.argument, layout=wanted, result=evidence.result)
        reason = f'{split}, but the function returns it whole'
        return _cause(advisor, evidence, reason, rule=rule, changes=[change], avoidable=True)
    if row is not None and row.role == 'optimizer':
        reason = f'{split}, but the update of its parameter is computed whole'
        changes = advisor.like_parameter(value.argument)
        return _cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
    unusual = layouts.is_unusual(name)
    if set(axes) <= set(layouts.batch_axes):
        reason = f'expected: {split}, and each device gathers it for use'
        changes = [layouts.to_standard(name)] if unusual and name else []
        changes += advisor.other_layouts(value.argument) if name is None else []
        if row is not None and row.role == 'other':
            reason = f'{split}, but {evidence.used_at} needs all of it'
            changes += advisor.relax(evidence)
            return _cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
        unused = [a for a in advisor.unused_by(row) if a not in layouts.batch_axes]
        if unused:
            changes += advisor.shard_more(value.argument, but=axes)
            reason += f'; it is whole along {over(unused)}'
            rule = layouts.rule_for(advisor.whole_name(value.argument, unused))
        return _cause(
            advisor, evidence, reason, rule=rule, changes=changes, avoidable=bool(changes)
        )
    reason = f'{split}, but the operation at {evidence.used_at} needs all of it'
    changes = [layouts.to_standard(name)] if unusual and name else []
    changes += advisor.other_layouts(value.argument) if name is None else []
    changes += advisor.relax(evidence)
    if name:
        changes += advisor.other_rules(name)
    return _cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)


def _explain_moved_value(evidence: Evidence, value: Value, advisor: Advisor) -> Cause:
    """An activation, a gradient or an update that is gathered or divided anew."""
    layouts, axes, moved = advisor.layouts, evidence.axes, evidence.moved
    name = moved.name if moved else None
    what = what_is(value)
    split = f'{what} is sharded over {over(axes)}' + (f' along {name!r}' if name else '')
    rule = layouts.rule_for(name)
    changes: list[Change] = []
    if value.gradient_of or value.update_of:
        path = value.gradient_of or value.update_of
        reason = (
            f'{split}, but its array is not'
            if evidence.result is None
            else (f'{split}, but the function returns it in another layout')
        )
        row = layouts.rows.get(path)
        changes += advisor.like_its_uses(row) if row is not None else ()
        changes += advisor.other_layouts(path)
        changes += advisor.like_parameter(path)
        wanted = () if row is None else tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
        if evidence.result is not None and _is_within(evidence.layout, wanted):
            change = LayoutChange(path=path, layout=wanted, result=evidence.result)
            changes.insert(0, change)
        return _cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
    for user in evidence.taken_by:
        needed = _WHOLE.get(user.primitive)
        if needed and _needs_whole(user, value, evidence.dim):
            line = user_line(user.stack)
            reason = f'{split}, but {user.primitive} at {line} needs all of it'
            changes.append(CodeChange(source=line, text=f'write {needed} at {line}'))
            changes += advisor.relax(evidence)
            return _cause(
                advisor, evidence, reason, rule=rule, changes=changes, avoidable=True, source=line
            )
    if (parameter := _conflicting_parameter(evidence, value, advisor)) is not None:
        row = layouts.rows[parameter.argument]
        reason = (
            f'{split}, but the dimension of {row.path} that it is multiplied with is not: '
            f'{row.reason}'
        )
        changes = [*advisor.like_its_uses(row), *changes]
        found = _cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
        return dataclasses.replace(
            found, array=row.path, logical_axes=tuple(row.logical_axes), source=evidence.used_at
        )
    conflicting = list(_conflicts(evidence, value, advisor))
    if conflicting:
        constraint = conflicting[0]
        line = user_line(constraint.stack)
        changes += advisor.replace_constraints(conflicting, value)
        reason = f'{split}, and the constraint at {line} asks for another layout'
        if name and layouts.is_unusual(name):
            changes.append(layouts.to_standard(name))
        return _cause(
            advisor, evidence, reason, rule=rule, changes=changes, avoidable=True, source=line
        )
    if evidence.result is not None and not evidence.taken_by:
        reason = f'{split}, but the function returns it in another layout'
        wanted = layouts.wanted(value.dims, value.shape)
        changes.append(LayoutChange(path='', layout=wanted, result=evidence.result))
        return _cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
    reason = f'{split}, but {evidence.used_at} needs another layout'
    changes += written_otherwise(value, evidence.used_at)
    if name and layouts.is_unusual(name):
        changes.append(layouts.to_standard(name))
    changes += advisor.lay_out(value, evidence.layout)
    return _cause(
        advisor,
        evidence,
        reason,
        rule=rule,
        changes=changes,
        avoidable=True,
        source=evidence.made_at,
    )


def _conflicting_parameter(evidence: Evidence, value: Value, advisor: Advisor) -> Value | None:
    """The parameter in a product with a value whose dimension for it is laid out otherwise."""
    for product in advisor.graph.products_of(value):
        for other in product.operands:
            row = advisor.layouts.rows.get(other.argument)
            if (
                row is not None
                and row.role == 'parameters'
                and _conflicts_with_uses(row, evidence.axes, advisor)
            ):
                return other
    return None


def _is_within(layout: Sequence[Axes], wanted: Sequence[Axes]) -> bool:
    """Whether one layout shards no dimension over axes that another does not use for it."""
    if len(layout) != len(wanted):
        return False
    return all(set(mine) <= set(theirs) for mine, theirs in zip(layout, wanted, strict=True))


def _conflicts_with_uses(row: PlanRow, axes: Axes, advisor: Advisor) -> bool:
    """Whether constraints shard a dimension of a parameter over mesh axes, and its layout not."""
    wanted = advisor.links.axes_of(row.path, len(row.shape))
    now = [sharding_axes(d.mesh_axes) for d in row.dimensions]
    return any(
        set(theirs) & set(axes) and not set(theirs) <= set(mine)
        for theirs, mine in zip(wanted, now, strict=True)
    )


def written_otherwise(value: Value, line: str) -> Iterator[Change]:
    """What to write in place of an operation that needs a dimension whole."""
    scatters = value.primitive.startswith('scatter')
    needed = _WHOLE.get('gather' if scatters else value.primitive)
    if needed and not value.gradient_of and not any(o.argument for o in value.operands[:1]):
        yield CodeChange(source=line, text=f'write {needed} at {line}')


def _needs_whole(user: Value, value: Value, dim: int | None) -> bool:
    """Whether an operation needs a dimension of an operand whole."""
    if user.primitive != 'gather' or dim is None or not user.operands:
        return True
    table = user.operands[0]
    return table.shape == value.shape and any(
        d is not None and d == value.dims[dim] for d in user.contracted
    )


def _conflicts(evidence: Evidence, value: Value, advisor: Advisor) -> Iterator[Value]:
    """Constraints that fix another layout than the value has before the exchange."""
    found = [*advisor.graph.constraints_after(value)]
    products = itertools.islice(advisor.graph.products_of(value), _NEAR)
    for user in (*evidence.taken_by, *products):
        if user.shape == value.shape or (evidence.moved and evidence.moved in user.dims):
            found += advisor.graph.constraints_after(user)
    for constraint in found:
        same_shape = constraint.shape == value.shape
        if lacks(constraint, evidence.axes) or (
            same_shape and constraint.layout != evidence.layout
        ):
            wanted = advisor.layouts.wanted(constraint.dims, constraint.shape)
            if constraint.layout != wanted and any(wanted):
                yield constraint


def _cause(
    advisor: Advisor,
    evidence: Evidence,
    reason: str,
    *,
    rule: str = '',
    changes: Sequence[Change] = (),
    avoidable: bool = False,
    source: str = '',
) -> Cause:
    value = evidence.value
    assert value is not None
    odd = [] if reason.startswith(_ASKS) else advisor.odd_rules(value, *evidence.taken_by)
    if odd:
        rule = advisor.layouts.rule_for(odd[0].after[0][0])
        reason += f'; {rule} is not as in the standard rules'
    distinct = tuple(dict.fromkeys([*odd, *changes]))
    avoidable = avoidable or bool(odd)
    return Cause(
        source=source or evidence.used_at or evidence.made_at,
        array=what_is(value),
        logical_axes=value.names,
        rule=rule,
        reason=reason,
        change=str(distinct[0]) if distinct else '',
        avoidable=avoidable,
        candidates=distinct,
    )


def what_is(value: Value) -> str:
    """What a value is, for people: 'params/w', 'the gradient of params/w' or 'an activation'."""
    if value.argument:
        return value.argument
    if value.gradient_of:
        return f'the gradient of {value.gradient_of}'
    if value.update_of:
        return f'the update of {value.update_of}'
    return 'an activation' if not value.backward else 'the gradient of an activation'


def over(axes: Sequence[str] | Axes) -> str:
    """Mesh axes as a message shows them: "'data' and 'model'"."""
    return ' and '.join(repr(axis) for axis in axes) or 'all devices'
