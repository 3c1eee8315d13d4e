"""The changes of buffers: only those that are known to lower what a function sends or holds.

A change that shards an activation, or lays out an argument in another way, often doubles what is
sent. The formulas and the compiler have tried the changes of exchanges; a buffer has one of these,
or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.advice.measuring import MORE
from meshwright.causes.cause import Cause, Effect
from meshwright.program.collectives import Collective
from meshwright.program.peak_memory import LiveArray


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
