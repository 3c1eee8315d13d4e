"""Compiles a program with suggested changes, and finds the change that saves the most bytes.

The rules of 'mlp' and 'vocab' were dropped, and 6 compilations are allowed:

    the causes name four changes; changes that concern the most bytes come first
    add ('vocab', 'model')              saves 40 MB
    add ('mlp', 'model')                saves 25 MB
    ...
    both rules together                 saves 70 MB: at least 25% more than one of them, so this
                                        is the answer
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from meshwright.causes.cause import (
    Cause,
    Change,
    CodeChange,
    ConstraintChange,
    ConstraintRemoval,
    LayoutChange,
    RuleChange,
    join_changes,
)
from meshwright.causes.explaining import list_possible_changes
from meshwright.causes.layouts import KnownLayouts
from meshwright.causes.possible_changes import PossibleChanges
from meshwright.causes.trying import CompiledFunction, TriedChange, try_change

Rewrite = Callable[[CodeChange], jax.stages.Traced | None]
Attempt = Callable[[Change], TriedChange | None]

_JOINED = 2  # the number of compilations that are kept for two changes together
_MORE = 1.25  # two changes, or a later change, are preferred if they save this many times more
_TRADED = 0.25  # the weight of a byte that sharding over axes of the batch saves
_UNDONE = 0.6  # the weight of a byte that removing a constraint saves: others may want it
_EXPECTED = 0.1  # the weight of a cause that the layout needs, next to a suspect


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestChange:
    """The change that saves the most among those that were compiled, and its cause.

    Attributes:
      cause: the largest cause that the change is for, with the rule or the line that it changes.
        `confirmed` is False if no change helps, and None if none could be compiled.
      saved: what the change does, or None if no change helps.
      tried: every change that was compiled.
      untried: the changes of code that only its author can make, the most promising first.
    """

    cause: Cause
    saved: TriedChange | None
    tried: tuple[TriedChange, ...]
    untried: tuple[CodeChange, ...]


def find_change(
    function: CompiledFunction,
    found: Iterable[tuple[float, Cause]] | None = None,
    *,
    most: int = 6,
    rewrite: Rewrite | None = None,
) -> BestChange | None:
    """Compiles a function with the most promising changes, and keeps the one that saves the most.

    A change is promising if many bytes lead to it, or if it changes a rule that is not as usual. If
    several rules are not, all of them are also changed at once. Two changes that help are also
    tried together, and are kept together if that saves 25% more. Sharding parameters over axes of
    the batch saves memory in almost every program, so it must save four times as much as another
    change.

    Usage:
      function = compile_partitioned(partitioner, step, plan.abstract_state, batch)
      best = find_change(function)

    Args:
      function: the function.
      found: the causes to look at, each with its bytes; by default all causes of the function.
      most: the number of compilations at most.
      rewrite: traces the function with a change of its code, or returns None if it cannot.

    Returns:
      The change, or None if no cause has one.
    """
    found = list(function.explain().weighed if found is None else found)
    _, possible = list_possible_changes(
        function.traced.jaxpr, mesh=function.mesh, rows=function.rows, rules=function.rules
    )
    ranked = _rank_changes(possible.layouts, found)
    if not ranked:
        return None
    unusual, _ = _unusual_rules(possible.layouts)
    queue, untried = iter(ranked), list[CodeChange]()
    attempt = functools.partial(_try, function, rewrite)
    tried = list(_try_each(attempt, queue, most - _JOINED, untried))
    if sum(one.helps or one.change in unusual for one in tried) < 2:  # there is nothing to join
        tried += _try_each(attempt, queue, most - len(tried), untried)
    best = _choose(tried, possible)
    names = {name for change in unusual for name in change.names}
    if len(tried) < most and (best is None or names.isdisjoint(_names_of(best.change))):
        together = list(_try_together(function, unusual))
        best = _choose([*together, *tried], possible)
        tried += together
    change, cause = next(iter(ranked.items()))
    joined = list[TriedChange]()
    if best is not None:
        change, cause = best.change, _at_change(ranked.get(best.change, cause), best.change)
        others = [one for one in tried if one is not best and one.helps]
        others.sort(key=lambda one: -_worth(one, possible))
        # A rule may only help once another one is right.
        others += [one for one in tried if not one.helps and one.change in unusual]
        joined += _try_joined(attempt, best, others, most - len(tried))
        both = max(joined, key=lambda one: one.saved, default=best)
        if both.saved > _MORE * best.saved:
            best, change = both, both.change
    confirmed = best is not None if tried else None
    return BestChange(
        cause=dataclasses.replace(cause, change=str(change), confirmed=confirmed),
        saved=best,
        tried=(*tried, *joined),
        untried=tuple(untried),
    )


def _rank_changes(
    layouts: KnownLayouts, found: Sequence[tuple[float, Cause]]
) -> dict[Change, Cause]:
    """The changes that may help, the most promising first, each with its largest cause."""
    weights: dict[Change, float] = collections.defaultdict(float)
    causes: dict[Change, tuple[float, Cause]] = {}
    for nbytes, cause in found:
        for number, change in enumerate(cause.all_changes):
            weight = nbytes / (1 + number) * (1 if cause.suspect else _EXPECTED)
            weights[change] += weight
            if change not in causes or weight > causes[change][0]:
                causes[change] = weight, cause
    if not found:
        return {}
    _, largest = max(found, key=lambda pair: (pair[1].suspect, pair[0]))
    ranked = sorted(causes, key=lambda change: -weights[change])
    first, last = _unusual_rules(layouts)
    order = dict.fromkeys([*first, *ranked, *last])
    if largest.source and (largest.suspect or not order):  # only the author can change the line
        text = f'write the operation at {largest.source} otherwise'
        order[CodeChange(source=largest.source, text=text)] = None
    return {change: causes[change][1] if change in causes else largest for change in order}


def _unusual_rules(layouts: KnownLayouts) -> tuple[list[RuleChange], list[RuleChange]]:
    """Changes of unusual rules to the standard ones, and changes that leave them fewer axes."""
    first, last = list[RuleChange](), list[RuleChange]()
    for name in layouts.unusual_names():
        usual = layouts.to_standard(name)
        first.append(usual)
        last += [change for change in layouts.fewer_axes(name) if change != usual]
    return first, last


def _choose(tried: Sequence[TriedChange], possible: PossibleChanges) -> TriedChange | None:
    """The first change that helps, unless a later one, which is less promising, saves 25% more."""
    best: TriedChange | None = None
    for one in tried:
        if one.helps and (best is None or _worth(one, possible) > _MORE * _worth(best, possible)):
            best = one
    return best


def _worth(tried: TriedChange, possible: PossibleChanges) -> float:
    """The bytes that a change saves. What fully sharded training always saves counts less.

    An unusual rule is changed for another reason.
    """
    change = tried.change
    if isinstance(change, ConstraintRemoval):
        return tried.saved * _UNDONE
    is_unusual = any(map(possible.layouts.is_unusual, _names_of(change)))
    return tried.saved * (_TRADED if possible.trades(change) and not is_unusual else 1)


def _names_of(change: Change) -> tuple[str, ...]:
    return change.names if isinstance(change, RuleChange) else ()


def _at_change(cause: Cause, change: Change) -> Cause:
    """The cause with the rule, the layout or the line of a confirmed change."""
    source, rule, array = cause.source, cause.rule, cause.array
    if isinstance(change, RuleChange):
        rule = repr(change.before[0]) if change.before else f'no rule for {change.names[0]!r}'
    elif isinstance(change, LayoutChange):
        array = change.path or array
    elif isinstance(change, ConstraintChange | ConstraintRemoval | CodeChange):
        source = change.source
    why = cause.why
    if source != cause.source or rule != cause.rule:
        place = source if source != cause.source else rule
        why += f'; compiling with a change shows that it comes from {place}'
    return dataclasses.replace(cause, source=source, rule=rule, array=array, why=why)


def _try_each(
    attempt: Attempt, changes: Iterator[Change], most: int, untried: list[CodeChange]
) -> Iterator[TriedChange]:
    """Compiles with one change after the other, and records the code changes it cannot make."""
    number = 0
    while number < most and (change := next(changes, None)) is not None:
        result = attempt(change)
        if result is not None:
            number += 1
            yield result
        elif isinstance(change, CodeChange):
            untried.append(change)


def _try_together(
    function: CompiledFunction, changes: Sequence[RuleChange]
) -> Iterator[TriedChange]:
    """Compiles with all changes of unusual rules, if they are of several names.

    None of them may help alone, or a change of a rule that is right may save more than each.
    """
    together: Change | None = None
    for change in changes:
        with contextlib.suppress(ValueError):  # names that are swapped have the same change
            together = change if together is None else join_changes(together, change)
    if together is not None and together not in changes:
        result = try_change(function, together)
        if result is not None:
            yield result


def _try_joined(
    attempt: Attempt, best: TriedChange, others: Sequence[TriedChange], most: int
) -> Iterator[TriedChange]:
    """Compiles with the best change and the other ones, as long as that saves more."""
    for other in others:
        if most <= 0:
            return
        try:
            both = join_changes(best.change, other.change)
        except ValueError:  # they change the same rule or line
            continue
        result = attempt(both)
        if result is not None:
            most -= 1
            yield result
            best = max(best, result, key=lambda one: one.saved)


def _try(function: CompiledFunction, rewrite: Rewrite | None, change: Change) -> TriedChange | None:
    changed = None
    if isinstance(change, CodeChange):
        changed = rewrite(change) if rewrite is not None else None
    return try_change(function, change, changed)
