"""Says of each exchange whether it can be avoided, and with which change that was tried.

A change is tried by formula, on the trace of the function, and if asked by compiling it. An
exchange is avoidable if it is gone, or mostly, in the function with a change that keeps the layout
of all parameters, and that sends less and needs no more of anything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence

from meshwright.advice.candidates import SUMS, Advised, Variant
from meshwright.advice.figures import Sent, key_of, shape_of
from meshwright.advice.needs import is_needed, with_need
from meshwright.causes.cause import (
    Cause,
    Change,
    CodeChange,
    ConstraintChange,
    ConstraintRemoval,
    Effect,
    JoinedChange,
    LayoutChange,
    RuleChange,
    SplitChange,
    StateChange,
    places_of,
)
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation
from meshwright.causes.layouts import axes_of_row, sharding_of_row
from meshwright.causes.wording import spec_text
from meshwright.jaxpr.primitives import CONSTRAINTS
from meshwright.program.collectives import Collective

_SAME = 0.98  # a change that leaves more of what is sent does not save any of it
_TRUSTED = 0.8  # the share of a proportional estimate below which another one is not believed
# Exchanges in which data moves along several mesh axes at once.
_ALONG_SEVERAL = ('collective-permute', 'all-to-all')


def advise(
    explanation: Explanation, advised: Advised
) -> tuple[tuple[Collective, Cause | None], ...]:
    """The exchanges, each with the change that removes it, if there is one.

    Args:
      explanation: the causes of the exchanges.
      advised: the changes that help.
    """
    pairs = list(zip(explanation.collectives, explanation.evidence, strict=True))
    made = [(c, _without_changes(c, cause, e, advised)) for (c, cause), e in pairs]
    order = sorted(range(len(pairs)), key=lambda n: -pairs[n][0][0].total_bytes)
    _add_confirmed(made, order, advised)
    told = {n for n, (_, cause) in enumerate(made) if _is_told(cause)}
    known = {one.change.text for one in advised.told}
    taken = {n for n in told if (cause := made[n][1]) is not None and cause.change in known}
    words = told - taken  # of an operation, which was not tried
    variants = advised.variants
    if told:  # what moves parameters only works around an operation that should be written anew
        variants = tuple(v for v in variants if v.candidate.keeps_layout or v.compiled is not None)
    for variant in _distinct(variants):
        if not (variant.candidate.row_axes or variant.compiled or _by_formula(variant, advised)):
            continue
        left = [n for n in order if n not in taken and (variant.compiled or n not in words)]
        if variant.candidate.row_axes:
            matched = _of_rows(left, pairs, variant)
        else:
            if variant.compiled is None:
                left = [n for n in left if not is_needed(pairs[n][1], advised)]
            matched = [n for n in left if _is_gone(*pairs[n][0], pairs[n][1], variant)]
        concerned = _concerned(order, taken, pairs, variant, explanation, advised)
        if not matched or pairs[concerned[0] if concerned else 0][0][0].kind == 'all-reduce':
            matched = list(dict.fromkeys([*matched, *concerned]))
        if not matched and variant.compiled is None:
            # Formulas see another exchange than the compiler has made.
            matched = [n for n in left if _may_be_gone(pairs[n][0][0], pairs[n][1], variant)][:1]
            # A kernel is gathered in place of the activation that a constraint makes whole.
            gathers = matched and pairs[matched[0]][0][0].kind == 'all-gather'
            is_gathered = bool(gathers) and isinstance(variant.change, ConstraintChange)
            keeps = variant.candidate.keeps_layout and is_gathered
            variant = dataclasses.replace(
                variant, candidate=dataclasses.replace(variant.candidate, keeps_layout=keeps)
            )
        near = [] if matched or variant.compiled is None else _nearest(left, pairs, variant)
        for n in (*matched, *near):
            taken.add(n)
            c, cause = made[n]
            if cause is not None:
                needed = n not in concerned and is_needed(pairs[n][1], advised)
                needed |= n in near
                cause = _with_variant(cause, variant, advised, needed=needed)
                made[n] = c, _of_constraint(cause, variant.change, explanation)
    return tuple(
        (c, with_need(c, cause, e, advised)) for (c, cause), (_, e) in zip(made, pairs, strict=True)
    )


def _add_confirmed(
    made: list[tuple[Collective, Cause | None]], order: Sequence[int], advised: Advised
) -> None:
    """Says of the largest exchange over its axes what was compiled, and is of no exchange alone.

    Such as one of two sums that the compiler makes together.
    """
    for told in advised.told:
        texts = {cause.change for _, cause in made if cause is not None}
        if not told.confirmed or str(told.change) in texts:
            continue
        for n in order:
            collective, cause = made[n]
            if cause is None or _is_told(cause) or not {*collective.axes} & {*told.axes}:
                continue
            found = told.explain(cause)
            why = f'{cause.why}; {told.why}'
            made[n] = collective, dataclasses.replace(found, why=why, avoidable=False)
            break


def _nearest(
    left: Sequence[int],
    pairs: Sequence[tuple[tuple[Collective, Cause | None], Evidence | None]],
    variant: Variant,
) -> list[int]:
    """The exchange that tells of a compiled change which removes no exchange, but helps.

    It is the largest one at the lines of the change, or else the largest one with a cause.
    """
    places = {*places_of(variant.change)}
    told = [n for n in left if pairs[n][0][1] is not None]
    here = [n for n in told if (e := pairs[n][1]) and places & {e.made_at, e.used_at}]
    return (here or told)[:1]


def _of_constraint(cause: Cause, change: Change, explanation: Explanation) -> Cause:
    """A cause whose reason names the constraint that its change replaces, and its layout."""
    first = change.parts[0] if isinstance(change, JoinedChange) else change
    if not isinstance(first, ConstraintChange) or not first.replaces:
        return cause
    found = [
        value
        for value in explanation.traced.values
        if value.primitive in CONSTRAINTS and value.line == first.source
        if value.layout is not None
    ]
    if found and all(value.backward for value in found):  # jax only knows who calls the rule
        at, where = f' at {first.source}', f'the backward rule of what {first.source} calls'
        cause = dataclasses.replace(cause, change=cause.change.replace(at, f' in {where}'))
    held = next((value.layout for value in found if value.shape == first.shape), None)
    if held is None:
        return cause
    why = f'the constraint at {first.source} asks for {spec_text(held)}; {cause.why}'
    end = f', and the constraint at {first.source} asks for another layout'
    return dataclasses.replace(cause, why=why.replace(end, ''))


def _concerned(
    order: Sequence[int],
    taken: Collection[int],
    pairs: Sequence[tuple[tuple[Collective, Cause | None], Evidence | None]],
    variant: Variant,
    explanation: Explanation,
    advised: Advised,
) -> list[int]:
    """The exchanges of gradients and updates that a change of the layout of a state concerns.

    Gradients that are summed on all devices could be summed for the shard of each device only. If
    there are none, it is the largest exchange of such an array.
    """
    rows, owners = advised.subject.by_path, advised.subject.parameter_of
    paths = set(_paths_of(variant.change, explanation))
    paths |= {owners[path] for path in paths if path in owners}
    found, summed = list[int](), list[int]()
    for n in order:
        (collective, _), evidence = pairs[n]
        value = None if evidence is None else evidence.value
        if n in taken or value is None:
            continue
        if variant.compiled is not None and key_of(collective) not in variant.gone:
            continue
        path = value.gradient_of or value.update_of or value.argument
        if path not in paths or path not in rows:
            continue
        shards = sharding_of_row(rows[path])
        if collective.kind == 'all-reduce' and shards & {*collective.axes}:
            summed.append(n)
        elif value.update_of or not value.argument:
            found.append(n)
    return summed or found[:1]


def _paths_of(change: Change, explanation: Explanation) -> Iterator[str]:
    """The arrays of a state that a change lays out, or whose gradients it lays out."""
    for part in change.parts if isinstance(change, JoinedChange) else (change,):
        if isinstance(part, StateChange):
            yield from (path for path, _ in part.layouts)
        elif isinstance(part, ConstraintChange | ConstraintRemoval):
            for value in explanation.traced.values:
                if value.primitive in CONSTRAINTS and value.line == part.source:
                    yield from filter(None, (value.gradient_of, value.update_of))


def _of_rows(
    left: Sequence[int],
    pairs: Sequence[tuple[tuple[Collective, Cause | None], Evidence | None]],
    variant: Variant,
) -> list[int]:
    """The exchanges along axes that the rows lack: of activations, or else of anything."""
    found = [n for n in left if {*pairs[n][0][0].axes} & {*variant.candidate.row_axes}]
    values = [(n, e.value) for n in found if (e := pairs[n][1]) is not None]
    moved = [
        n
        for n, value in values
        if value is not None and not (value.argument or value.gradient_of or value.update_of)
    ]
    return moved or found[:1]


def _is_gone(
    collective: Collective, cause: Cause | None, evidence: Evidence | None, variant: Variant
) -> bool:
    """Whether an exchange of the compiled program is gone with a change."""
    if variant.compiled is not None:
        return key_of(collective) in variant.gone
    if cause is None or evidence is None or evidence.value is None:
        return False
    value, axes = evidence.value, set(collective.axes)
    shape = shape_of(value)
    lines = {cause.source, evidence.made_at, evidence.used_at, collective.source}
    if {cause.source, cause.array} & {*places_of(variant.change)}:
        # The compiler may exchange another array of the same line.
        return any(axes == {*sent.axes} for sent in variant.vanished)
    # The layout of a result has no line: it moves what updates the state.
    is_state = bool(value.update_of) or evidence.result is not None
    return any(
        (axes == {*sent.axes} or (axes > {*sent.axes} and collective.kind in _ALONG_SEVERAL))
        and sent.shape == shape
        and (bool(lines & {*sent.lines}) if any(sent.lines) else is_state)
        and (sent.backward == value.backward or not any(sent.lines))
        for sent in variant.vanished
    )


def _distinct(variants: Sequence[Variant]) -> Iterator[Variant]:
    """The changes without those that are for what a better one removes already."""
    places, gone = set[str](), set[Sent]()
    for variant in variants:
        own = {*places_of(variant.change)}
        total = sum(variant.vanished.values())
        rest = sum(n for sent, n in variant.vanished.items() if sent not in gone)
        if places & own or 2 * rest < total:
            continue
        yield variant
        if variant.candidate.weight > 1:  # what else is sent depends on it
            return
        places |= own
        gone |= {*variant.vanished}


def _may_be_gone(collective: Collective, evidence: Evidence | None, variant: Variant) -> bool:
    """Whether an exchange may be one of those that are gone by formula, seen otherwise."""
    if evidence is None or evidence.value is None:
        return False
    axes, shape = {*collective.axes}, shape_of(evidence.value)
    is_sum = collective.kind in SUMS
    return any(
        axes & {*sent.axes} and (sent.shape == shape or not is_sum) for sent in variant.vanished
    )


def _is_told(cause: Cause | None) -> bool:
    """Whether the change of a cause is one that only the author can write."""
    return (
        cause is not None
        and len(cause.all_changes) == 1
        and cause.change != ''
        and isinstance(cause.all_changes[0], CodeChange)
    )


def _without_changes(
    collective: Collective, cause: Cause | None, evidence: Evidence | None, advised: Advised
) -> Cause | None:
    """A cause without the changes that were not tried, or did not help; words for the author stay.

    Rules are tried by compiling only.
    """
    if cause is None:
        return None
    told = next((one for one in advised.told if one.match.fits(collective, evidence)), None)
    key = key_of(collective)
    axes = {*collective.axes}
    told = told or next((o for o in advised.told if key in o.gone and axes & {*o.axes}), None)
    if told is not None:
        return told.explain(cause)
    kept = [c for c in cause.all_changes if isinstance(c, RuleChange | CodeChange)]
    kept = kept if cause.suspect else []
    is_told = bool(kept) and isinstance(kept[0], CodeChange)
    return dataclasses.replace(
        cause, change=str(kept[0]) if kept else '', all_changes=tuple(kept), avoidable=is_told
    )


def _with_variant(cause: Cause, variant: Variant, advised: Advised, *, needed: bool) -> Cause:
    """A cause with a change that removes the exchange."""
    change, effect = variant.change, variant.compiled or _by_formula(variant, advised)
    first = change.parts[0] if isinstance(change, JoinedChange) else change
    source, array, why = cause.source, cause.array, cause.why
    if isinstance(first, ConstraintChange | ConstraintRemoval | SplitChange):
        source = first.source
    elif isinstance(first, LayoutChange):
        array = first.path or array
    elif variant.candidate.row_axes:
        array, why = variant.candidate.array, variant.candidate.why
    elif isinstance(first, StateChange) and first.layouts:
        array = first.layouts[0][0]
        why += _of_moment(array, advised)
    elif isinstance(first, StateChange):
        array = advised.subject.returned[first.results[0][0]] or array
    return dataclasses.replace(
        cause,
        source=source,
        array=array,
        why=why,
        change=str(change),
        confirmed=True if variant.compiled is not None else None,
        avoidable=variant.candidate.keeps_layout and variant.helps and not needed,
        effect=effect,
        all_changes=(change, *(c for c in cause.all_changes if c != change)),
    )


def next_to_compiled(
    told: Iterable[tuple[Collective, Cause | None]], peak: int
) -> tuple[tuple[Collective, Cause | None], ...]:
    """The exchanges; changes that nobody compiled have what they save of the compiled peak.

    A formula may see a faulty program hold far more than its compiler lets it hold.

    Args:
      told: the exchanges with their causes.
      peak: the peak of the compiled program, in bytes.
    """

    def mended(cause: Cause | None) -> Cause | None:
        if cause is None or cause.effect is None or cause.confirmed or cause.traded:
            return cause
        held, holds = cause.effect.peak
        after = min(peak, round(holds * max(1.0, peak / max(held, 1))))
        after = after if holds < held else peak + holds - held
        return dataclasses.replace(
            cause, effect=dataclasses.replace(cause.effect, peak=(peak, after))
        )

    return tuple((c, mended(cause)) for c, cause in told)


def _by_formula(variant: Variant, advised: Advised) -> Effect | None:
    """What a change does to the compiled program, as far as formulas can tell; None if they cannot.

    Formulas see a faulty program worse than a good one, whose exchanges are those that its layouts
    need. So the program as it is counts as compiled, and a saving is what is left of it.
    """
    before, sends = advised.base.sent, advised.sends
    if not variant.helps or not before:
        return None
    after = variant.estimate.sent * max(1.0, sends / before)
    if variant.candidate.of_state:  # all other exchanges stay as they were compiled
        after = sends - before + variant.estimate.sent
        after = max(after, _TRUSTED * variant.estimate.sent * sends / before)
    if variant.estimate.sent >= _SAME * before:  # it only holds less
        after = sends
    elif after >= _SAME * sends:
        return None
    return Effect(sent=(sends, after), peak=(advised.base.peak, variant.estimate.peak))


def _of_moment(path: str, advised: Advised) -> str:
    """Says that an array of the optimizer is laid out unlike its parameter; '' for others."""
    rows = advised.subject.by_path
    owner = rows.get(advised.subject.parameter_of.get(path, ''))
    if owner is None:
        return ''
    mine, theirs = (spec_text(axes_of_row(row)) for row in (rows[path], owner))
    return f'; {path} is laid out as {mine}, and its parameter {owner.path} as {theirs}'
