"""Layouts by partition rules: regular expressions on the paths of arrays, with their specs.

They are written as in EasyLM and FJFormer, [('attn/kernel', P('fsdp', 'mp')), ('.*', P())]: the
first rule whose expression is found in the path of an array decides its mesh axes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.plan.rows import NO_NAMES, without_name
from partitioning.plan.subject import Decision, Subject, whole, with_names
from partitioning.rules import (
    AxisRules,
    MeshAxes,
    MeshLike,
    Problem,
    ResolvedDimension,
    apply_policies,
    as_tuple,
    check_definite,
    from_tuple,
    padding_problems,
    rank_problem,
)
from partitioning.rules.checks import axis_problems

Entries = PartitionSpec | Sequence[MeshAxes] | str | None
# (regular expression, mesh axes of each dimension) pairs; a tuple or list can replace the spec.
PartitionRules = Sequence[tuple[str, Entries]]
_Rule = tuple[str, tuple[MeshAxes, ...]]


@dataclasses.dataclass(frozen=True)
class RuleLayout:
    """The layout that partition rules give.

    Attributes:
      rules: the rules in order of priority; see `check_partition_rules`.
      policies: the policy for arrays that no rule matches, and the one for sizes that their mesh
        axes do not divide.
    """

    rules: tuple[_Rule, ...]
    policies: AxisRules

    def decide(self, subject: Subject, mesh: MeshLike) -> Decision:
        """The dimensions of an array, and what is wrong with the rule that matches it."""
        shape = subject.shape
        if math.prod(shape) == 1:
            return whole(subject, 'an array of one element'), ()
        rule = self.first_match('/'.join(subject.path), '/'.join(subject.path[subject.tree :]))
        if rule is None:
            return self._unmatched(subject)
        pattern, axes = rule
        if problems := (*_spec_problems(rule, shape, mesh),):
            return whole(subject, f'partition rule {pattern!r} does not fit'), problems
        entries = (*axes, *[None] * (len(shape) - len(axes)))
        dimensions = [_dimension(pattern, entry) for entry in entries]
        found = (*apply_policies(dimensions, shape, mesh, self.policies.on_indivisible),)
        if any(d.policy == 'pad' for d in dimensions):
            found = (*found, *padding_problems(mesh))
        dimensions = [
            dataclasses.replace(d, reason=f'partition rule {pattern!r}: {d.reason}')
            if d.policy
            else d
            for d in dimensions
        ]
        if found:
            dimensions = [dataclasses.replace(d, mesh_axes=None, policy=None) for d in dimensions]
        problems = tuple(
            p._replace(message=f'partition rule {pattern!r}: {p.message}') for p in found
        )
        return with_names(dimensions, subject.names), problems

    def first_match(self, *texts: str) -> _Rule | None:
        """The first rule whose regular expression is found in one of the texts."""
        for rule in self.rules:
            if any(re.search(rule[0], text) for text in texts):
                return rule
        return None

    def _unmatched(self, subject: Subject) -> Decision:
        reason = 'no partition rule matches it' if self.rules else NO_NAMES
        dimensions = whole(subject, reason)
        if self.policies.on_unmatched == 'error':
            return dimensions, (Problem('unmatched', reason),)
        return tuple(dataclasses.replace(d, policy='replicate') for d in dimensions), ()


def unmatched_problem(paths: Sequence[str]) -> Problem:
    """The one problem of all arrays that no partition rule matches."""
    more = f' and {len(paths) - 3} more' if len(paths) > 3 else ''
    return Problem(
        'unmatched',
        f"no partition rule matches {', '.join(paths[:3])}{more}. Add ('{re.escape(paths[0])}', "
        "PartitionSpec(...)), or a last ('.*', PartitionSpec()), which replicates them",
    )


def check_partition_rules(rules: Iterable[Any]) -> tuple[_Rule, ...]:
    """Checks partition rules and returns them as (regular expression, mesh axes) pairs.

    Args:
      rules: (regular expression, spec) pairs. A spec is a PartitionSpec or, as gin files write it,
        a tuple or list with the mesh axes of each dimension. Dimensions after its end, and all
        dimensions of None, are replicated.

    Raises:
      ValueError: if a rule is not such a pair, or if its regular expression is invalid.
    """
    if isinstance(rules, str | Mapping | set) or not isinstance(rules, Iterable):
        raise ValueError(
            "layout must be 'fsdp', 'data_parallel' or partition rules such as "
            f"[('attn/kernel', PartitionSpec('data')), ('.*', PartitionSpec())], not {rules!r}"
        )
    checked: list[_Rule] = []
    for rule in rules:
        match rule:
            case (str(pattern), None):
                checked.append((pattern, ()))
            case (str(pattern), str(axis)):
                checked.append((pattern, (axis,)))
            case (str(pattern), PartitionSpec() | tuple() | list() as entries):
                check_definite(PartitionSpec(*entries), f'partition rule for {pattern!r}')
                checked.append((pattern, tuple(_entry(e, rule) for e in entries)))
            case _:
                raise ValueError(
                    "a partition rule must be ('regular expression', PartitionSpec(...)), not "
                    f'{rule!r}'
                )
        try:
            re.compile(checked[-1][0])
        except re.error as error:
            raise ValueError(
                f'partition rule {rule!r} is not a valid regular expression: {error}'
            ) from error
    if not checked:
        raise ValueError("there are no partition rules: layout='data_parallel' replicates all")
    return tuple(checked)


def _entry(entry: Any, rule: Any) -> MeshAxes:
    """One entry of a spec: a mesh axis, several, or None."""
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return from_tuple(entry)
    raise ValueError(
        f'partition rule {rule!r} has the entry {entry!r}: write a mesh axis, a tuple of mesh axes '
        'or None for each dimension'
    )


def _dimension(pattern: str, axes: MeshAxes) -> ResolvedDimension:
    reason = f'partition rule {pattern!r} {"replicates" if axes is None else "shards"} it'
    return dataclasses.replace(
        without_name(reason), mesh_axes=axes, wanted=axes, rule=(pattern, axes)
    )


def _spec_problems(rule: _Rule, shape: tuple[int, ...], mesh: MeshLike) -> Iterator[Problem]:
    """Why no array of this shape on the mesh can have the spec of a rule."""
    axes, shown = rule[1], f'partition rule {rule_str(rule)}'
    for problem in axis_problems([a for entry in axes for a in as_tuple(entry)], mesh):
        yield problem._replace(message=f'{shown}: {problem.message}')
    if len(axes) > len(shape):
        problem = rank_problem(shown, len(axes), shape)
        yield problem._replace(message=f'{problem.message}, or a rule for this array before it')


def rule_str(rule: _Rule) -> str:
    """A rule as code: `('attn/kernel', P('fsdp', 'mp'))`."""
    return f'({rule[0]!r}, P({", ".join(map(repr, rule[1]))}))'
