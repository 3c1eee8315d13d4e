"""Compiles a function with the changes that help by formula, and keeps those that do help."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from meshwright.advice.candidates import REMOVED, Advised, Candidate, Told, Variant
from meshwright.advice.figures import LESS, Measured
from meshwright.advice.subject import with_change
from meshwright.advice.trials import Trials
from meshwright.causes.cause import ConstraintRemoval, Effect
from meshwright.causes.explaining import Explanation

_TOLD = 3  # changes that only the author can write and that are compiled
# A change that sends or holds so little is told, although it holds a little more, or sends more.
_MUCH_LESS, _HELD_LESS = 0.8, 0.9
_FAR_LESS, _HARDLY = 0.7, 1.1  # the same for constraints and layouts
_EXPERTS = 3  # layouts of experts that are compiled although they do not help by formula


def compile_variants(
    explanation: Explanation,
    advised: Advised,
    before: Measured,
    trials: Trials,
    most: int = 3,
    until_first: bool = False,
) -> Advised:
    """Compiles the function with the best changes, and leaves out those that do not help.

    Args:
      explanation: the causes of the exchanges.
      advised: the changes that help by formula.
      before: the function as it is.
      trials: compiles functions. What it has no time for is kept as not tried.
      most: the number of compilations at most.
      until_first: whether to end with the first change that helps, and to keep the others as not
        tried.
    """
    kept: list[Variant] = []
    sizes = _sizes_of_told(explanation, advised)
    told = tuple(_compile_told(advised, sizes, before, trials, 1 if until_first else _TOLD))
    if until_first and any(one.confirmed for one in told):
        return dataclasses.replace(advised, told=told)
    variants = advised.variants[:most]  # the others do less than those that are compiled
    variants += tuple(_of_pin(pin, advised) for pin in advised.experts[:_EXPERTS])
    variants += tuple(_of_pin(pin, advised) for pin in advised.pins)
    if until_first:  # what only the author can write explains what layouts do not need
        left = most - any(one.trial is not None for one in advised.told)
        # Where a compiler sends far more than layouts need, each of the pins may be the mend.
        variants = (advised.variants if advised.told else variants)[: left + len(advised.pins)]
        if not left:
            kept += [v for v in advised.variants if v.helps]
    for number, variant in enumerate(variants):
        is_expert = variant.candidate in advised.experts
        if trials.is_over:
            kept += [v for v in advised.variants[number:] if v.helps]
            break
        mended = any(v.compiled and _is_mended(v.compiled, advised) for v in kept)
        if number >= most and mended and not is_expert:
            break
        after = None
        with contextlib.suppress(Exception):  # a function that cannot be made has no figures
            call = with_change(advised.subject, variant.change)
            after = None if call is None else trials.measure(call)
        if after is not None and (after.is_better(before) or _sends_far_less(after, before)):
            effect = _effect(before, after)
            kept.append(dataclasses.replace(variant, compiled=effect, gone=after.gone(before)))
            more = variants[number + 1 : number + 2]
            if until_first and not (is_expert and more and more[0].candidate in advised.experts):
                kept += [v for v in advised.variants[number + 1 :] if v.helps]
                break
    kept.sort(key=lambda v: (v.compiled is None, -_saved(v)))
    told = tuple(one for one in told if not any(_outdoes(v, one) for v in kept))
    return dataclasses.replace(advised, variants=tuple(kept), told=told)


def _sizes_of_told(explanation: Explanation, advised: Advised) -> dict[str, float]:
    """The bytes of the exchanges that each change is for which only the author can write."""
    found: dict[str, float] = collections.defaultdict(float)
    for (one, _), evidence in zip(explanation.collectives, explanation.evidence, strict=True):
        for text in {told.change.text for told in advised.told if told.match.fits(one, evidence)}:
            found[text] += one.total_bytes
    return found


def _compile_told(
    advised: Advised,
    sizes: Mapping[str, float],
    before: Measured,
    trials: Trials,
    most: int,
) -> Iterator[Told]:
    """What only the author can write, without what was compiled and does not help."""
    texts = dict.fromkeys(one.change.text for one in advised.told if one.trial is not None)
    texts = dict.fromkeys(sorted(texts, key=lambda text: -sizes.get(text, 0.0)))
    compiled: dict[str, Measured | None] = {}
    for one in advised.told:
        text = one.change.text
        is_tried = text in list(texts)[:most] and text not in compiled and not trials.is_over
        if one.trial is not None and is_tried:
            compiled[text] = None
            with contextlib.suppress(Exception):  # as above
                changed = one.trial()
                compiled[text] = None if changed is None else trials.measure(changed)
        after = compiled.get(text)
        if after is None:
            yield one
            continue
        effect = _effect(before, after)
        if after.is_better(before) or _is_worth(one, effect):
            yield dataclasses.replace(one, effect=effect, confirmed=True, gone=after.gone(before))
        elif after.sent < before.sent:
            yield dataclasses.replace(one, effect=effect, confirmed=False)


def _outdoes(variant: Variant, told: Told) -> bool:
    """Whether a compiled layout removes the same, sends less, and holds no more."""
    if variant.compiled is None or told.effect is None or not variant.gone & told.gone:
        return False
    (_, sends), (_, holds) = variant.compiled.sent, variant.compiled.peak
    return sends < LESS * told.effect.sent[1] and holds <= told.effect.peak[1]


def _is_worth(one: Told, effect: Effect) -> bool:
    """Whether a change saves much more of one figure than it costs of another one.

    What devices do alike costs memory. What is held for longer, so that it is sent less often, is
    for the author to weigh.
    """
    (sent, sends), (held, holds) = effect.sent, effect.peak
    saves = sends < _MUCH_LESS * sent and holds < one.may_hold * held and not one.is_held_longer
    return saves or holds < _HELD_LESS * held


def _sends_far_less(after: Measured, before: Measured) -> bool:
    """Whether a function sends far less than before, and holds hardly more."""
    then, now = after.times(before) or (0.0, 0.0)
    return (
        after.sent < _FAR_LESS * before.sent and after.peak < _HARDLY * before.peak and now <= then
    )


def _effect(before: Measured, after: Measured) -> Effect:
    return Effect(
        sent=(before.sent, after.sent),
        peak=(before.peak, after.peak),
        seconds=after.times(before),
    )


def _of_pin(pin: Candidate, advised: Advised) -> Variant:
    return Variant(candidate=pin, estimate=advised.base, saved=0.0, vanished={})


def _is_mended(effect: Effect, advised: Advised) -> bool:
    """Whether a change saves most of what the layouts do not need."""
    sent, sends = effect.sent
    return 2 * (sent - sends) > sent - advised.base.sent


def _saved(variant: Variant) -> float:
    """The bytes that a compiled change saves, or the share by formula."""
    if variant.compiled is None:
        return variant.saved
    (sent, sends), (held, holds) = variant.compiled.sent, variant.compiled.peak
    saved = sent - sends + 0.1 * (held - holds)
    removes = isinstance(variant.change, ConstraintRemoval)
    return saved * variant.candidate.weight * (REMOVED if removes else 1)
