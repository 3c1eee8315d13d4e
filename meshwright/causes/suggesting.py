"""Which change removes most of what a program need not exchange or hold, found by compiling."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from meshwright.causes.advice import Advisor
from meshwright.causes.cause import Cause
from meshwright.causes.changes import (
    Change,
    CodeChange,
    ConstraintChange,
    ConstraintRemoval,
    LayoutChange,
    RuleChange,
    join_changes,
)
from meshwright.causes.confirming import CompiledFunction, Confirmation, try_change
from meshwright.causes.explaining import advise
from meshwright.causes.known_layouts import KnownLayouts

Rewrite = Callable[[CodeChange], jax.stages.Traced | None]

_JOINED = 2  # the number of compilations that are kept for two changes together
_MORE = 1.25  # by which factor two changes must save more than one, or a later one than another
_TRADED = 0.25  # what a byte counts that sharding over axes of the batch saves
_UNDONE = 0.6  # what a byte counts that leaving out a constraint saves: it may be wanted elsewhere
_EXPECTED = 0.1  # the weight of a cause that the layout needs, next to one that it does not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """The change that saves the most of those that were compiled, and what it is for.

    Attributes:
      cause: the largest cause that the change is for, with the rule or the line that it changes.
        `confirmed` is False if no change helps, and None if none could be compiled.
      saved: what the change does, or None if no change helps.
      tried: every change that was compiled.
      untried: the changes of code that only its author can make, the most promising first.
    """

    cause: Cause
    saved: Confirmation | None
    tried: tuple[Confirmation, ...]
    untried: tuple[CodeChange, ...]


def suggest_change(
    function: CompiledFunction,
    found: Iterable[tuple[float, Cause]] | None = None,
    *,
    most: int = 6,
    rewrite: Rewrite | None = None,
) -> Suggestion | None:
    """Compiles a function with the most promising changes, and keeps what saves the most.

    A change is promising if many bytes lead to it, or if it is of a rule that is not as usual. If
    several rules are not, all of them are also changed at once. Two changes that help are also
    tried together, and are suggested together if that saves 25% more.
    Sharding parameters over axes of the batch saves memory in almost every program, so that it
    must save four times as much as another change.

    Usage:
      function = compile_partitioned(partitioner, step, plan.abstract_state, batch)
      suggestion = suggest_change(function)

    Args:
      function: the function.
      found: the causes to look at, each with its bytes; by default all those of the function.
      most: the number of compilations at most.
      rewrite: traces the function with a change of its code, or returns None if it cannot.

    Returns:
      The suggestion, or None if no cause has a change.
    """
    found = list(function.explain().weighed if found is None else found)
    _, advisor = advise(
        function.traced.jaxpr, mesh=function.mesh, rows=function.rows, rules=function.rules
    )
    ranked = rank_changes(advisor.layouts, found)
    if not ranked:
        return None
    suspects, _ = _of_suspects(advisor.layouts)
    queue, untried = iter(ranked), list[CodeChange]()
    tried = list(_try_each(function, queue, most - _JOINED, rewrite, untried))
    if sum(one.helps or one.change in suspects for one in tried) < 2:  # there is nothing to join
        tried += _try_each(function, queue, most - len(tried), rewrite, untried)
    best = _choose(tried, advisor)
    names = {name for change in suspects for name in _names_of(change)}
    if len(tried) < most and (best is None or names.isdisjoint(_names_of(best.change))):
        together = list(_try_together(function, suspects))
        best = _choose([*together, *tried], advisor)
        tried += together
    change, cause = next(iter(ranked.items()))
    joined = list[Confirmation]()
    if best is not None:
        change, cause = best.change, _at_change(ranked.get(best.change, cause), best.change)
        others = _to_join(best, tried, suspects, advisor)
        joined += _try_joined(function, best, others, most - len(tried), rewrite)
        both = max(joined, key=lambda one: one.saved, default=best)
        if both.saved > _MORE * best.saved:
            best, change = both, both.change
    confirmed = best is not None if tried else None
    return Suggestion(
        cause=dataclasses.replace(cause, change=str(change), confirmed=confirmed),
        saved=best,
        tried=(*tried, *joined),
        untried=tuple(untried),
    )


def _worth(tried: Confirmation, advisor: Advisor) -> float:
    """What a change saves; what fully sharded training always saves counts less.

    A rule that is not as usual is changed for another reason.
    """
    change = tried.change
    if isinstance(change, ConstraintRemoval):
        return tried.saved * _UNDONE
    is_odd = any(map(advisor.layouts.is_unusual, _names_of(change)))
    return tried.saved * (_TRADED if advisor.trades(change) and not is_odd else 1)


def _names_of(change: Change) -> list[str]:
    """The logical axes whose rules a change is of."""
    return [name for name, _ in change.after] if isinstance(change, RuleChange) else []


def _choose(tried: Sequence[Confirmation], advisor: Advisor) -> Confirmation | None:
    """The first change that helps, unless a later one, which is less promising, saves 25% more."""
    best: Confirmation | None = None
    for one in tried:
        if one.helps and (best is None or _worth(one, advisor) > _MORE * _worth(best, advisor)):
            best = one
    return best


def rank_changes(
    layouts: KnownLayouts, found: Sequence[tuple[float, Cause]]
) -> dict[Change, Cause]:
    """The changes that may help, the most promising first, each with its largest cause.

    Args:
      layouts: the rules and the layouts of the arguments.
      found: the causes, each with its bytes.
    """
    weights: dict[Change, float] = collections.defaultdict(float)
    causes: dict[Change, tuple[float, Cause]] = {}
    for nbytes, cause in found:
        for number, change in enumerate(cause.candidates):
            weight = nbytes / (1 + number) * (1 if cause.avoidable else _EXPECTED)
            weights[change] += weight
            if change not in causes or weight > causes[change][0]:
                causes[change] = weight, cause
    ranked = sorted(causes, key=lambda change: -weights[change])
    if not found:
        return {}
    _, largest = max(found, key=lambda pair: (pair[1].avoidable, pair[0]))
    first, last = _of_suspects(layouts)
    order = dict.fromkeys([*first, *ranked, *last])
    if largest.source and (largest.avoidable or not order):  # it is up to the author of the line
        text = f'write the operation at {largest.source} otherwise'
        order[CodeChange(source=largest.source, text=text)] = None
    return {change: causes[change][1] if change in causes else largest for change in order}


def _of_suspects(layouts: KnownLayouts) -> tuple[list[RuleChange], list[RuleChange]]:
    """Changes of rules that are not as usual: the standard rules first, then fewer mesh axes."""
    first, last = list[RuleChange](), list[RuleChange]()
    for name in layouts.suspects():
        usual = layouts.to_standard(name)
        first.append(usual)
        last += [change for change in layouts.fewer_axes(name) if change != usual]
    return first, last


def _at_change(cause: Cause, change: Change) -> Cause:
    """The cause with the rule, the layout or the line that a confirmed change is of."""
    source, rule, array = cause.source, cause.rule, cause.array
    if isinstance(change, RuleChange):
        rule = repr(change.before[0]) if change.before else f'no rule for {change.after[0][0]!r}'
    elif isinstance(change, LayoutChange):
        array = change.path or array
    elif isinstance(change, ConstraintChange | ConstraintRemoval | CodeChange):
        source = change.source
    reason = cause.reason
    if source != cause.source or rule != cause.rule:
        place = source if source != cause.source else rule
        reason += f'; compiling with a change shows that it comes from {place}'
    return dataclasses.replace(cause, source=source, rule=rule, array=array, reason=reason)


def _try_each(
    function: CompiledFunction,
    changes: Iterator[Change],
    most: int,
    rewrite: Rewrite | None,
    untried: list[CodeChange],
) -> Iterator[Confirmation]:
    """Compiles with one change after the other, and notes those of code that cannot be made."""
    number = 0
    while number < most and (change := next(changes, None)) is not None:
        result = _try(function, change, rewrite)
        if result is not None:
            number += 1
            yield result
        elif isinstance(change, CodeChange):
            untried.append(change)


def _try_together(
    function: CompiledFunction, changes: Sequence[RuleChange]
) -> Iterator[Confirmation]:
    """Compiles with all changes of rules that are not as usual, if they are of several names.

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


def _to_join(
    best: Confirmation,
    tried: Sequence[Confirmation],
    suspects: Sequence[Change],
    advisor: Advisor,
) -> list[Confirmation]:
    """What is worth trying together with the best change, the most promising first."""
    others = [one for one in tried if one is not best and one.helps]
    others.sort(key=lambda one: -_worth(one, advisor))
    # A rule may only help once another one is right.
    return others + [one for one in tried if not one.helps and one.change in suspects]


def _try_joined(
    function: CompiledFunction,
    best: Confirmation,
    others: Sequence[Confirmation],
    most: int,
    rewrite: Rewrite | None,
) -> Iterator[Confirmation]:
    """Compiles with the best change and the other ones, as long as that saves more."""
    for other in others:
        if most <= 0:
            return
        try:
            both = join_changes(best.change, other.change)
        except ValueError:  # they change the same rule or line
            continue
        result = _try(function, both, rewrite)
        if result is not None:
            most -= 1
            yield result
            best = max(best, result, key=lambda one: one.saved)


def _try(
    function: CompiledFunction, change: Change, rewrite: Rewrite | None
) -> Confirmation | None:
    changed = None
    if isinstance(change, CodeChange):
        changed = rewrite(change) if rewrite is not None else None
    return try_change(function, change, changed)
