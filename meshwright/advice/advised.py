"""What is known of the changes of a function: those that were tried, and what is told in words.

What only the author can write in another way, such as a reshape, is said in words. Some of it can
be tried on the trace of the function, which does not become the new code, but sends and computes
the same.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator

from meshwright.advice.estimates import Estimate, Sent
from meshwright.advice.measuring import Key
from meshwright.advice.rows import MissingRows
from meshwright.advice.surroundings import Candidate
from meshwright.advice.variants import Subject
from meshwright.causes.cause import (
    Cause,
    Change,
    CodeChange,
    ConstraintChange,
    ConstraintRemoval,
    Effect,
    JoinedChange,
    LayoutChange,
    SplitChange,
    StateChange,
)
from meshwright.causes.evidence import Evidence
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.values import Axes
from meshwright.program.collectives import Collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told(abc.ABC):
    """A place in the code that makes a program exchange data, whatever else is changed.

    Attributes:
      line: the user's line; '' if it has none.
      axes: the mesh axes.
      array: the array, in words; '' for the array of the exchange.
      why: why it exchanges data.
      change: what to write.
      trial: makes the function with the change of its trace; None if that cannot be made.
      effect: what the function sends and holds with the change; None if that is not known.
      confirmed: whether compiling with it has shown that it helps; None if that was not tried.
        False is for one that sends less at a price.
      gone: the exchanges of the compiled program that are gone with it.
    """

    line: str = ''
    axes: Axes = ()
    array: str = ''
    why: str
    change: CodeChange
    trial: Callable[[TracedCall], TracedCall] | None = None
    effect: Effect | None = None
    confirmed: bool | None = None
    gone: frozenset[Key] = frozenset()

    @property
    def is_avoidable(self) -> bool:
        """Whether a program without the exchange has the same parameters."""
        return True

    @property
    def is_held_longer(self) -> bool:
        """Whether an array is held for longer so that less is sent, which the author weighs."""
        return False

    @abc.abstractmethod
    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        """Whether an exchange of the compiled program comes from this place."""

    def explain(self, cause: Cause) -> Cause:
        """The cause of such an exchange, with what to write. A rule belongs to its own array."""
        if self.confirmed is False:
            return dataclasses.replace(
                cause,
                change='',
                all_changes=(),
                avoidable=False,
                traded=str(self.change),
                effect=self.effect,
            )
        return dataclasses.replace(
            cause,
            source=self.line or cause.source,
            array=self.array or cause.array,
            rule='' if self.array else cause.rule,
            why=self.why,
            change=str(self.change),
            all_changes=(self.change,),
            avoidable=self.is_avoidable,
            effect=self.effect,
            confirmed=self.confirmed,
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
