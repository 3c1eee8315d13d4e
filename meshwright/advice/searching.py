"""Finds the changes with which a function sends or holds less, by formula and by compiling.

A finder reads a function and yields changes of one kind. Changes of constraints and layouts are
made in the trace, whose figures follow by formula; those that help are compiled. What only the
author can write is tried on an edited trace if there is one, and said in words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from jax.sharding import AxisType, Mesh

from meshwright.advice.candidates import REMOVED, Advised, Candidate, Told, Variant
from meshwright.advice.figures import (
    MORE_FLOPS,
    Estimate,
    count_steps,
    estimate_call,
    estimate_program,
)
from meshwright.advice.function_view import FunctionView
from meshwright.advice.of_alike import find_alike
from meshwright.advice.of_arguments import (
    find_missing_rows,
    lay_out_arguments,
    lay_out_state,
)
from meshwright.advice.of_arrays import find_flattened, find_permuted_rows, find_uneven
from meshwright.advice.of_chains import find_chains
from meshwright.advice.of_collectives import find_early_sums, find_kept_parts
from meshwright.advice.of_constraints import (
    add_constraints,
    find_pins,
    lay_out_experts,
    lay_out_updates,
    move_layouts,
    rearrange_constraints,
    replace_constraints,
)
from meshwright.advice.of_early_gathers import find_early_gathers
from meshwright.advice.of_groups import find_grouped_rows
from meshwright.advice.of_halos import find_halos
from meshwright.advice.of_layers import find_loop_gathers, find_scanned_stacks
from meshwright.advice.of_lookups import find_early_lookups, lay_out_tables
from meshwright.advice.of_products import find_merged_factors
from meshwright.advice.of_repeats import find_repeated
from meshwright.advice.of_reshapes import find_misfits, order_splits
from meshwright.advice.of_results import find_gathered_results
from meshwright.advice.of_shard_maps import find_missing_specs
from meshwright.advice.of_summed_gathers import find_summed_gathers
from meshwright.advice.of_whole import find_whole_operations
from meshwright.advice.of_wider import find_wider_exchanges
from meshwright.advice.subject import make_subject, with_change
from meshwright.causes.cause import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    Effect,
    LayoutChange,
    StateChange,
    join_changes,
    places_of,
)
from meshwright.causes.explaining import Explanation
from meshwright.causes.layouts import axes_of_row
from meshwright.jax_private import TracedCall
from meshwright.jaxpr import MemoryEstimate, TracedProgram
from meshwright.jaxpr.values import Axes
from partitioning.hardware import Chip
from partitioning.plan.rows import PlanRow

# Changes that are estimated in any case, and those of which the ones with the most bytes are.
_FIRST: tuple[Callable[[FunctionView], Iterator[Candidate]], ...] = (
    lay_out_state,
    lay_out_updates,
    lay_out_experts,
    lay_out_tables,
)
_RANKED: tuple[Callable[[FunctionView], Iterator[tuple[float, Candidate]]], ...] = (
    replace_constraints,
    lay_out_arguments,
    order_splits,
    add_constraints,
    move_layouts,
)
# What only the author can write, in the order in which an exchange takes its reason from them.
_TOLD: tuple[Callable[[FunctionView], Iterator[Told]], ...] = (
    find_grouped_rows,
    find_permuted_rows,
    find_scanned_stacks,
    find_gathered_results,
    find_missing_specs,
    find_merged_factors,
    find_kept_parts,
    find_halos,
    find_summed_gathers,
    find_alike,
    find_early_gathers,
    find_early_lookups,
    find_chains,
    find_early_sums,
    find_repeated,
    find_whole_operations,
    find_wider_exchanges,
    find_loop_gathers,
    find_flattened,
    find_misfits,
    find_uneven,
)
# What needs the exchanges of the compiled program. The trace shows enough for the others.
_OF_COMPILED = (
    find_scanned_stacks,
    find_gathered_results,
    find_missing_specs,
    find_whole_operations,
    find_wider_exchanges,
    find_loop_gathers,
    find_uneven,
)
TOLD_BY_TRACE = tuple(find for find in _TOLD if find not in _OF_COMPILED)
_STEPS = 9000  # the steps of all estimates together
_FEWEST, _MOST = 6, 30  # estimates
# The share of the bytes that another layout of a parameter has to save, and the layout of most.
_LAID_OUT, _LIKE_MOST = 0.1, 0.03
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
    subject = make_subject(call, mesh, rows, explanation.traced)
    base = estimate_program(laid_out, chip, memory=memory)
    assert base is not None
    search = _Search(FunctionView(subject, laid_out, explanation, base, chip), chip)
    # Layouts over explicit axes are part of the types: a trace cannot be edited there.
    is_editable = AxisType.Explicit not in mesh.axis_types
    if base.sent and is_editable:
        search.attempt_all()
    variants = list(search.helping_together())
    missing = find_missing_rows(search.view)
    if missing is not None and (made := search.estimate(missing.change)) is not None:
        # Other layouts of the parameters would only suit a batch that is whole along these axes.
        rest = [v for v in variants if v.candidate.keeps_layout]
        variants = [search.with_rows(missing, made), *rest]
    pins: tuple[Candidate, ...] = ()
    experts = [*lay_out_experts(search.view)] if is_editable else []
    if is_editable and base.is_far_below(search.view.sends):
        pins = (*find_pins(search.view), *search.other_layouts())
    return Advised(
        base=base,
        variants=tuple(variants),
        experts=tuple(one for one in experts if search.tried.get(str(one.change)) is None),
        pins=pins,
        subject=subject,
        rows_axes=search.view.rows_axes,
        told=tuple(_list_told(search.view)),
        sends=search.view.sends,
    )


def _list_told(view: FunctionView) -> Iterator[Told]:
    """What only the author can write, with what it does to the compiled program."""
    found = [one for find in _TOLD for one in find(view)]
    # Where specs lack an axis, devices have the same for that reason.
    lacking = {axis for one in found if one.is_of_specs for axis in one.axes}
    for one in found:
        if not (one.equal_axes and {*one.equal_axes} <= lacking):
            yield one if one.effect is not None else with_effect(view, one)


def with_effect(view: FunctionView, one: Told) -> Told:
    """A change with figures: of its trace, or else of a program without its exchanges."""
    base, made = view.base, None
    with contextlib.suppress(Exception):  # an operation that cannot be traced again
        if one.trial is not None and (changed := one.trial()) is not None:
            made = estimate_call(changed, view.subject.mesh, view.laid_out.slices or None)
    moved = view.sent_by(one.match)
    if made is not None:
        after = made.sent * max(1.0, view.sends / base.sent) if base.sent else view.sends
        if made.sent >= base.sent and one.removes:  # formulas do not see the exchange
            after = max(view.sends - moved, made.sent)
        peaks = base.peak, min(made.peak, base.peak)
    elif one.removes:
        after = view.sends - moved
        peaks = base.peak, base.peak
    else:
        return one
    return dataclasses.replace(
        one, effect=Effect(sent=(view.sends, min(after, view.sends)), peak=peaks)
    )


class _Search:
    """The changes of a function that were estimated.

    Args:
      view: the function.
      chip: the chip.

    Attributes:
      tried: each change that was tried, by its text; None if it does not help.
    """

    def __init__(self, view: FunctionView, chip: Chip | None):
        self.view, self._chip = view, chip
        self.tried: dict[str, Variant | None] = {}
        steps = max(count_steps(view.laid_out.block), 1)
        self._budget = min(_MOST, max(_FEWEST, _STEPS // steps))

    def attempt_all(self) -> None:
        """Estimates the changes that may help, as many as there is time for."""
        view = self.view
        for find in _FIRST:
            for candidate in find(view):
                self.attempt(candidate)
        ranked = [pair for find in _RANKED for pair in find(view)]
        ranked += _of_causes(view)
        ranked.sort(key=lambda pair: -pair[0])
        ranked = [pair for pair in ranked if not _moves_rows_only(pair[1].change, view)]
        left = self._budget - len(self.tried) - min(_FEWEST, self._budget // 2)
        for _, candidate in ranked[: max(left, 0)]:
            self.attempt(candidate)
        self._refine()

    def attempt(self, candidate: Candidate) -> Variant | None:
        """The function with a change by formula, or None if the change does not help."""
        name = str(candidate.change)
        if name not in self.tried:
            self.tried[name] = None
            if len(self.tried) <= self._budget:
                self.tried[name] = self._estimate(candidate)
        return self.tried[name]

    @property
    def _found(self) -> list[Variant]:
        """The changes that help, the best first."""
        return sorted((v for v in self.tried.values() if v is not None), key=lambda v: -v.saved)

    def estimate(self, change: Change, most: float = math.inf) -> Estimate | None:
        """The function with a change by formula; None if it cannot be made, or costs more."""
        view, changed = self.view, with_change(self.view.subject, change)
        if changed is None:
            return None
        slices = view.laid_out.slices or None
        return estimate_call(changed, view.subject.mesh, slices, self._chip, most)

    def _estimate(self, candidate: Candidate) -> Variant | None:
        base, change = self.view.base, candidate.change
        # Constraints are tried to send less, and layouts of a state also to hold less.
        least = _HELD if isinstance(change, StateChange) else _SENT
        try:
            estimate = self.estimate(change, least * base.cost)
        except Exception:  # no line or argument is as the change says, or it cannot be edited
            return None
        if estimate is None or not estimate.is_better(base):
            return None
        least = _LIKE_MOST if candidate.like_most else _LAID_OUT
        if isinstance(change, LayoutChange) and estimate.saved(base) < least:
            return None  # another layout may suit formulas a little better, and the author not
        saved = max(estimate.saved(base), 0.0) + 0.1 * (base.peak - estimate.peak) / base.peak
        saved *= REMOVED if isinstance(change, ConstraintRemoval) else 1
        saved *= candidate.weight * (_KEPT if candidate.keeps_layout else 1)
        return Variant(
            candidate=candidate, estimate=estimate, saved=saved, vanished=estimate.vanished(base)
        )

    def with_rows(self, missing: Candidate, estimate: Estimate) -> Variant:
        """The function with the rows of the batch over all axes, whether or not it sends less."""
        return Variant(
            candidate=missing,
            estimate=estimate,
            saved=math.inf,
            vanished=estimate.vanished(self.view.base),
            helps=estimate.is_better(self.view.base),
        )

    def other_layouts(self) -> Iterator[Candidate]:
        """Layouts of parameters with which a function sends less by formula than as compiled.

        Formulas see what layouts need. A compiler may send far more where they do not fit each
        other.
        """
        ranked = sorted(lay_out_arguments(self.view), key=lambda pair: -pair[0])
        for _, candidate in ranked[:_COMPILED]:
            with contextlib.suppress(ValueError):  # the function cannot be edited
                made = self.estimate(candidate.change, _LESS * self.view.sends)
                if made is not None and made.flops <= MORE_FLOPS * self.view.base.flops:
                    yield candidate

    def _refine(self) -> None:
        """Tries other layouts at the line of the best constraint, and two changes together."""
        best = next(iter(self._found), None)
        for candidate in rearrange_constraints(self.view, None if best is None else best.change):
            self.attempt(candidate)
        others = self._found
        for other in others[1:4]:
            best = others[0]
            if other.saved < best.saved / 4:
                continue
            try:
                both = join_changes(best.change, other.change)
            except ValueError:  # they change the same line or argument
                continue
            keeps = best.candidate.keeps_layout and other.candidate.keeps_layout
            joined = self.attempt(Candidate(both, keeps_layout=keeps))
            if joined is not None and joined.saved <= _JOINED * best.saved:
                self.tried[str(both)] = None

    def helping_together(self) -> Iterator[Variant]:
        """The best change, other changes of its place, and those that still help once it is made.

        A fault has many cures. What cures it elsewhere, such as in the layer before, saves nothing
        once the fault itself is mended.
        """
        found, checked = self._found, 0
        for variant in found:
            made = found[0]
            if variant is made or not _is_elsewhere(variant.change, made.change):
                yield variant
            elif checked < _CHECKED:
                checked += 1
                try:
                    both = self.estimate(join_changes(made.change, variant.change))
                except ValueError:  # they do not fit each other
                    continue
                if both is not None and both.is_better(made.estimate):
                    yield variant


def _of_causes(view: FunctionView) -> Iterator[tuple[float, Candidate]]:
    """The changes of the causes of the compiled exchanges."""
    needed = {value.line for _, value in view.constraints() if view.gathers_parameter(value)}
    for collective, cause in view.explanation.collectives:
        for number, change in enumerate(cause.all_changes if cause else ()):
            if not isinstance(change, ConstraintChange | ConstraintRemoval):
                continue
            if change.source not in needed:
                yield collective.total_bytes / (2 + number), Candidate(change)


def _moves_rows_only(change: Change, view: FunctionView) -> bool:
    """Whether a change only moves the axes of the rows within parameters.

    Formulas then see products that sum over these axes, and compilers gather the parameters.
    """
    row = view.rows.get(change.path) if isinstance(change, LayoutChange) else None
    if row is None or not isinstance(change, LayoutChange):
        return False
    if not any(axes_of_row(row)) and row.path not in view.used:
        return False  # an average of a parameter, which no product uses

    def others(layout: Sequence[Axes]) -> list[list[str]]:
        return [[a for a in axes if a not in view.rows_axes] for axes in layout]

    moved = others(axes_of_row(row)) == others(change.layout)
    return moved and not _stacks(change, view)


def _stacks(change: LayoutChange, view: FunctionView) -> bool:
    """Whether a change shards a dimension along which products are stacked, such as experts."""
    for value in view.values:
        if value.primitive != 'dot_general' or value.backward or value.maker is None:
            continue
        _, batches = value.maker.params['dimension_numbers']
        for operand, numbers in zip(value.operands[:2], batches, strict=True):
            if operand.argument == change.path:
                dims = [operand.dims[d] for d in numbers]
                return any(d is not None and change.layout[d.number] for d in dims)
    return False


def _is_elsewhere(change: Change, other: Change) -> bool:
    return {*places_of(change)}.isdisjoint(places_of(other))
