"""Says of each exchange whether it can be avoided, and with which change that was tried.

A change is tried by formula, on the trace of the function, and if asked by compiling it. An
exchange is avoidable if it is gone, or mostly, in the function with a change that keeps the layout
of all parameters, and that sends less and needs no more of anything else.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jax.sharding import Mesh

from meshwright.advice.candidates import Candidate, Candidates
from meshwright.advice.estimates import (
    Estimate,
    Sent,
    count_steps,
    estimate_call,
    estimate_program,
    shape_of,
)
from meshwright.advice.shard_maps import MissingSpec, find_missing_specs
from meshwright.advice.variants import Subject, make_subject, with_change
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
    StateChange,
    join_changes,
)
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation
from meshwright.jax_private import TracedCall
from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.values import Axes
from meshwright.program.collectives import Collective
from meshwright.program.costs import ProgramCosts
from partitioning.hardware import Chip
from partitioning.plan.rows import PlanRow

_STEPS = 9000  # the steps of all estimates together
_FEWEST, _MOST = 6, 30  # estimates
_SENT, _HELD = 0.98, 1.01  # the share of the bytes that a change may leave
_JOINED = 1.25  # two changes are kept together if they save this many times more
_REMOVED = 0.95  # the weight of leaving a constraint out: others may want it
_KEPT = 1.1  # the weight of a change that keeps the layout of the parameters

# Exchanges in which data moves along several mesh axes at once.
_ALONG_SEVERAL = ('collective-permute', 'all-to-all')
_LESS, _MORE = 0.995, 1.01  # a change lowers a figure to this share, and raises others to this one

Exchanges = tuple[tuple[Collective, Cause | None], ...]


Key = tuple[str, tuple[str, ...], tuple[str, ...], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A compiled function, per device and call.

    Attributes:
      sent: the bytes that a device sends.
      peak: the peak of its memory, in bytes.
      seconds: the forecast time; None if the chip has no model.
      exchanges: the bytes of its exchanges.
    """

    sent: float
    peak: int
    seconds: float | None
    exchanges: Mapping[Key, float]

    def is_better(self, before: Measured) -> bool:
        """Whether it lowers a figure of another one, and raises none by more than 1%."""
        pairs = [(self.sent, before.sent), (self.peak, before.peak)]
        if self.seconds is not None and before.seconds is not None:
            pairs.append((self.seconds, before.seconds))
        lower = any(after < _LESS * figure for after, figure in pairs)
        return lower and all(after <= _MORE * figure for after, figure in pairs)


def measure_costs(costs: ProgramCosts, seconds: float | None) -> Measured:
    """The figures of a compiled function.

    Args:
      costs: its costs.
      seconds: its forecast time.
    """
    exchanges: dict[Key, float] = collections.defaultdict(float)
    for one in costs.collectives:
        exchanges[key_of(one)] += one.total_bytes
    return Measured(
        sent=sum(exchanges.values()),
        peak=costs.memory.peak if costs.memory is not None else costs.at_peak.nbytes,
        seconds=seconds,
        exchanges=dict(exchanges),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A change that lowers what a function sends or holds, by formula or by compiling.

    Attributes:
      candidate: the change.
      estimate: the function with it, by formula.
      saved: the share of the bytes that it saves, weighed.
      vanished: the exchanges that are gone, by formula.
      compiled: what it does to the compiled program; None if that was not tried.
      gone: the exchanges of the compiled program that are gone.
    """

    candidate: Candidate
    estimate: Estimate
    saved: float
    vanished: dict[Sent, float]
    compiled: Effect | None = None
    gone: frozenset[Key] = frozenset()

    @property
    def change(self) -> Change:
        """The change."""
        return self.candidate.change


def key_of(collective: Collective) -> Key:
    """What an exchange of one compilation has in common with the same of another one."""
    return collective.kind, collective.axes, collective.arrays, collective.source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advised:
    """The exchanges of a function with what is known of the changes that were tried.

    Attributes:
      base: the function as it is, by formula.
      variants: the changes that help, the best first.
      subject: the function.
      rows_axes: the mesh axes over which the rows of the batch are sharded, or should be.
      missing_specs: what is gathered for shard_maps and need not be.
    """

    base: Estimate
    variants: tuple[Variant, ...]
    subject: Subject
    rows_axes: Axes
    missing_specs: tuple[MissingSpec, ...] = ()


def find_variants(
    call: TracedCall,
    laid_out: TracedProgram,
    rows: Sequence[PlanRow | None],
    explanation: Explanation,
    mesh: Mesh,
    *,
    chip: Chip | None = None,
) -> Advised:
    """Estimates a function with the changes that may help, and keeps those that do.

    Args:
      call: the trace of the function.
      laid_out: the same, with the layout of its arrays.
      rows: the layout of each array of the arguments.
      explanation: the causes of its exchanges, whose changes are tried, too.
      mesh: the mesh.
      chip: the chip.
    """
    traced, possible = explanation.traced, explanation.possible
    subject = make_subject(call, mesh, rows, traced)
    base = estimate_program(laid_out, chip)
    assert base is not None
    candidates = Candidates(subject, traced, possible, base.equations)
    budget = min(_MOST, max(_FEWEST, _STEPS // max(count_steps(laid_out.block), 1)))
    tried: dict[str, Variant | None] = {}

    def attempt(candidate: Candidate) -> Variant | None:
        name = str(candidate.change)
        if name not in tried:
            tried[name] = None
            if len(tried) <= budget:
                tried[name] = _estimate(subject, candidate, base, laid_out, chip)
        return tried[name]

    if base.sent:
        for candidate in candidates.of_state():
            attempt(candidate)
        ranked = [
            *candidates.of_constraints(),
            *candidates.of_parameters(),
            *((0.7 * weight, one) for weight, one in candidates.of_missing()),
            *_of_causes(explanation),
        ]
        ranked.sort(key=lambda pair: -pair[0])
        for _, candidate in ranked[: max(budget - len(tried) - min(_FEWEST, budget // 2), 0)]:
            attempt(candidate)
        _refine(candidates, attempt, tried)
    found = sorted((v for v in tried.values() if v is not None), key=lambda v: -v.saved)
    return Advised(
        base=base,
        variants=tuple(found),
        subject=subject,
        rows_axes=candidates.rows_axes,
        missing_specs=find_missing_specs(laid_out),
    )


def _of_causes(explanation: Explanation) -> Iterator[tuple[float, Candidate]]:
    """The changes of the causes of the compiled exchanges."""
    for collective, cause in explanation.collectives:
        for number, change in enumerate(cause.all_changes if cause else ()):
            if isinstance(change, ConstraintChange | ConstraintRemoval):
                yield collective.total_bytes / (2 + number), Candidate(change)


def _refine(
    candidates: Candidates,
    attempt: Callable[[Candidate], Variant | None],
    tried: dict[str, Variant | None],
) -> None:
    """Tries other layouts at the line of the best constraint, and the two best changes together."""
    best = _best(tried.values())
    for candidate in candidates.around(None if best is None else best.change):
        attempt(candidate)
    best = _best(tried.values())
    others = sorted((v for v in tried.values() if v is not None), key=lambda v: -v.saved)
    for other in others[:4]:
        if best is None or other is best or other.saved < best.saved / 4:
            continue
        try:
            both = join_changes(best.change, other.change)
        except ValueError:  # they change the same line or argument
            continue
        keeps = best.candidate.keeps_layout and other.candidate.keeps_layout
        joined = attempt(Candidate(both, keeps_layout=keeps))
        if joined is not None and joined.saved <= _JOINED * best.saved:
            tried[str(both)] = None


def _best(variants: Iterable[Variant | None]) -> Variant | None:
    return max((v for v in variants if v is not None), key=lambda v: v.saved, default=None)


def _estimate(
    subject: Subject,
    candidate: Candidate,
    base: Estimate,
    laid_out: TracedProgram,
    chip: Chip | None,
) -> Variant | None:
    """The function with a change by formula, or None if the change does not help."""
    try:
        call = with_change(subject, candidate.change)
    except ValueError:  # no line or argument is as the change says
        return None
    if call is None:
        return None
    # Constraints are tried to send less, and layouts of a state also to hold less.
    least = _HELD if isinstance(candidate.change, StateChange) else _SENT
    estimate = estimate_call(
        call, subject.mesh, laid_out.slices or None, chip, most=least * base.cost
    )
    if estimate is None or not estimate.is_better(base):
        return None
    saved = max(estimate.saved(base), 0.0) + 0.1 * (base.peak - estimate.peak) / base.peak
    saved *= _REMOVED if isinstance(candidate.change, ConstraintRemoval) else 1
    saved *= _KEPT if candidate.keeps_layout else 1
    return Variant(
        candidate=candidate, estimate=estimate, saved=saved, vanished=estimate.vanished(base)
    )


def advise(
    explanation: Explanation, advised: Advised
) -> tuple[tuple[Collective, Cause | None], ...]:
    """The exchanges, each with the change that removes it, if there is one.

    Args:
      explanation: the causes of the exchanges.
      advised: the changes that help.
    """
    pairs = list(zip(explanation.collectives, explanation.evidence, strict=True))
    made = [(c, _without_changes(cause, e, advised)) for (c, cause), e in pairs]
    taken: set[int] = set()
    order = sorted(range(len(pairs)), key=lambda n: -pairs[n][0][0].total_bytes)
    for variant in advised.variants:
        left = [n for n in order if n not in taken]
        if variant.compiled is None:
            left = [n for n in left if not _is_needed(pairs[n][1], advised)]
        matched = [n for n in left if _is_gone(*pairs[n][0], pairs[n][1], variant)]
        if not matched and variant.compiled is None:
            # Formulas see another exchange than the compiler has made.
            matched = [n for n in left if _may_be_gone(pairs[n][0][0], pairs[n][1], variant)][:1]
            variant = dataclasses.replace(
                variant, candidate=dataclasses.replace(variant.candidate, keeps_layout=False)
            )
        for n in matched:
            taken.add(n)
            c, cause = made[n]
            if cause is not None:
                needed = _is_needed(pairs[n][1], advised)
                made[n] = c, _with_variant(cause, variant, advised, needed=needed)
    return tuple(made)


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
    # The layout of a result has no line: it moves what updates the state.
    is_state = bool(value.update_of) or evidence.result is not None
    return any(
        (axes == {*sent.axes} or (axes > {*sent.axes} and collective.kind in _ALONG_SEVERAL))
        and sent.shape == shape
        and (bool(lines & {*sent.lines}) if any(sent.lines) else is_state)
        and (sent.backward == value.backward or not any(sent.lines))
        for sent in variant.vanished
    )


def _may_be_gone(collective: Collective, evidence: Evidence | None, variant: Variant) -> bool:
    """Whether an exchange may be one of those that are gone by formula, seen otherwise."""
    if evidence is None or evidence.value is None:
        return False
    axes, shape = {*collective.axes}, shape_of(evidence.value)
    return any(axes & {*sent.axes} and sent.shape == shape for sent in variant.vanished)


def compile_variants(
    explanation: Explanation,
    advised: Advised,
    before: Measured,
    measure: Callable[[TracedCall], Measured | None],
    most: int = 3,
) -> Advised:
    """Compiles the function with the best changes, and leaves out those that do not help.

    Args:
      explanation: the causes of the exchanges.
      advised: the changes that help by formula.
      before: the function as it is.
      measure: compiles a function; None if it cannot be compiled.
      most: the number of compilations at most.
    """
    kept: list[Variant] = []
    for number, variant in enumerate(advised.variants):
        if number >= most:  # it does less than those that were compiled
            break
        call = with_change(advised.subject, variant.change)
        after = None if call is None else measure(call)
        if after is not None and after.is_better(before):
            gone = {k for k, n in before.exchanges.items() if after.exchanges.get(k, 0) < n / 2}
            effect = Effect(
                sent=(before.sent, after.sent),
                peak=(before.peak, after.peak),
                seconds=None
                if before.seconds is None or after.seconds is None
                else (before.seconds, after.seconds),
            )
            kept.append(dataclasses.replace(variant, compiled=effect, gone=frozenset(gone)))
    kept.sort(key=lambda v: (v.compiled is None, -_saved(v)))
    return dataclasses.replace(advised, variants=tuple(kept))


def _saved(variant: Variant) -> float:
    """The bytes that a compiled change saves, or the share by formula."""
    if variant.compiled is None:
        return variant.saved
    (sent, sends), (held, holds) = variant.compiled.sent, variant.compiled.peak
    saved = sent - sends + 0.1 * (held - holds)
    return saved * (_REMOVED if isinstance(variant.change, ConstraintRemoval) else 1)


def _without_changes(
    cause: Cause | None, evidence: Evidence | None, advised: Advised
) -> Cause | None:
    """A cause without the changes that were not tried, or did not help; words for the author stay.

    Rules are tried by compiling only.
    """
    if cause is None:
        return None
    missing = next((one for one in advised.missing_specs if one.is_of(evidence)), None)
    if missing is not None:
        return dataclasses.replace(
            cause,
            source=missing.change.source,
            why=missing.why,
            change=str(missing.change),
            all_changes=(missing.change,),
            avoidable=True,
        )
    kept = [c for c in cause.all_changes if isinstance(c, RuleChange | CodeChange)]
    kept = kept if cause.suspect else []
    told = bool(kept) and isinstance(kept[0], CodeChange)
    return dataclasses.replace(
        cause, change=str(kept[0]) if kept else '', all_changes=tuple(kept), avoidable=told
    )


def _is_needed(evidence: Evidence | None, advised: Advised) -> bool:
    """Whether any program with these layouts sends it: gathers and sums over the rows' devices.

    Parameters that are sharded over the axes of the batch are gathered for use, in one go or in
    rings, and their gradients are summed over the rows.
    """
    value = evidence.value if evidence is not None else None
    if evidence is None or value is None or not {*evidence.axes} <= {*advised.rows_axes}:
        return False
    row = advised.subject.by_path.get(value.argument)
    gathered = row is not None and row.role == 'parameters'
    summed = bool(value.gradient_of) and evidence.kind in ('all-reduce', 'reduce-scatter')
    return summed or (gathered and evidence.kind in ('all-gather', 'collective-permute'))


def _with_variant(cause: Cause, variant: Variant, advised: Advised, *, needed: bool) -> Cause:
    """A cause with a change that removes the exchange."""
    change, base = variant.change, advised.base
    effect = variant.compiled or Effect(
        sent=(base.sent, variant.estimate.sent), peak=(base.peak, variant.estimate.peak)
    )
    first = change.parts[0] if isinstance(change, JoinedChange) else change
    source, array = cause.source, cause.array
    if isinstance(first, ConstraintChange | ConstraintRemoval):
        source = first.source
    elif isinstance(first, LayoutChange):
        array = first.path or array
    elif isinstance(first, StateChange) and first.layouts:
        array = first.layouts[0][0]
    return dataclasses.replace(
        cause,
        source=source,
        array=array,
        change=str(change),
        confirmed=True if variant.compiled is not None else None,
        avoidable=variant.candidate.keeps_layout and not needed,
        effect=effect,
        all_changes=(change, *(c for c in cause.all_changes if c != change)),
    )
