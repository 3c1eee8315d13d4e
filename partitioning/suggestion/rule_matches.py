"""A dry run of rules by path: which rule takes which array of a state, and what no rule takes."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from partitioning.plan.layouts import check_partition_rules
from partitioning.plan.rows import SMALL
from partitioning.plan.tables import Table, count, shape_str, text_tables
from partitioning.rules import AxisRules, check_path_rules, spec_str
from partitioning.state import nbytes, shape_of
from partitioning.state.boxes import flatten_state
from partitioning.state.naming import RuleTarget, rule_targets
from partitioning.state.path_names import How, match_paths, why_unused
from partitioning.values import value_str

Shape = tuple[int, ...]
_LISTED = 10  # the number of arrays that a table lists
_COLUMNS = 100
_LONGEST = 60  # characters of a path in a table, so that lines fit in the columns
_INDENT: Any = {'initial_indent': '  ', 'subsequent_indent': '  ', 'break_long_words': False}


class RuleMatch(NamedTuple):
    """One rule and the arrays that it takes.

    Attributes:
      pattern: the regular expression.
      names: the names of the dimensions, or the PartitionSpec of a partition rule.
      arrays: the shape of each array that the rule takes, by path.
      why_unused: why it takes none, and what to do; empty if it takes some.
    """

    pattern: str
    names: Any
    arrays: Mapping[str, Shape]
    why_unused: str = ''


@dataclasses.dataclass(frozen=True)
class RuleMatches:
    """What path rules take of a state.

    Usage:
      print(explain_rules(state, rules))

    Attributes:
      rules: each rule with the arrays that it takes.
      untaken: the shape of each array that needs a rule and has none, by path.
      misfits: the arrays whose rule has another number of names than they have dimensions, by path:
        the shape and the names.
      kept: the number of arrays that no rule takes because they carry names.
      small: the number of small arrays that need no rule because they are not parameters.
    """

    rules: tuple[RuleMatch, ...]
    untaken: Mapping[str, Shape]
    misfits: Mapping[str, tuple[Shape, Any]]
    kept: int = 0
    small: int = 0

    @property
    def unused(self) -> tuple[RuleMatch, ...]:
        """The rules that take nothing."""
        return tuple(rule for rule in self.rules if not rule.arrays)

    @property
    def is_complete(self) -> bool:
        """Whether every array has a rule that fits, or needs none, and every rule takes one."""
        return not (self.untaken or self.unused or self.misfits)

    def __str__(self) -> str:
        taken = sum(len(rule.arrays) for rule in self.rules)
        total = taken + len(self.untaken) + self.kept + self.small
        counts = {
            f'{self.kept:,} keep the names they carry': self.kept,
            f'{self.small:,} are small and need none': self.small,
            f'{len(self.untaken):,} need a rule and have none': len(self.untaken),
        }
        used = len(self.rules) - len(self.unused)
        parts = [f'{taken:,} taken by {count(used, "rule")}']
        parts += [text for text, number in counts.items() if number]
        return f'{count(total, "array")}: {", ".join(parts)}\n\n{text_tables(self._tables())}'

    def _tables(self) -> list[Table]:
        rules = [line for rule in self.rules if rule.arrays for line in _lines(rule)]
        untaken = [(_clip(path), shape_str(shape)) for path, shape in self.untaken.items()]
        unused = [
            (line,)
            for rule in self.unused
            for line in [rule.pattern, *textwrap.wrap(rule.why_unused, _COLUMNS, **_INDENT)]
        ]
        misfits = [(_clip(p), shape_str(s), _names_str(n)) for p, (s, n) in self.misfits.items()]
        tables = [
            Table('each rule, and below it the first array that it takes', _RULE_HEAD, rules),
            Table(f'no rule takes {_listed(untaken)}', ('array', 'shape'), untaken[:_LISTED]),
            Table(f'{count(len(self.unused), "rule")} without arrays', ('rule',), unused),
            Table(
                f'another number of names than dimensions: {_listed(misfits)}',
                ('array', 'shape', 'names'),
                misfits[:_LISTED],
            ),
        ]
        return [table for table in tables if table.rows]


_RULE_HEAD = ('arrays', 'names', 'rule')


def explain_rules(state: Any, rules: Sequence[tuple[str, Any]]) -> RuleMatches:
    """A dry run of path rules: which rule takes which array, and what no rule takes.

    It lays out nothing and accepts rules that are not complete. The arrays of an optimizer are not
    listed, because they follow their parameters.

    Args:
      state: a pytree of parameters or a train state, abstract or not, of any library.
      rules: path rules, (regular expression, names) pairs, as `AxisRules(names=...)` takes them; or
        partition rules, (regular expression, PartitionSpec) pairs, as PjitPartitioner does. Of
        AxisRules, the names are taken.

    Raises:
      ValueError: if a rule is malformed, or if `state` has no arrays.
    """
    if not any(hasattr(x, 'dtype') for x in jax.tree.leaves(state)):
        raise ValueError(
            f'explain_rules takes a state or its parameters, but {value_str(state)} has no arrays: '
            'write explain_rules(partitioner.eval_shape(init, key), rules)'
        )
    if isinstance(rules, AxisRules):
        if not rules.names:
            raise ValueError(
                'explain_rules takes path rules, but these AxisRules have no names: write the '
                "(regular expression, names) pairs, or AxisRules(names=[('.*/kernel', ...), ...])"
            )
        rules = rules.names
    how: How
    pairs: Sequence[tuple[str, Any]]
    if any(isinstance(rule, tuple | list) and _is_spec(rule[-1]) for rule in rules):
        how = 'search'
        pairs = [(p, PartitionSpec(*axes)) for p, axes in check_partition_rules(rules)]
    else:
        how, pairs = 'fullmatch', check_path_rules(rules)
    targets = list_targets(state)
    texts = {target.path: target.texts for target in targets.values()}
    taken = match_paths(texts, pairs, how)
    by_rule: list[dict[str, Shape]] = [{} for _ in pairs]
    misfits: dict[str, tuple[Shape, Any]] = {}
    left: dict[str, RuleTarget] = {}
    for path, target in targets.items():
        shape, index = shape_of(target.array), taken.get(target.path)
        if index is None:
            left[path] = target
            continue
        by_rule[index][path] = shape
        names = pairs[index][1]
        is_short_spec = how == 'search' and (len(names) < len(shape) or math.prod(shape) == 1)
        if len(names) != len(shape) and not is_short_spec:
            misfits[path] = shape, names
    untaken = {path: shape_of(t.array) for path, t in left.items() if needs_rule(t)}
    kept = sum(target.has_names for target in left.values())
    shown = {target.path: (*target.texts, path) for path, target in targets.items()}
    return RuleMatches(
        tuple(
            RuleMatch(pattern, names, arrays, '' if arrays else why_unused(pattern, shown, how))
            for (pattern, names), arrays in zip(pairs, by_rule, strict=True)
        ),
        untaken,
        misfits,
        kept,
        len(left) - len(untaken) - kept,
    )


def list_targets(state: Any) -> dict[str, RuleTarget]:
    """The arrays of a state that path rules can name, by the path for which to write a rule.

    This is the path below 'params' if that is there and enough, and otherwise the whole path.
    """
    found = rule_targets(flatten_state(state).entries)
    targets = [target for target in found if hasattr(target.array, 'dtype')]
    below = {}
    for target in targets:
        whole, inside = target.texts[0], target.texts[-1]
        is_below = whole.removesuffix(f'/{inside}').split('/')[-1] == 'params'
        below[inside if is_below else whole] = target
    if len(below) == len(targets):
        return below
    return {target.texts[0]: target for target in targets}


def needs_rule(target: RuleTarget) -> bool:
    """Whether an array that no rule takes could not be laid out."""
    if target.has_names or not shape_of(target.array):
        return False
    return target.is_parameter or nbytes(target.array) > SMALL


def _listed(arrays: Sequence[Any]) -> str:
    rest = len(arrays) - _LISTED
    return count(len(arrays), 'array') + (f', {rest:,} of them not listed' if rest > 0 else '')


def _lines(rule: RuleMatch) -> list[tuple[str, str, str]]:
    """The lines of a rule in the table: the rule, and below it the first array that it takes."""
    path, shape = next(iter(rule.arrays.items()))
    example = f'{_clip(path)} {shape_str(shape)}'
    return [(f'{len(rule.arrays):,}', _names_str(rule.names), rule.pattern), ('', '', example)]


def _names_str(names: Any) -> str:
    if _is_spec(names):
        return spec_str(names)
    return ', '.join(f'({", ".join(n)})' if isinstance(n, tuple) else str(n) for n in names)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _clip(path: str) -> str:
    """A long path without its first characters."""
    return path if len(path) <= _LONGEST else f'...{path[3 - _LONGEST :]}'
