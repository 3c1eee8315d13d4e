"""Why a program exchanges data: the line, the array and the rule, and what to write instead.

A constraint forgets the batch, under the rules [('batch', 'data'), ('mlp', 'model')]:

    hidden = jnp.tanh(x @ w)                      # model.py:30, (32, 128) floats
    hidden = constrain(hidden, (None, 'mlp'))     # model.py:31
    out = hidden @ w_out                          # model.py:32

The evidence is an all-gather over 'data' of dimension 0 of the activation of line 30. The
activation is neither an argument nor summed, so the functions in `_EXPLANATIONS` are tried in turn.
The first one that applies is `_constrained`. Its cause has the source 'model.py:31', the rule
('batch', 'data') and the change
"write constrain(x, ('batch', 'mlp')) at model.py:31".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.causes.cause import (
    ASKED,
    Cause,
    Change,
    ConstraintRemoval,
    LayoutChange,
    over,
    what_is,
)
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import axes_of_row, sharding_of_row
from meshwright.causes.possible_changes import PossibleChanges
from meshwright.causes.transposed_sums import UNCHECKED, explain_transposed
from meshwright.causes.value_graph import lacks
from meshwright.causes.whole_dimensions import cast_late, written_for, written_otherwise
from meshwright.causes.wording import in_words, name_dim, say_rows, spec_text, what_makes
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.primitives import names_in
from meshwright.jaxpr.values import Value
from partitioning.plan.rows import PlanRow

# Logical axes over which tensor parallelism sums.
_OF_TENSORS = names_in('mlp heads kv joined_kv vocab kv_heads expert_mlp expert')


@dataclasses.dataclass(frozen=True)
class Move:
    """An exchange of a value that was found in the traced function.

    Attributes:
      evidence: what the exchange moves.
      value: the value that it moves.
      possible: the changes that can be written for the function.
    """

    evidence: Evidence
    value: Value
    possible: PossibleChanges

    @property
    def name(self) -> str | None:
        """The logical axis of the dimension that is exchanged."""
        return self.evidence.moved.name if self.evidence.moved else None

    @property
    def split(self) -> str:
        """The layout of the value before the exchange, for people."""
        moved = self.evidence.moved
        words, axes = in_words(self.value), over(self.evidence.axes)
        if moved is not None and moved.name:
            return f'{words} is sharded over {axes} along {name_dim(moved)}'
        layout, shape = self.evidence.layout, self.value.shape
        held = f', {shape} as {spec_text(layout)},' if any(layout) and len(shape) > 1 else ''
        return f'{words}{held} is sharded over {axes}'

    def cause(
        self,
        why: str,
        changes: Sequence[Change] = (),
        *,
        rule: str | None = None,
        suspect: bool = True,
        asked_for: bool = False,
        source: str = '',
    ) -> Cause:
        """The cause of the exchange. Unusual rules and layouts around it come first.

        Args:
          why: why it exists.
          changes: the changes that may remove it.
          rule: the rule that decides it; by default the rule of the dimension that is exchanged.
          suspect: whether the layout seems not to need it.
          asked_for: whether the program itself asks for it.
          source: the user's line; by default the line that needs the result.
        """
        possible, evidence = self.possible, self.evidence
        around = () if asked_for else (self.value, *evidence.taken_by)
        if rule is None:
            rule = possible.layouts.rule_for(self.name)
        if unusual := possible.standard_rules(*around):
            rule = possible.layouts.rule_for(unusual[0].names[0])
            why += f'; {rule} is not as in the standard rules'
        misplaced = possible.fitting_layouts(*around)
        if misplaced and misplaced[0].names:  # without names, it is a guess
            why += f'; the layout of {misplaced[0].path} does not fit its uses'
        if (others := evidence.combined - 1) > 0:
            arrays = 'one more array' if others == 1 else f'{others} more arrays'
            why += f'; the compiler sends {arrays} together with it'
        distinct = tuple(dict.fromkeys([*unusual, *misplaced, *changes]))
        return Cause(
            source=source or evidence.used_at or evidence.made_at,
            array=what_is(self.value),
            logical_axes=self.value.names,
            rule=rule,
            why=why,
            change=str(distinct[0]) if distinct else '',
            suspect=suspect or bool(unusual or misplaced),
            all_changes=distinct,
        )


def explain_exchange(evidence: Evidence, possible: PossibleChanges) -> Cause:
    """Says why an exchange exists and what to write instead.

    Args:
      evidence: what it moves.
      possible: the changes that can be written for the function.
    """
    value = evidence.value
    if value is None:
        return Cause(
            source=evidence.made_at or evidence.used_at,
            array='an array of the compiler',
            logical_axes=(),
            rule='',
            why=(
                f'the compiler moves an array over {over(evidence.axes)} that no line of the '
                'program makes'
            ),
        )
    move, operation = Move(evidence, value, possible), evidence.path.rpartition('/')[2]
    if evidence.kind == 'all-gather':
        late = list(cast_late(value, possible.graph, evidence.dtype))
        if late:
            why = f'{move.split}, and is gathered in {value.dtype}, but used in a smaller type'
            return move.cause(why, late, asked_for=True, source=late[0].source)
    if why := explain_transposed(evidence, possible.graph):
        suspect, at = UNCHECKED in why, evidence.made_at
        return move.cause(why, rule='', suspect=suspect, asked_for=True, source=at)
    if operation in KINDS:  # a program can ask for these by themselves
        return move.cause(
            f'{ASKED} jax.lax.{_written(operation)}',
            rule='',
            suspect=False,
            asked_for=True,
            source=evidence.asked_at or evidence.made_at,
        )
    if evidence.kind in ('all-reduce', 'reduce-scatter'):
        return _explain_gradient(move) if value.gradient_of else _explain_sum(move)
    if evidence.kind == 'all-gather' and value.argument:
        return _explain_gathered_argument(move)
    causes = (explain(move) for explain in _EXPLANATIONS)
    return next((cause for cause in causes if cause is not None), None) or _needed_otherwise(move)


def _written(operation: str) -> str:
    """The name by which a program asks for an exchange: jax has names of its own for some."""
    name = operation.removesuffix('_invariant').replace('psum2', 'psum')
    return name.replace('reduce_scatter', 'psum_scatter')


def _explain_gradient(move: Move) -> Cause:
    path, axes, possible = move.value.gradient_of, move.evidence.axes, move.possible
    layouts = possible.layouts
    row, rule = layouts.rows.get(path), ''
    if set(axes) <= set(layouts.batch_axes):
        why = (
            f'each device along {over(axes)} has the gradient of {path} for its own rows of the '
            'batch, and their sum is needed'
        )
    elif row is not None and set(axes) <= sharding_of_row(row):
        why = (
            f'each device along {over(axes)} computes a part of the gradient of {path}, and their '
            'sum is needed'
        )
    else:
        why = (
            f'{path} is not sharded over {over(axes)}, along which its gradient is computed in '
            'parts'
        )
    unused = [a for a in layouts.unused_by(row) if a not in layouts.batch_axes]
    if row is not None and unused:
        why += f'; it is whole along {over(unused)}: {row.reason}'
        rule = layouts.rule_for(possible.whole_name(path, unused))
    return move.cause(
        why,
        list(possible.shard_more(path, but=axes)),
        rule=rule or layouts.rule_for('batch'),
        suspect=bool(unused),
        source=move.evidence.made_at,
    )


def _explain_sum(move: Move) -> Cause:
    """The cause of a sum over a dimension whose parts are on different devices."""
    value, evidence, possible = move.value, move.evidence, move.possible
    layouts, axes, made_at = possible.layouts, evidence.axes, evidence.made_at
    by_rows = set(axes) <= set(layouts.batch_axes)
    summed = next((d for d in value.contracted if d and set(d.axes) & set(axes)), None)
    summed = summed or next((d for d in value.contracted if d and d.name), None)
    name = summed.name if summed else None
    rule = layouts.rule_for(name)
    if value.size <= 1 or (by_rows and name in ('batch', 'length', None) and len(value.shape) < 2):
        why = f'a sum over values on different devices along {over(axes)}'
        return move.cause(why, rule=rule, suspect=False, source=made_at)
    rows = say_rows(layouts)
    own = {operand.argument for operand in value.operands}
    told = summed if summed and (summed.name or summed.argument in own) else None
    why = (
        f'{what_makes(value)} sums over {name_dim(told)}, which is sharded over {over(axes)}, so '
        f'that each device has a part of the sum{f"; {rows}" if rows else ""}'
    )
    # Devices along the axes of the batch have different rows, unless a constraint gives them all.
    by_parameter = by_rows and name not in ('batch', 'length')
    if constraints := possible.misplaced_constraints(value, axes) if by_parameter else []:
        line = constraints[0].line
        why += f'; the constraint at {line} gives the devices the same rows'
        replaced = possible.replace_constraints(constraints, value)
        return move.cause(why, replaced, rule=rule, source=line)
    if name and name not in ('batch', 'length') and layouts.is_unusual(name):
        return move.cause(why, [layouts.to_standard(name)], rule=rule, source=made_at)
    if name in _OF_TENSORS and not by_rows:
        why += ' (tensor parallelism)'
        return move.cause(why, rule=rule, suspect=False, source=made_at)
    changes: list[Change] = [*written_otherwise(value, made_at, layouts)]
    changes += possible.lay_out(value, evidence.layout)
    if summed is not None and summed.name is None:
        changes += possible.other_layouts(summed.argument)
    if summed is not None and summed.name and set(summed.axes) & set(axes):
        changes += layouts.fewer_axes(summed.name)
    return move.cause(why, changes, rule=rule, source=made_at)


def _explain_gathered_argument(move: Move) -> Cause:
    """The cause for an argument if a device needs more than its shard."""
    value, evidence, possible = move.value, move.evidence, move.possible
    layouts, path, rule = possible.layouts, value.argument, None
    row, line = layouts.rows.get(path), evidence.used_at or possible.graph.first_use(path)
    changes = possible.other_layouts(path) if move.name is None else []
    if not set(evidence.axes) <= set(layouts.batch_axes):
        changes += possible.relax(evidence)
        changes += layouts.fewer_axes(move.name) if move.name else []
        why = f'{move.split}, and is used at {line}, which needs all of it'
        return move.cause(why, changes)
    if row is not None and row.role == 'other':
        changes += possible.relax(evidence)
        return move.cause(f'{move.split}, and is used at {line}, which needs all of it', changes)
    why = (  # as FSDP does
        f'expected: {move.split}, and each device needs all of it{f" at {line}" if line else ""} '
        'for its rows'
    )
    if unused := [a for a in layouts.unused_by(row) if a not in layouts.batch_axes]:
        changes += possible.shard_more(path, but=evidence.axes)
        why += f'; it is whole along {over(unused)}'
        rule = layouts.rule_for(possible.whole_name(path, unused))
    return move.cause(why, changes, rule=rule, suspect=bool(changes), source=line)


def _of_a_parameter(move: Move) -> Cause | None:
    """The cause for the gradient or the update of a parameter."""
    value, evidence, possible = move.value, move.evidence, move.possible
    path = value.gradient_of or value.update_of
    if not path:
        return None
    row = possible.layouts.rows.get(path)
    changes: list[Change] = [
        ConstraintRemoval(source=constraint.line)
        for constraint in possible.graph.constraints_after(value)
        if lacks(constraint, evidence.axes)
    ]
    changes += possible.other_layouts(path)
    changes += possible.shard_more(path)
    if evidence.result is None:
        return move.cause(f'{move.split}, but its array is not', changes)
    wanted = () if row is None else axes_of_row(row)
    if len(evidence.layout) == len(wanted) and all(
        set(mine) <= set(theirs) for mine, theirs in zip(evidence.layout, wanted, strict=True)
    ):
        changes.insert(0, LayoutChange(path=path, layout=wanted, result=evidence.result))
    return move.cause(f'{move.split}, but the function returns it in another layout', changes)


def _used_whole(move: Move) -> Cause | None:
    """The cause for an operation that needs all of a dimension and can be written otherwise."""
    evidence, possible = move.evidence, move.possible
    for user in evidence.taken_by:
        sizes = possible.layouts.sizes
        if otherwise := list(written_for(user, move.value, evidence.dim, sizes)):
            line = otherwise[0].source
            changes: list[Change] = [*otherwise, *possible.relax(evidence)]
            why = f'{move.split}, but the operation at {line} needs all of it'
            return move.cause(why, changes, source=line)
    return None


def _multiplied(move: Move) -> Cause | None:
    """The cause for a product with a parameter that has a conflicting layout."""
    evidence, possible = move.evidence, move.possible
    row = _conflicting_parameter(move)
    if row is None:
        return None
    why = (
        f'{move.split}, but the dimension of {row.path} that it is multiplied with is not: '
        f'{row.reason}'
    )
    changes: list[Change] = [
        *possible.like_its_uses(row),
        *possible.leave_out(move.value, evidence.axes),
    ]
    return dataclasses.replace(
        move.cause(why, changes),
        array=row.path,
        logical_axes=tuple(row.logical_axes),
        source=evidence.used_at,
    )


def _constrained(move: Move) -> Cause | None:
    """The cause for a constraint that asks for another layout."""
    value, evidence, possible = move.value, move.evidence, move.possible
    conflicting = (
        _conflicts(move)
        or possible.misplaced_constraints(value, evidence.axes)
        or possible.needless_constraints(value, evidence.axes)
    )
    if not any(value.names):  # constraints on arrays of another rank are only near
        conflicting = [one for one in conflicting if len(one.shape) == len(value.shape)]
    if not conflicting:
        return None
    line = conflicting[0].line
    changes: list[Change] = [
        *possible.replace_constraints(conflicting, value, evidence.layout),
        ConstraintRemoval(source=line),
    ]
    why = f'{move.split}, and the constraint at {line} asks for another layout'
    return move.cause(why, changes, source=line)


# For a value that is gathered or divided anew and is not an argument: the first one that knows.
_EXPLANATIONS = (_of_a_parameter, _used_whole, _multiplied, _constrained)


def _needed_otherwise(move: Move) -> Cause:
    """The cause where nothing is known except the line that needs the value."""
    value, evidence, possible = move.value, move.evidence, move.possible
    changes: list[Change] = [
        *written_otherwise(value, evidence.used_at, possible.layouts),
        *possible.lay_out(value, evidence.layout),
    ]
    why = f'{move.split}, and is used at {evidence.used_at}, which needs another layout'
    return move.cause(why, changes, source=evidence.made_at)


def _conflicting_parameter(move: Move) -> PlanRow | None:
    """The parameter in a product with a value, if the layout of their common dimension differs.

    Constraints then shard a dimension of the parameter over mesh axes, and its layout does not.
    """
    axes, possible = set(move.evidence.axes), move.possible
    for product in possible.graph.products_of(move.value):
        for other in product.operands:
            row = possible.layouts.rows.get(other.argument)
            if row is None or row.role != 'parameters':
                continue
            wanted = possible.links.axes_of(row.path, len(row.shape))
            pairs = zip(wanted, axes_of_row(row), strict=True)
            if any(set(t) & axes and not set(t) <= set(mine) for t, mine in pairs):
                return row
    return None


def _conflicts(move: Move) -> list[Value]:
    """Constraints that fix another layout than the value has before the exchange."""
    value, evidence, graph = move.value, move.evidence, move.possible.graph
    found = [*graph.constraints_after(value)]
    for user in evidence.taken_by:
        if user.shape == value.shape or (evidence.moved and evidence.moved in user.dims):
            found += graph.constraints_after(user)
    return move.possible.conflicting(
        one
        for one in found
        if lacks(one, evidence.axes) or (one.shape == value.shape and one.layout != evidence.layout)
    )
