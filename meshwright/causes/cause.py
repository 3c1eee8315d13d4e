"""A cause says why an exchange or a buffer exists; a change is what to write instead.

A gradient that is summed over eight devices, because its parameter is not sharded, has this cause:

    Cause(
        source='train.py:41',
        array='the gradient of params/mlp/up',
        logical_axes=('embed', 'mlp'),
        rule="('mlp', None)",
        why="each device along 'data' has the gradient of params/mlp/up for its rows, ...",
        change="write ('mlp', 'model') in place of ('mlp', None) in the rules",
        suspect=True,
        all_changes=(RuleChange(before=(('mlp', None),), after=(('mlp', 'model'),)),))

`confirmed` is None until somebody compiles the program with a change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from meshwright.jaxpr.values import Value
from meshwright.user_lines import CONSTRAINING, array_at
from partitioning.rules import MeshAxes, from_tuple

ASKED = 'the program asks for it with'  # so begins why an exchange exists that somebody has written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """What a change does to a function, per device and call, before and after.

    Attributes:
      sent: the bytes that a device sends.
      peak: the peak of its memory, in bytes.
      seconds: the forecast time, or None if the chip has no model.
    """

    sent: tuple[float, float]
    peak: tuple[int, int]
    seconds: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """Why an exchange of data or a buffer exists.

    Attributes:
      source: the 'file:line' of the user's Python code, or '' if the program does not say.
      array: the array, such as 'params/layers/mlp/up', 'its gradient' or 'an activation'.
      logical_axes: the logical axes of the array, None for dimensions without a name; empty if they
        are not known.
      rule: the rule that decides its layout, as it is written: "('embed', 'fsdp')"; '' if none.
      why: one sentence that says why the exchange or the buffer exists.
      change: what to write instead, in one line; '' if no change is known.
      confirmed: whether compiling with the change showed that it saves more than it costs; None if
        the change was not tried.
      suspect: whether the layout seems not to need it, as with a gathered activation, so that its
        changes are tried first.
      avoidable: whether a change was found, by formula or by compiling, with which a function of
        the same mathematics and the same layout of parameters does not send it.
      needed: whether the mathematics and the layout of the parameters need it, as with the gathers
        of FSDP and the sums of gradients over the batch.
      effect: what the function sends and holds with the change; None if that was not computed.
      all_changes: the changes that may remove it, the most promising first; `change` is the first.
      traded: a change that sends less and holds more, or takes longer, by `effect`; '' if none.
    """

    source: str
    array: str
    logical_axes: tuple[str | None, ...]
    rule: str
    why: str
    change: str = ''
    confirmed: bool | None = None
    suspect: bool = False
    avoidable: bool = False
    needed: bool = False
    effect: Effect | None = None
    all_changes: tuple[Change, ...] = ()
    traded: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleChange:
    """Other mesh axes for logical axes.

    Attributes:
      before: the rules that are replaced; a name without a rule has no entry.
      after: the rules in their place.
    """

    before: tuple[tuple[str, MeshAxes], ...]
    after: tuple[tuple[str, MeshAxes], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The logical axes whose rules change."""
        return tuple(name for name, _ in self.after)

    def __str__(self) -> str:
        new = ' and '.join(repr(rule) for rule in self.after)
        if not self.before:
            return f'add {new} to the rules'
        old = ' and '.join(repr(rule) for rule in self.before)
        return f'write {new} in place of {old} in the rules'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstraintChange:
    """A new constraint on the value that a line makes, or another one in place of a constraint.

    Attributes:
      source: the 'file:line' that makes the value, or of the constraint that is replaced.
      shape: the global shape of the value.
      names: its logical axes.
      layout: the mesh axes of each dimension.
      replaces: whether the line has a constraint already.
      shapes: the shapes of other values of the line that change with it.
    """

    source: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    layout: tuple[tuple[str, ...], ...]
    replaces: bool
    shapes: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        array = array_at(self.source, CONSTRAINING if self.replaces else ())
        if any(self.names):
            written = f'constrain({array}, {self.names!r})'
        else:
            axes = ', '.join(repr(from_tuple(a)) for a in self.layout)
            written = f'with_sharding_constraint({array}, PartitionSpec({axes}))'
        if self.replaces:
            return f'write {written} at {self.source}'
        return f'add {written} for the result of {self.source}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstraintRemoval:
    """A line without its constraints, which then lay out no array.

    Attributes:
      source: the 'file:line' of the constraints.
    """

    source: str

    def __str__(self) -> str:
        return f'leave out the constraint at {self.source}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """Another layout of an argument or a result of the function.

    Attributes:
      path: the path of the argument that is laid out or replaced; '' for other results.
      layout: the mesh axes of each dimension.
      result: the number of the result, or None for an argument.
      names: the logical axes that have this layout, if the argument needs other ones.
      likewise: the paths of the arguments that change with it, such as in other layers.
    """

    path: str
    layout: tuple[tuple[str, ...], ...]
    result: int | None = None
    names: tuple[str | None, ...] = ()
    likewise: tuple[str, ...] = ()

    def __str__(self) -> str:
        axes = ', '.join(repr(from_tuple(a)) for a in self.layout)
        others = [f'{len(self.likewise)} like it'] if self.likewise else []
        if self.names:
            paths = ' and of '.join([self.path, *others])
            return f'name the dimensions of {paths} {self.names!r}: PartitionSpec({axes})'
        if self.result is None:
            paths = ' and '.join([self.path, *others])
            return f'lay out the argument {paths} as PartitionSpec({axes})'
        return f'lay out result {self.result} of the function as PartitionSpec({axes})'


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateChange:
    """Other layouts of several arguments, and of the results that replace them.

    Attributes:
      layouts: the path of each argument, with the mesh axes of each dimension.
      results: the number of each result, with the mesh axes of each dimension.
      text: what to write.
    """

    layouts: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    results: tuple[tuple[int, tuple[tuple[str, ...], ...]], ...]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitChange:
    """Dimensions that are split into the same parts in another order, and merged in that order.

    Attributes:
      source: the 'file:line' of the first reshape.
      splits: for each reshape its shape before, its shape after, and the order in which its parts
        are split. The function sees the shape after all the same, because they are moved there.
      text: what to write.
    """

    source: str
    splits: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeChange:
    """A change of the code in words, which only its author can make.

    Attributes:
      source: the 'file:line'.
      text: what to write.
    """

    source: str
    text: str

    def __str__(self) -> str:
        return self.text


SingleChange = (
    RuleChange
    | ConstraintChange
    | ConstraintRemoval
    | LayoutChange
    | StateChange
    | SplitChange
    | CodeChange
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedChange:
    """Changes of different kinds or places, which are made together.

    Attributes:
      parts: the changes, with the changes of rules first.
      text: what to write, if it is less than what to write for each part.
    """

    parts: tuple[SingleChange, ...]
    text: str = ''

    def __str__(self) -> str:
        return self.text or '; and '.join(str(part) for part in self.parts)


Change = SingleChange | JoinedChange


def join_changes(one: Change, other: Change) -> Change:
    """Returns both changes as one, with all rules in a single line before the other kinds.

    Raises:
      ValueError: if both change the same rule, line or layout.
    """
    rules, others = list[RuleChange](), list[SingleChange]()
    places = list[str]()
    for change in (one, other):
        for part in change.parts if isinstance(change, JoinedChange) else (change,):
            if isinstance(part, RuleChange):
                rules.append(part)
                places += part.names
            else:
                others.append(part)
                places += places_of(part)
    if len(set(places)) < len(places):
        raise ValueError(f'"{one}" and "{other}" change the same')
    if rules:
        before = tuple(pair for rule in rules for pair in rule.before)
        after = tuple(pair for rule in rules for pair in rule.after)
        others = [RuleChange(before=before, after=after), *others]
    return others[0] if len(others) == 1 else JoinedChange(parts=tuple(others))


def places_of(change: Change) -> Iterator[str]:
    """The lines that a change concerns, and the paths of the arguments; rules have none."""
    for part in change.parts if isinstance(change, JoinedChange) else (change,):
        if isinstance(part, LayoutChange):
            yield from (part.path, *part.likewise)
        elif isinstance(part, StateChange):
            yield from (path for path, _ in part.layouts)
        elif not isinstance(part, RuleChange):
            yield part.source


def source_of(cause: Cause | None, source: str) -> str:
    """The 'file:line' of a cause, or of the operation that it is of, if the cause has none."""
    return cause.source if cause is not None and cause.source else source


def what_is(value: Value) -> str:
    """Returns what a value is: 'params/w', 'the gradient of params/w' or 'an activation'."""
    if value.argument:
        return value.argument
    if value.gradient_of:
        return f'the gradient of {value.gradient_of}'
    if value.update_of:
        return f'the update of {value.update_of}'
    return 'an activation' if not value.backward else 'the gradient of an activation'


def over(axes: Sequence[str]) -> str:
    """Returns mesh axes as a message shows them: "'data' and 'model'"."""
    return ' and '.join(repr(axis) for axis in axes) or 'all devices'
