"""What is known of the changes of a function that were tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshwright.advice.estimates import Estimate, Sent
from meshwright.advice.measuring import Key
from meshwright.advice.rows import MissingRows
from meshwright.advice.surroundings import Candidate
from meshwright.advice.told import Told
from meshwright.advice.variants import Subject
from meshwright.causes.cause import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    Effect,
    JoinedChange,
    LayoutChange,
    SplitChange,
    StateChange,
)
from meshwright.jaxpr.values import Axes


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
      row_axes: the mesh axes that the rows of the batch lack, if it adds them.
      helps: whether the formulas show that it lowers anything.
    """

    candidate: Candidate
    estimate: Estimate
    saved: float
    vanished: dict[Sent, float]
    compiled: Effect | None = None
    gone: frozenset[Key] = frozenset()
    row_axes: Axes = ()
    helps: bool = True

    @property
    def change(self) -> Change:
        """The change."""
        return self.candidate.change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advised:
    """The exchanges of a function with what is known of the changes that were tried.

    Attributes:
      base: the function as it is, by formula.
      variants: the changes that help, the best first.
      subject: the function.
      rows_axes: the mesh axes over which the rows of the batch are sharded, or should be.
      told: what only the author can write in another way.
      sends: the bytes that a device sends in the compiled program.
      missing_rows: what is known of axes that the rows of the batch lack.
      experts: layouts of the arrays of experts that do not help by formula.
      pins: changes that only compiling can judge, the best first, if it sends far more than `base`.
    """

    base: Estimate
    variants: tuple[Variant, ...]
    subject: Subject
    rows_axes: Axes
    told: tuple[Told, ...] = ()
    sends: float = 0.0
    missing_rows: MissingRows | None = None
    experts: tuple[Candidate, ...] = ()
    pins: tuple[Candidate, ...] = ()


def places_of(change: Change) -> Iterator[str]:
    """The lines of the constraints that a change concerns, and the paths of the arguments."""
    for part in change.parts if isinstance(change, JoinedChange) else (change,):
        if isinstance(part, ConstraintChange | ConstraintRemoval | SplitChange):
            yield part.source
        elif isinstance(part, LayoutChange):
            yield from (part.path, *part.likewise)
        elif isinstance(part, StateChange):
            yield from (path for path, _ in part.layouts)
