"""What only the author can write in another way, such as a reshape: said in words.

Some of it can be tried on the trace of the function, which does not become the new code, but sends
and computes the same.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable

from meshwright.advice.measuring import Key
from meshwright.causes.cause import Cause, CodeChange, Effect
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
