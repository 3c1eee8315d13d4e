"""Why a program exchanges data: the rule or the line, and what would remove it."""

from __future__ import annotations

from partitioning.aot.blame.advice import Advisor
from partitioning.aot.blame.cause import Cause
from partitioning.aot.blame.changes import LayoutChange
from partitioning.aot.blame.evidence import Evidence
from partitioning.aot.blame.making_causes import make_cause, over
from partitioning.aot.blame.moved_values import explain_moved_value
from partitioning.aot.blame.values import Value
from partitioning.aot.blame.whole_dimensions import written_otherwise
from partitioning.aot.user_lines import user_line

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
        return make_cause(
            advisor,
            evidence,
            f'the program asks for it with jax.lax.{name}',
            asked_for=True,
            source=evidence.made_at,
        )
    if evidence.kind in ('all-reduce', 'reduce-scatter'):
        return _explain_sum(evidence, value, advisor)
    if evidence.kind == 'all-gather' and value.argument:
        return _explain_gathered_argument(evidence, value, advisor)
    return explain_moved_value(evidence, value, advisor)


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
        return make_cause(
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
        return make_cause(advisor, evidence, reason, rule=rule, source=evidence.made_at)
    what = f'{name!r}' if name else 'a dimension'
    reason = f'the sum over {what} runs over devices along {over(axes)}, which have parts of it'
    # Devices have other rows of the batch, unless a constraint has given all rows to all.
    by_parameter = by_rows and name not in ('batch', 'length')
    if constraints := advisor.misplaced_constraints(value, axes) if by_parameter else []:
        line = user_line(constraints[0].stack)
        return make_cause(
            advisor,
            evidence,
            f'{reason}, since the constraint at {line} gives them the same rows',
            rule=rule,
            changes=advisor.replace_constraints(constraints, value),
            avoidable=True,
            source=line,
        )
    if name and name not in ('batch', 'length') and layouts.is_unusual(name):
        standard = layouts.to_standard(name)
        return make_cause(
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
        return make_cause(advisor, evidence, reason, rule=rule, source=evidence.made_at)
    changes = list(written_otherwise(value, evidence.made_at, layouts))
    changes += advisor.lay_out(value, evidence.layout)
    if summed is not None and summed.name is None:
        changes += advisor.other_layouts(summed.argument)
    if summed is not None and summed.name and set(summed.axes) & set(axes):
        changes += advisor.other_rules(summed.name)
    return make_cause(
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
        return make_cause(advisor, evidence, reason, rule=rule, changes=[change], avoidable=True)
    if row is not None and row.role == 'optimizer':
        reason = f'{split}, but the update of its parameter is computed whole'
        changes = advisor.like_parameter(value.argument)
        return make_cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
    unusual = layouts.is_unusual(name)
    if set(axes) <= set(layouts.batch_axes):
        reason = f'expected: {split}, and each device gathers it for use'
        changes = [layouts.to_standard(name)] if unusual and name else []
        changes += advisor.other_layouts(value.argument) if name is None else []
        if row is not None and row.role == 'other':
            reason = f'{split}, but {evidence.used_at} needs all of it'
            changes += advisor.relax(evidence)
            return make_cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
        unused = [a for a in advisor.unused_by(row) if a not in layouts.batch_axes]
        if unused:
            changes += advisor.shard_more(value.argument, but=axes)
            reason += f'; it is whole along {over(unused)}'
            rule = layouts.rule_for(advisor.whole_name(value.argument, unused))
        return make_cause(
            advisor, evidence, reason, rule=rule, changes=changes, avoidable=bool(changes)
        )
    reason = f'{split}, but the operation at {evidence.used_at} needs all of it'
    changes = [layouts.to_standard(name)] if unusual and name else []
    changes += advisor.other_layouts(value.argument) if name is None else []
    changes += [*advisor.relax(evidence), *advisor.keep_layout(evidence)]
    if name:
        changes += advisor.other_rules(name)
    return make_cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
