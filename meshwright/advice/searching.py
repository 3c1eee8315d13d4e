"""Finds the changes with which a function sends or holds less, by formula and by compiling."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from jax.sharding import AxisType, Mesh

from meshwright.advice.advised import Advised, Told, Variant, places_of
from meshwright.advice.batched_sums import shard_batches
from meshwright.advice.constraint_candidates import (
    add_constraints,
    lay_out_updates,
    rearrange_constraints,
    replace_constraints,
)
from meshwright.advice.estimates import (
    MORE_FLOPS,
    Estimate,
    count_steps,
    estimate_call,
    estimate_program,
)
from meshwright.advice.flattened import find_flattened
from meshwright.advice.kept_parts import find_kept_parts
from meshwright.advice.layout_candidates import lay_out_parameters, lay_out_state
from meshwright.advice.loop_gathers import find_loop_gathers
from meshwright.advice.merged_factors import find_merged_factors
from meshwright.advice.misfits import find_misfits
from meshwright.advice.origins import Origins
from meshwright.advice.permuted_rows import find_permuted_rows
from meshwright.advice.pins import find_pins, lay_out_experts
from meshwright.advice.repeated import FREE, find_repeated
from meshwright.advice.results import find_gathered_results
from meshwright.advice.rows import MissingRows, find_missing_rows
from meshwright.advice.scanned_stacks import find_scanned_stacks
from meshwright.advice.shard_maps import find_missing_specs
from meshwright.advice.splits import order_splits
from meshwright.advice.surroundings import REMOVED, Candidate, Surroundings
from meshwright.advice.uneven import find_uneven
from meshwright.advice.variants import Subject, make_subject, with_change
from meshwright.causes.cause import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    Effect,
    LayoutChange,
    StateChange,
    join_changes,
)
from meshwright.causes.explaining import Explanation
from meshwright.causes.layouts import axes_of_row
from meshwright.jax_private import TracedCall
from meshwright.jaxpr import MemoryEstimate, TracedProgram
from meshwright.jaxpr.values import Axes
from partitioning.hardware import Chip
from partitioning.plan.rows import PlanRow

_STEPS = 9000  # the steps of all estimates together
_FEWEST, _MOST = 6, 30  # estimates
_LAID_OUT = 0.1  # the share of the bytes that another layout of a parameter has to save
_SENT, _HELD = 0.98, 1.01  # the share of the bytes that a change may leave
_LESS, _COMPILED = 0.8, 3  # layouts that send less of what a program sends are compiled; how many
_JOINED = 1.25  # two changes are kept together if they save this many times more
_CHECKED = 4  # changes that are estimated together with the best one
_KEPT = 1.1  # the weight of a change that keeps the layout of the parameters


def find_variants(
    call: TracedCall,
    laid_out: TracedProgram,
    rows: Sequence[PlanRow | None],
    explanation: Explanation,
    mesh: Mesh,
    *,
    chip: Chip | None = None,
    memory: MemoryEstimate | None = None,
) -> Advised:
    """Estimates a function with the changes that may help, and keeps those that do.

    Args:
      call: the trace of the function.
      laid_out: the same, with the layout of its arrays.
      rows: the layout of each array of the arguments.
      explanation: the causes of its exchanges, whose changes are tried, too.
      mesh: the mesh.
      chip: the chip.
      memory: the memory of the function by formula, if it is known already.
    """
    traced, possible = explanation.traced, explanation.possible
    subject = make_subject(call, mesh, rows, traced)
    base = estimate_program(laid_out, chip, memory=memory)
    assert base is not None
    around = Surroundings(subject, traced, possible, base.equations)
    budget = min(_MOST, max(_FEWEST, _STEPS // max(count_steps(laid_out.block), 1)))
    tried: dict[str, Variant | None] = {}

    def attempt(candidate: Candidate) -> Variant | None:
        name = str(candidate.change)
        if name not in tried:
            tried[name] = None
            if len(tried) <= budget:
                tried[name] = _estimate(subject, candidate, base, laid_out, chip)
        return tried[name]

    # Layouts over explicit axes are part of the types: a trace cannot be edited there.
    is_editable = AxisType.Explicit not in mesh.axis_types
    experts = [*lay_out_experts(around)] if is_editable else []
    origins = Origins(laid_out, rows)
    if base.sent and is_editable:
        of_state = (*lay_out_state(around), *shard_batches(around, origins))
        for candidate in (*of_state, *lay_out_updates(around), *experts):
            attempt(candidate)
        ranked = [
            *replace_constraints(around),
            *lay_out_parameters(around),
            *order_splits(around),
            *((0.7 * weight, one) for weight, one in add_constraints(around)),
            *_of_causes(explanation, around),
        ]
        ranked.sort(key=lambda pair: -pair[0])
        ranked = [pair for pair in ranked if not _moves_rows_only(pair[1].change, around)]
        for _, candidate in ranked[: max(budget - len(tried) - min(_FEWEST, budget // 2), 0)]:
            attempt(candidate)
        _refine(around, attempt, tried)
    found = sorted((v for v in tried.values() if v is not None), key=lambda v: -v.saved)

    def estimate(change: Change) -> Estimate | None:
        changed = with_change(subject, change)
        if changed is None:
            return None
        return estimate_call(changed, mesh, laid_out.slices or None, chip)

    variants = list(_helping_together(found, estimate))
    missing_rows = find_missing_rows(subject, traced, possible.layouts.sizes)
    if missing_rows is not None and (made := estimate(missing_rows.candidate.change)) is not None:
        # Other layouts of the parameters would only suit a batch that is whole along these axes.
        rest = [v for v in variants if v.candidate.keeps_layout]
        variants = [_with_rows(missing_rows, made, base), *rest]
    known = traced.values, subject.by_path, possible.layouts.sizes
    sends = sum(c.total_bytes for c, _ in explanation.collectives)
    pins: tuple[Candidate, ...] = ()
    if is_editable and base.is_far_below(sends):
        pins = (*find_pins(around, explanation), *_other_layouts(around, base, sends, estimate))
    specs = find_missing_specs(laid_out, mesh)
    lacking = {axis for one in specs for axis in one.axes}
    repeated = find_repeated(laid_out, base, sends, chip)
    return Advised(
        base=base,
        variants=tuple(variants),
        missing_rows=missing_rows,
        experts=tuple(one for one in experts if tried.get(str(one.change)) is None),
        pins=pins,
        subject=subject,
        rows_axes=around.rows_axes,
        told=(
            *find_permuted_rows(origins, explanation, base.peak),
            *(find_scanned_stacks(origins, subject, sends, base.peak) if is_editable else ()),
            *find_gathered_results(call, explanation, base.peak, subject.returned),
            *_with_effects(
                [
                    *specs,
                    *find_merged_factors(laid_out, traced.values),
                    *find_kept_parts(laid_out),
                ],
                subject,
                base,
                sends,
                laid_out,
            ),
            # Where specs lack an axis, devices have the same for that reason.
            *(one for one in repeated if not (one.is_of_equals and {*one.axes} <= lacking)),
            *find_loop_gathers(
                call,
                subject.by_path,
                explanation,
                base.peak,
                None if chip is None else FREE * chip.hbm_bytes_per_device,
            ),
            *find_flattened(subject.by_path, explanation, base.peak),
            *find_misfits(*known),
            *find_uneven(*known),
        ),
        sends=sends,
    )


def _with_effects(
    found: Iterable[Told], subject: Subject, base: Estimate, sends: float, laid_out: TracedProgram
) -> Iterator[Told]:
    """What only the author can write, with what it does by formula to the compiled program."""
    for one in found:
        made = None
        with contextlib.suppress(Exception):  # an operation that cannot be traced again
            if one.trial is not None:
                changed = one.trial(subject.call)
                made = estimate_call(changed, subject.mesh, laid_out.slices or None)
        if made is None:
            yield one
            continue
        after = made.sent * max(1.0, sends / base.sent) if base.sent else sends
        peaks = base.peak, min(made.peak, base.peak)
        yield dataclasses.replace(one, effect=Effect(sent=(sends, min(after, sends)), peak=peaks))


def _other_layouts(
    around: Surroundings,
    base: Estimate,
    sends: float,
    estimate: Callable[[Change], Estimate | None],
) -> Iterator[Candidate]:
    """Layouts of parameters with which a function sends less by formula than it does as compiled.

    Formulas see what layouts need. A compiler may send far more where they do not fit each other.
    """
    ranked = sorted(lay_out_parameters(around), key=lambda pair: -pair[0])
    for _, candidate in ranked[:_COMPILED]:
        with contextlib.suppress(ValueError):  # the function cannot be edited
            made = estimate(candidate.change)
            if (
                made is not None
                and made.sent < _LESS * sends
                and made.flops <= MORE_FLOPS * base.flops
            ):
                yield candidate


def _of_causes(explanation: Explanation, around: Surroundings) -> Iterator[tuple[float, Candidate]]:
    """The changes of the causes of the compiled exchanges."""
    needed = {value.line for _, value in around.constraints() if around.gathers_parameter(value)}
    for collective, cause in explanation.collectives:
        for number, change in enumerate(cause.all_changes if cause else ()):
            if not isinstance(change, ConstraintChange | ConstraintRemoval):
                continue
            if change.source not in needed:
                yield collective.total_bytes / (2 + number), Candidate(change)


def _moves_rows_only(change: Change, around: Surroundings) -> bool:
    """Whether a change only moves the axes of the rows within parameters.

    Formulas then see products that sum over these axes, and compilers gather the parameters.
    """
    row = around.rows.get(change.path) if isinstance(change, LayoutChange) else None
    if row is None or not isinstance(change, LayoutChange):
        return False
    if not any(axes_of_row(row)) and row.path not in around.used:
        return False  # an average of a parameter, which no product uses

    def others(layout: Sequence[Axes]) -> list[list[str]]:
        return [[a for a in axes if a not in around.rows_axes] for axes in layout]

    moved = others(axes_of_row(row)) == others(change.layout)
    return moved and not _stacks(change, around)


def _stacks(change: LayoutChange, around: Surroundings) -> bool:
    """Whether a change shards a dimension along which products are stacked, such as experts."""
    for value in around.traced.values:
        if value.primitive != 'dot_general' or value.backward or value.maker is None:
            continue
        _, batches = value.maker.params['dimension_numbers']
        for operand, numbers in zip(value.operands[:2], batches, strict=True):
            if operand.argument == change.path:
                dims = [operand.dims[d] for d in numbers]
                return any(d is not None and change.layout[d.number] for d in dims)
    return False


def _refine(
    around: Surroundings,
    attempt: Callable[[Candidate], Variant | None],
    tried: dict[str, Variant | None],
) -> None:
    """Tries other layouts at the line of the best constraint, and the two best changes together."""
    best = _best(tried.values())
    for candidate in rearrange_constraints(around, None if best is None else best.change):
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


def _helping_together(
    found: Sequence[Variant], estimate: Callable[[Change], Estimate | None]
) -> Iterator[Variant]:
    """The best change, other changes of the same place, and those that still help once it is made.

    A fault has many cures. What cures it elsewhere, such as in the layer before, saves nothing once
    the fault itself is mended.
    """
    if not found:
        return
    made, checked = found[0], 0
    for variant in found:
        if variant is made or not _is_elsewhere(variant.change, made.change):
            yield variant
        elif checked < _CHECKED:
            checked += 1
            try:
                both = estimate(join_changes(made.change, variant.change))
            except ValueError:  # they do not fit each other
                continue
            if both is not None and both.is_better(made.estimate):
                yield variant


def _with_rows(missing: MissingRows, estimate: Estimate, base: Estimate) -> Variant:
    """The function with the rows of the batch over all axes, whether or not it sends less."""
    return Variant(
        candidate=missing.candidate,
        estimate=estimate,
        saved=math.inf,
        vanished=estimate.vanished(base),
        row_axes=missing.axes,
        helps=estimate.is_better(base),
    )


def _is_elsewhere(change: Change, other: Change) -> bool:
    return {*places_of(change)}.isdisjoint(places_of(other))


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
    except Exception:  # no line or argument is as the change says, or the trace cannot be edited
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
    if isinstance(candidate.change, LayoutChange) and estimate.saved(base) < _LAID_OUT:
        return None  # another layout may suit formulas a little better, and the author not
    saved = max(estimate.saved(base), 0.0) + 0.1 * (base.peak - estimate.peak) / base.peak
    saved *= REMOVED if isinstance(candidate.change, ConstraintRemoval) else 1
    saved *= candidate.weight * (_KEPT if candidate.keeps_layout else 1)
    return Variant(
        candidate=candidate, estimate=estimate, saved=saved, vanished=estimate.vanished(base)
    )
