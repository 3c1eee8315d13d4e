"""Partition rules: regular expressions on the paths of arrays, with their specs.

They are written as in EasyLM and FJFormer, [('attn/kernel', P('fsdp', 'mp')), ('.*', P())]: the
first rule whose expression is found in the path of an array decides its mesh axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.rules import (
    MeshAxes,
    MeshLike,
    Problem,
    as_tuple,
    check_definite,
    from_tuple,
    rank_problem,
)
from partitioning.rules.checks import axis_problems

# The mesh axes of each dimension; a tuple or list can replace the spec.
SpecEntries = PartitionSpec | Sequence[MeshAxes] | str | None
PartitionRules = Sequence[tuple[str, SpecEntries]]
PartitionRule = tuple[str, tuple[MeshAxes, ...]]  # as check_partition_rules returns it


def check_partition_rules(rules: Iterable[Any]) -> tuple[PartitionRule, ...]:
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
    checked: list[PartitionRule] = []
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


def rule_problems(rule: PartitionRule, shape: tuple[int, ...], mesh: MeshLike) -> Iterator[Problem]:
    """Why no array of this shape on the mesh can have the spec of a rule."""
    axes, shown = rule[1], f'partition rule {rule_str(rule)}'
    for problem in axis_problems([a for entry in axes for a in as_tuple(entry)], mesh):
        yield problem._replace(message=f'{shown}: {problem.message}')
    if len(axes) > len(shape):
        problem = rank_problem(shown, len(axes), shape)
        yield problem._replace(message=f'{problem.message}, or a rule for this array before it')


def unmatched_problem(paths: Sequence[str]) -> Problem:
    """The one problem of all arrays that no partition rule matches."""
    more = f' and {len(paths) - 3} more' if len(paths) > 3 else ''
    return Problem(
        'unmatched',
        f"no partition rule matches {', '.join(paths[:3])}{more}. Add ('{re.escape(paths[0])}', "
        "PartitionSpec(...)), or a last ('.*', PartitionSpec()), which replicates them",
    )


def rule_str(rule: PartitionRule) -> str:
    """A rule as code: `('attn/kernel', P('fsdp', 'mp'))`."""
    return f'({rule[0]!r}, P({", ".join(map(repr, rule[1]))}))'
