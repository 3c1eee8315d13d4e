"""Changes of a function: those that its trace can be given, and those that its author has to write.

A `Candidate` is a constraint or a layout. With it, the function is traced again, and a `Variant`
has the figures. What only the author can write in another way, such as a reshape, is `Told` in
words. Some of it can be tried on an edited trace, which sends and computes the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.advice.figures import Estimate, Key, Sent, shape_of
from meshwright.advice.subject import Subject
from meshwright.causes.cause import (
    Cause,
    Change,
    CodeChange,
    Effect,
)
from meshwright.causes.evidence import Evidence
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.values import Axes, is_backward
from meshwright.program.collectives import Collective

REMOVED = 0.95  # the weight of leaving a constraint out: others may want it
SUMS = frozenset(['all-reduce', 'reduce-scatter'])
GATHERS = frozenset(['all-gather'])


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change that is worth an estimate.

    Attributes:
      change: the change.
      keeps_layout: whether all parameters keep their layout.
      weight: how likely it is what the author meant, next to others that save as much.
      of_state: whether it only lays out gradients, updates and moments.
      row_axes: the mesh axes that the rows of the batch lack, if it adds them.
      array: the array that lacks them.
      why: what the devices along these axes do.
      like_most: whether most other parameters of the shape have the layout.
    """

    change: Change
    keeps_layout: bool = True
    weight: float = 1.0
    of_state: bool = False
    row_axes: Axes = ()
    array: str = ''
    why: str = ''
    like_most: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """Which exchanges of the compiled program come from a place in the code.

    Attributes:
      axes: the mesh axes: an exchange has only these.
      partly: whether one of the mesh axes suffices.
      kinds: the kinds; empty for all.
      lines: the lines that make what is exchanged, or use it; empty for all.
      shapes: the sizes above 1 of what is exchanged, sorted; empty for all.
      paths: the arguments that are exchanged; empty for all.
      moves: whether sums of products and of gradients are left out.
      backward: whether it is a part of a backward pass; None for both.
      count: how often it is executed at least.
      also: what else has to hold.
    """

    axes: Axes
    partly: bool = False
    kinds: frozenset[str] = frozenset()
    lines: frozenset[str] = frozenset()
    shapes: frozenset[tuple[int, ...]] = frozenset()
    paths: frozenset[str] = frozenset()
    moves: bool = False
    backward: bool | None = None
    count: int = 1
    also: Callable[[Collective, Evidence | None], bool] | None = None

    def fits(self, collective: Collective, evidence: Evidence | None) -> bool:
        """Whether an exchange comes from the place."""
        axes, lines = {*collective.axes}, {collective.source}
        if evidence is not None:
            lines |= {evidence.made_at, evidence.used_at}
        return (
            (bool(axes & {*self.axes}) if self.partly else axes <= {*self.axes})
            and collective.count >= self.count
            and (not self.kinds or collective.kind in self.kinds)
            and (not self.lines or bool(lines & self.lines))
            and (self.also is None or self.also(collective, evidence))
            and self._fits_value(collective, evidence)
        )

    def _fits_value(self, collective: Collective, evidence: Evidence | None) -> bool:
        value = None if evidence is None else evidence.value
        is_sum = collective.kind in SUMS
        if self.moves and is_sum and (value is None or value.gradient_of or value.contracted):
            return False
        path = '' if evidence is None else evidence.path
        if path and self.backward is not None and is_backward(path) != self.backward:
            return False
        if value is None:
            return bool(self.lines or self.also) and not self.paths
        of_shape = not self.shapes or shape_of(value) in self.shapes
        return of_shape and (not self.paths or value.argument in self.paths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """A place in the code that makes a program exchange data, whatever else is changed.

    Attributes:
      match: the exchanges that come from it.
      line: the user's line; '' if it has none.
      array: the array, in words; '' for the array of the exchange.
      why: why it exchanges data.
      change: what to write.
      trial: makes the function with the change of its trace; None if that cannot be made.
      effect: what the function sends and holds with the change; None if that is not known.
      confirmed: whether compiling with it has shown that it helps; None if that was not tried.
        False is for one that sends less at a price.
      gone: the exchanges of the compiled program that are gone with it.
      is_avoidable: whether a program without the exchange has the same parameters.
      is_held_longer: whether an array is held for longer so that less is sent, which the author
        weighs.
      may_hold: how many times the memory it may need, if it sends much less.
      equal_axes: the mesh axes along which all devices have what is summed.
      is_of_specs: whether specs of a shard_map lack its axes.
      removes: whether the change leaves none of its exchanges, so that their bytes are saved.
    """

    match: Match
    line: str = ''
    array: str = ''
    why: str
    change: CodeChange
    trial: Callable[[], TracedCall | None] | None = None
    effect: Effect | None = None
    confirmed: bool | None = None
    gone: frozenset[Key] = frozenset()
    is_avoidable: bool = True
    is_held_longer: bool = False
    may_hold: float = 1.2
    equal_axes: Axes = ()
    is_of_specs: bool = False
    removes: bool = True

    @property
    def axes(self) -> Axes:
        """The mesh axes of its exchanges."""
        return self.match.axes

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
      helps: whether the formulas show that it lowers anything.
    """

    candidate: Candidate
    estimate: Estimate
    saved: float
    vanished: dict[Sent, float]
    compiled: Effect | None = None
    gone: frozenset[Key] = frozenset()
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
      experts: layouts of the arrays of experts that do not help by formula.
      pins: changes that only compiling can judge, the best first, if it sends far more than `base`.
    """

    base: Estimate
    variants: tuple[Variant, ...]
    subject: Subject
    rows_axes: Axes
    told: tuple[Told, ...] = ()
    sends: float = 0.0
    experts: tuple[Candidate, ...] = ()
    pins: tuple[Candidate, ...] = ()
