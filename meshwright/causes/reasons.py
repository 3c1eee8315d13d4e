"""Why a program exchanges data: the rule or the line, and what would remove it."""

from __future__ import annotations

from meshwright.causes.advice import Advisor
from meshwright.causes.cause import Cause
from meshwright.causes.changes import Change, LayoutChange
from meshwright.causes.evidence import Evidence
from meshwright.causes.making_causes import Move, over
from meshwright.causes.moved_values import explain_moved_value
from meshwright.causes.whole_dimensions import written_otherwise
from meshwright.jaxpr.values import Dim
from meshwright.user_lines import user_line
from partitioning.plan.rows import PlanRow

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
    move, operation = Move(evidence, value, advisor), evidence.path.rpartition('/')[2]
    if operation in _ASKED:
        return move.cause(
            f'the program asks for it with jax.lax.{operation}',
            rule='',
            avoidable=False,
            asked_for=True,
            source=evidence.made_at,
        )
    if evidence.kind in ('all-reduce', 'reduce-scatter'):
        return _explain_gradient(move) if value.gradient_of else _explain_sum(move)
    if evidence.kind == 'all-gather' and value.argument:
        return _explain_gathered_argument(move)
    return explain_moved_value(move)


def _explain_gradient(move: Move) -> Cause:
    """The cause of the sum of a gradient."""
    path, axes, advisor = move.value.gradient_of, move.evidence.axes, move.advisor
    layouts = advisor.layouts
    if set(axes) <= set(layouts.batch_axes):
        reason = (
            f'each device along {over(axes)} has the gradient of {path} for its rows, and their '
            'sum is needed'
        )
    else:
        reason = (
            f'{path} is not sharded over {over(axes)}, along which its gradient is computed in '
            'parts'
        )
    row, rule = layouts.rows.get(path), ''
    unused = [a for a in advisor.unused_by(row) if a not in layouts.batch_axes] if row else []
    if row is not None and unused:
        reason += f'; it is whole along {over(unused)}: {row.reason}'
        rule = layouts.rule_for(advisor.whole_name(path, unused))
    return move.cause(
        reason,
        list(advisor.shard_more(path, but=axes)),
        rule=rule or layouts.rule_for('batch'),
        avoidable=bool(unused),
        source=move.evidence.made_at,
    )


def _explain_sum(move: Move) -> Cause:
    """The cause of a sum over a dimension of which devices have parts."""
    value, evidence, advisor = move.value, move.evidence, move.advisor
    layouts, axes, made_at = advisor.layouts, evidence.axes, evidence.made_at
    by_rows = set(axes) <= set(layouts.batch_axes)
    summed = next((d for d in value.contracted if d and set(d.axes) & set(axes)), None)
    summed = summed or next((d for d in value.contracted if d and d.name), None)
    name = summed.name if summed else None
    rule = layouts.rule_for(name)
    if value.size <= 1 or (by_rows and name in ('batch', 'length', None) and len(value.shape) < 2):
        reason = f'a sum over values on different devices along {over(axes)}'
        return move.cause(reason, rule=rule, avoidable=False, source=made_at)
    what = f'{name!r}' if name else 'a dimension'
    reason = f'the sum over {what} runs over devices along {over(axes)}, which have parts of it'
    # Devices have other rows of the batch, unless a constraint has given all rows to all.
    by_parameter = by_rows and name not in ('batch', 'length')
    if constraints := advisor.misplaced_constraints(value, axes) if by_parameter else []:
        line = user_line(constraints[0].stack)
        reason += f', since the constraint at {line} gives them the same rows'
        replaced = advisor.replace_constraints(constraints, value)
        return move.cause(reason, replaced, rule=rule, source=line)
    if name and name not in ('batch', 'length') and layouts.is_unusual(name):
        return move.cause(reason, [layouts.to_standard(name)], rule=rule, source=made_at)
    if name in _OF_TENSORS and not by_rows:
        reason += ' (tensor parallelism)'
        return move.cause(reason, rule=rule, avoidable=False, source=made_at)
    changes = _changes_of_sum(move, summed)
    return move.cause(reason, changes, rule=rule, source=made_at)


def _changes_of_sum(move: Move, summed: Dim | None) -> list[Change]:
    """What may remove a sum: other code, another layout, or another rule of the dimension."""
    value, evidence, advisor = move.value, move.evidence, move.advisor
    changes: list[Change] = [*written_otherwise(value, evidence.made_at, advisor.layouts)]
    changes += advisor.lay_out(value, evidence.layout)
    if summed is not None and summed.name is None:
        changes += advisor.other_layouts(summed.argument)
    if summed is not None and summed.name and set(summed.axes) & set(evidence.axes):
        changes += advisor.other_rules(summed.name)
    return changes


def _explain_gathered_argument(move: Move) -> Cause:
    """The cause for an argument of which a device needs more than its shard."""
    value, evidence, advisor = move.value, move.evidence, move.advisor
    row = advisor.layouts.rows.get(value.argument)
    if evidence.result is not None and not evidence.taken_by:
        wanted = advisor.layouts.wanted(value.dims, value.shape)
        change = LayoutChange(path=value.argument, layout=wanted, result=evidence.result)
        return move.cause(f'{move.split}, but the function returns it whole', [change])
    if row is not None and row.role == 'optimizer':
        reason = f'{move.split}, but the update of its parameter is computed whole'
        return move.cause(reason, list(advisor.like_parameter(value.argument)))
    changes = move.standard_rule()
    changes += advisor.other_layouts(value.argument) if move.name is None else []
    if not set(evidence.axes) <= set(advisor.layouts.batch_axes):
        changes += [*advisor.relax(evidence), *advisor.keep_layout(evidence)]
        changes += advisor.other_rules(move.name) if move.name else []
        reason = f'{move.split}, but the operation at {evidence.used_at} needs all of it'
        return move.cause(reason, changes)
    if row is not None and row.role == 'other':
        changes += advisor.relax(evidence)
        return move.cause(f'{move.split}, but {evidence.used_at} needs all of it', changes)
    return _explain_gathered_parameter(move, row, changes)


def _explain_gathered_parameter(move: Move, row: PlanRow | None, changes: list[Change]) -> Cause:
    """The cause for a parameter that is gathered for use, as FSDP does."""
    path, advisor, rule = move.value.argument, move.advisor, None
    reason = f'expected: {move.split}, and each device gathers it for use'
    if unused := [a for a in advisor.unused_by(row) if a not in advisor.layouts.batch_axes]:
        changes = [*changes, *advisor.shard_more(path, but=move.evidence.axes)]
        reason += f'; it is whole along {over(unused)}'
        rule = advisor.layouts.rule_for(advisor.whole_name(path, unused))
    return move.cause(reason, changes, rule=rule, avoidable=bool(changes))
