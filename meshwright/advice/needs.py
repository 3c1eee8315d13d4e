"""Which exchanges are needed by the mathematics of a function and the layout of its parameters.

Parameters that are sharded over the axes of the batch are gathered for use, gradients are summed
over the rows, and products over a sharded dimension are summed. Of others, it is not known.

A buffer has a change of an exchange that was tried, or none. One that shards an activation, or lays
out an argument in another way, often doubles what is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from meshwright.advice.candidates import SUMS, Advised
from meshwright.advice.figures import MORE
from meshwright.causes.cause import Cause, Effect
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import sharding_of_row
from meshwright.jaxpr.primitives import names_in
from meshwright.jaxpr.values import Value
from meshwright.program.collectives import Collective
from meshwright.program.peak_memory import LiveArray

_SMALL = 4096  # bytes of an exchange that is not worth a change, such as of a loss
_ADDING, _TERMS = names_in('add add_any convert_element_type'), 12  # of a sum, and how many


def with_need(
    collective: Collective, cause: Cause | None, evidence: Evidence | None, advised: Advised
) -> Cause | None:
    """A cause that says whether the mathematics and the layout of the parameters need it."""
    if cause is None or cause.avoidable or cause.change or cause.traded:
        return cause
    needed = collective.total_bytes < _SMALL * collective.count or not cause.suspect
    needed |= is_needed(evidence, advised) or _sums_parts(evidence, advised)
    needed |= _follows_state(evidence, advised)
    return dataclasses.replace(cause, needed=needed)


def _sums_parts(evidence: Evidence | None, advised: Advised) -> bool:
    """Whether an exchange sums what the layout of a parameter makes devices compute in parts.

    These are products over a dimension that is sharded, and gradients of parameters that devices
    along the axes hold in full.
    """
    value = evidence.value if evidence is not None else None
    if evidence is None or value is None or evidence.kind not in SUMS:
        return False
    axes = {*evidence.axes}
    for one in _added_in(value):
        if any(dim is not None and axes & {*dim.axes} for dim in one.contracted):
            return True
    row = advised.subject.by_path.get(value.gradient_of)
    return row is not None and not axes & sharding_of_row(row)


def _follows_state(evidence: Evidence | None, advised: Advised) -> bool:
    """Whether an exchange moves gradients in a ring of the rows, or updates of whole parameters.

    The compiler may scatter gradients in rings. Moments may be sharded finer than parameters.
    """
    value = evidence.value if evidence is not None else None
    if evidence is None or value is None:
        return False
    axes, row = {*evidence.axes}, advised.subject.by_path.get(value.update_of)
    if value.gradient_of and evidence.kind == 'collective-permute':
        return axes <= {*advised.rows_axes}
    whole = row is not None and not axes & sharding_of_row(row)
    return whole and row is not None and row.role == 'parameters' and evidence.kind == 'all-gather'


def _added_in(value: Value) -> Iterator[Value]:
    """A value, and the values of its shape of which it is a sum, such as gradients of its uses."""
    pending = [value]
    for _ in range(_TERMS):
        if not pending:
            return
        yield (one := pending.pop(0))
        if one.primitive in _ADDING:
            pending += [operand for operand in one.operands if operand.shape == one.shape]


def is_needed(evidence: Evidence | None, advised: Advised) -> bool:
    """Whether any program with these layouts sends it: gathers and sums over the rows' devices.

    Parameters that are sharded over the axes of the batch are gathered for use, in one go or in
    rings, and their gradients are summed over the rows.
    """
    value = evidence.value if evidence is not None else None
    if evidence is None or value is None or not {*evidence.axes} <= {*advised.rows_axes}:
        return False
    row = advised.subject.by_path.get(value.argument)
    gathered = row is not None and row.role == 'parameters'
    summed = bool(value.gradient_of) and evidence.kind in SUMS
    return summed or (gathered and evidence.kind in ('all-gather', 'collective-permute'))


def with_tried_changes(
    buffers: Sequence[tuple[LiveArray, Cause | None]],
    exchanges: Sequence[tuple[Collective, Cause | None]],
) -> tuple[tuple[LiveArray, Cause | None], ...]:
    """The buffers with the changes that help, and without all others.

    Args:
      buffers: the largest buffers, with their causes.
      exchanges: the exchanges, whose changes were tried.
    """
    sent = {c.instruction: cause for c, cause in exchanges if cause is not None}
    helping = {cause.change: cause for cause in sent.values() if _helps(cause.effect)}
    made = []
    for live, cause in buffers:
        cause = sent.get(live.instruction, cause)
        if cause is not None:
            found = (helping[str(c)] for c in cause.all_changes if str(c) in helping)
            cause = _with_change_of(cause, next(found, None))
        made.append((live, cause))
    return tuple(made)


def _helps(effect: Effect | None) -> bool:
    """Whether a change lowers what is sent or the peak, and hardly raises the other."""
    if effect is None:
        return False
    pairs = (effect.sent, effect.peak)
    lowers = any(after < before for before, after in pairs)
    return lowers and all(after <= MORE * before for before, after in pairs)


def _with_change_of(cause: Cause, other: Cause | None) -> Cause:
    if other is None:
        return dataclasses.replace(
            cause, change='', all_changes=(), confirmed=None, effect=None, avoidable=False
        )
    return dataclasses.replace(
        cause,
        change=other.change,
        all_changes=other.all_changes[:1],
        confirmed=other.confirmed,
        effect=other.effect,
    )
