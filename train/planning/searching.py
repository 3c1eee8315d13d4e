"""Chooses which candidates to compile, which one wins, and how much better others could be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from partitioning.amounts import bytes_str
from train.errors import first_line
from train.planning.candidates import Candidate
from train.planning.presets import Layout
from train.planning.space import Space

Status = Literal['compiled', 'not compiled', 'too slow', 'too large', 'impossible']
# How much evidence a setting needs before it is believed: with one compiled candidate, a setting
# takes half of what is unexplained, with three of them three quarters.
_DOUBT = 1.0
_LEARNED, _ENOUGH = 2 / 5, 3  # of what compiled candidates show; the layouts that it takes
_SLOW = 1.5  # times the fastest: slower layouts are not tried only because they are others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a candidate needs and takes, by formulas, without a compiler.

    Attributes:
      peak: the memory of a device at its fullest, in bytes.
      seconds: the time of a step.
      bound: a time that no compiled program of the candidate is forecast to stay below, as far as
        compiled programs have shown.
    """

    peak: int
    seconds: float
    bound: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the compiler says about a candidate.

    Attributes:
      fits: whether a device has the memory.
      peak: the memory of a device at its fullest, in bytes, or None if the compiler gave up.
      seconds: the forecast of the time of a step, or None if there is none.
      low, high: its range.
      compile_seconds: how long the compilation took.
      error: why there is no program, or ''.
    """

    fits: bool
    peak: int | None = None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    compile_seconds: float = 0.0
    error: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A candidate, and what the search knows about it.

    Attributes:
      status: 'compiled'; 'too large' or 'too slow' by formulas, so that it cannot win; 'impossible'
        if its settings cannot be honoured; or 'not compiled', if it could still be faster.
    """

    candidate: Candidate
    status: Status
    prediction: Prediction | None = None
    outcome: Outcome | None = None
    reason: str = ''

    @property
    def seconds(self) -> float | None:
        """The forecast of the step's time, if it was compiled and fits."""
        return self.outcome.seconds if self.outcome and self.outcome.fits else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search has found.

    Attributes:
      found: all candidates: those that fit first, the fastest of them first, then the others.
      dropped: the number of combinations whose sizes cannot be divided, by reason.
      limit: the memory of a device, in bytes.
    """

    found: tuple[Found, ...]
    dropped: Mapping[str, int]
    limit: int

    @property
    def winner(self) -> Found | None:
        """The fastest compiled candidate that fits."""
        return self.found[0] if self.found and self.found[0].seconds is not None else None

    @property
    def num_compiled(self) -> int:
        """The number of candidates that were compiled."""
        return sum(found.outcome is not None for found in self.found)

    @property
    def bound(self) -> float | None:
        """The step time in seconds that no candidate of the space is forecast to stay below.

        Formulas are wrong in the same way for candidates of a layout. With three compiled layouts,
        the bounds of the others count more by two fifths of the least that a compiled one of the
        layout, or if there is none, of any, is above its own. If one is below, all count less.
        """
        ratios = _least_ratios(self.found)
        least = min(ratios.values(), default=1.0)
        learned = _LEARNED if len(ratios) >= _ENOUGH else 0.0
        times = [found.seconds for found in self.found if found.seconds is not None]
        for f in self.found:
            if f.prediction and _is_open(f.status):
                more = learned * (ratios.get(f.candidate.layout, least) - 1)
                times.append(f.prediction.bound * (1 + more if least >= 1 else least))
        return min(times, default=None)

    @property
    def gap(self) -> float | None:
        """By which share the winner is slower than the bound: 0.05 if within 5%."""
        if self.winner is None or self.winner.seconds is None or not self.bound:
            return None
        return self.winner.seconds / self.bound - 1

    def count(self, status: Status) -> int:
        """The number of candidates with a status."""
        return sum(found.status == status for found in self.found)


def _is_open(status: Status) -> bool:
    return status in ('not compiled', 'too slow')


def _least_ratios(found: Iterable[Found]) -> dict[Layout, float]:
    """The least that a compiled candidate of each layout takes, as a multiple of its bound."""
    ratios: dict[Layout, float] = {}
    for f in found:
        if f.outcome and f.outcome.seconds and f.prediction and f.prediction.bound:
            ratio, layout = f.outcome.seconds / f.prediction.bound, f.candidate.layout
            ratios[layout] = min(ratio, ratios.get(layout, ratio))
    return ratios


def search(
    space: Space,
    predict: Callable[[Candidate], Prediction],
    compile_candidate: Callable[[Candidate], Outcome],
    *,
    limit: int,
    best: int = 8,
    tolerance: float = 0.1,
    say: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Searches a space for the fastest candidate that fits, and compiles few of its candidates.

    The next candidate to compile is the one with the shortest predicted time, after predictions
    have been corrected by what the compiled ones have shown. In the first half, each has another
    layout, and none has compiler options, of which formulas know nothing. A candidate is never
    compiled if its bound is above the time of a compiled one, and then candidates with more
    microbatches are not even predicted.

    Args:
      predict: says by formulas what a candidate needs and takes. It raises ValueError if the
        settings cannot be honoured.
      limit: the memory of a device, in bytes.
      best: how many candidates to compile at most.
      tolerance: the relative error of predicted memory: only candidates that exceed the limit by
        more are left out.
      say: prints a line about the progress.
    """
    found: dict[Candidate, Found] = {}

    def predict_open() -> None:
        for candidate in _to_predict(space.candidates, found):
            found[candidate] = _predict(candidate, predict, limit / (1 - tolerance))
            if len(found) % 25 == 0:
                say(f'predicted {len(found)} of {len(space.candidates)} candidates')

    predict_open()
    for number in range(1, best + 1):
        chosen = _choose(list(found.values()), limit, varies_layouts=2 * number <= best + 1)
        if chosen is None:
            break
        say(f'compiling {number} of at most {best}: {chosen.candidate}')
        outcome = compile_candidate(chosen.candidate)
        found[chosen.candidate] = dataclasses.replace(chosen, status='compiled', outcome=outcome)
        say(_describe(outcome))
        _rule_out(found)
        predict_open()
        _rule_out(found)
    for candidate in space.candidates:  # slower than one that is too slow
        found.setdefault(candidate, Found(candidate=candidate, status='too slow'))
    ordered = sorted(found.values(), key=_order)
    return SearchResult(found=tuple(ordered), dropped=dict(space.dropped), limit=limit)


def _predict(
    candidate: Candidate, predict: Callable[[Candidate], Prediction], most: float
) -> Found:
    """What formulas say about a candidate; `most` are the bytes from which it is too large."""
    try:
        prediction = predict(candidate)
    except ValueError as error:
        return Found(candidate=candidate, status='impossible', reason=first_line(error))
    status: Status = 'too large' if prediction.peak > most else 'not compiled'
    return Found(candidate=candidate, status=status, prediction=prediction)


def _to_predict(
    candidates: Sequence[Candidate], found: Mapping[Candidate, Found]
) -> Iterator[Candidate]:
    """The candidates that could win, as far as `found` says, which grows meanwhile.

    More microbatches exchange more, and offloading copies in addition to what `remat = 'full'`
    does: such a candidate is predicted only if the simpler one does not fit, or is not too slow
    once there is a time to compare with.
    """
    known = any(one.seconds is not None for one in found.values())
    present = {*candidates}
    for candidate in candidates:
        simpler = found.get(before) if (before := _simpler(candidate, present)) else None
        if candidate in found or (before and simpler is None):
            continue
        status = simpler.status if simpler else 'impossible'
        if status != 'too slow' and (known or status != 'not compiled'):
            yield candidate


def _simpler(candidate: Candidate, present: Collection[Candidate]) -> Candidate | None:
    """The candidate with less to do and as many products, if there is one."""
    changes: list[dict[str, Any]] = [{'remat': 'full'}] if candidate.remat == 'offload' else []
    changes += [
        {'num_microbatches': n} for n in range((candidate.num_microbatches or 1) - 1, 0, -1)
    ]
    made = (dataclasses.replace(candidate, **change) for change in changes)
    return next((one for one in made if one in present), None)


def _rule_out(found: dict[Candidate, Found]) -> None:
    """Says which candidates are too slow next to the fastest compiled one."""
    times = [one.seconds for one in found.values() if one.seconds is not None]
    fastest = min(times, default=math.inf)
    factor = min([1.0, *_least_ratios(found.values()).values()])
    for one in list(found.values()):
        if one.prediction and _is_open(one.status):
            slow = factor * one.prediction.bound >= fastest
            status: Status = 'too slow' if slow else 'not compiled'
            found[one.candidate] = dataclasses.replace(one, status=status)


def _choose(found: Sequence[Found], limit: int, *, varies_layouts: bool) -> Found | None:
    """The candidate to compile next, or None if no other one can win.

    Args:
      varies_layouts: whether layouts that were not compiled come first, without compiler options.
    """
    seen = {one.candidate.layout for one in found if one.outcome is not None}
    left = [(f, f.prediction) for f in found if f.status == 'not compiled' and f.prediction]
    times, peaks = list[tuple[Candidate, float]](), list[tuple[Candidate, float]]()
    for one in found:
        if one.outcome is None or one.prediction is None:
            continue
        if one.outcome.seconds:
            times.append((one.candidate, one.outcome.seconds / one.prediction.seconds))
        if one.outcome.peak:
            peaks.append((one.candidate, one.outcome.peak / one.prediction.peak))
    candidates = [one.candidate for one, _ in left]
    seconds = [
        prediction.seconds * factor
        for (_, prediction), factor in zip(left, correct(times, candidates), strict=True)
    ]
    slow = _SLOW * min(seconds, default=0.0)
    ranked = [
        (
            prediction.peak * peak > limit,
            varies_layouts and bool(one.candidate.compiler_options),
            varies_layouts and (one.candidate.layout in seen or time > slow),
            time,
            number,
        )
        for number, ((one, prediction), time, peak) in enumerate(
            zip(left, seconds, correct(peaks, candidates), strict=True)
        )
    ]
    return left[min(ranked)[-1]][0] if ranked else None


def correct(
    known: Sequence[tuple[Candidate, float]], candidates: Sequence[Candidate]
) -> list[float]:
    """Returns the factor by which the prediction of each candidate is to be multiplied.

    The factor is a product of one factor per setting, which a ridge regression finds in logarithms.
    `known` candidates with a known figure, each with the ratio of the figure to its prediction.
    """
    if not known:
        return [1.0] * len(candidates)
    words = sorted({word for candidate, _ in known for word in candidate.features})
    has = np.array([[word in c.features for word in words] for c, _ in known], float)
    ratios = np.array([math.log(ratio) for _, ratio in known])
    usual = ratios.mean()
    # Every setting of one candidate shares what is unexplained, so the doubt grows with their
    # number.
    doubt = _DOUBT * has.sum(axis=1).mean()
    weights = np.linalg.solve(has.T @ has + doubt * np.eye(len(words)), has.T @ (ratios - usual))
    weight_of = dict(zip(words, weights.tolist(), strict=True))
    return [
        math.exp(usual + sum(weight_of.get(word, 0.0) for word in candidate.features))
        for candidate in candidates
    ]


def _order(found: Found) -> tuple[int, float]:
    """Where a candidate stands in the result."""
    if found.seconds is not None:
        return 0, found.seconds
    if found.outcome is not None:
        return 1, found.outcome.peak or 0
    if found.prediction is not None:
        return (2 if _is_open(found.status) else 3), found.prediction.seconds
    return 4, 0


def _describe(outcome: Outcome) -> str:
    took = f'compiled in {outcome.compile_seconds:.0f} s'
    if outcome.error:
        return f'  {took}: {outcome.error}'
    peak = bytes_str(outcome.peak or 0)
    if not outcome.fits:
        return f'  {took}: {peak} do not fit'
    time = 'no forecast of its time' if outcome.seconds is None else f'{outcome.seconds:.3f} s'
    return f'  {took}: {time} per step, {peak}'
