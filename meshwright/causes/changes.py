"""Changes of one line that can remove an exchange of data or make a buffer smaller."""

from __future__ import annotations

import dataclasses

from partitioning.rules import MeshAxes, from_tuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleChange:
    """Other mesh axes for logical axes.

    Attributes:
      before: the rules that are replaced; a name that has none has no entry.
      after: the rules in their place.
    """

    before: tuple[tuple[str, MeshAxes], ...]
    after: tuple[tuple[str, MeshAxes], ...]

    def __str__(self) -> str:
        new = ' and '.join(repr(rule) for rule in self.after)
        if not self.before:
            return f'add {new} to the rules'
        old = ' and '.join(repr(rule) for rule in self.before)
        return f'write {new} in place of {old} in the rules'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstraintChange:
    """A constraint on the value that a line makes, new or in place of one that is there.

    Attributes:
      source: the 'file:line' that makes the value, or of the constraint that is replaced.
      shape: the global shape of the value.
      names: its logical axes.
      layout: the mesh axes of each dimension.
      replaces: whether a constraint is there already.
    """

    source: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    layout: tuple[tuple[str, ...], ...]
    replaces: bool

    def __str__(self) -> str:
        if any(self.names):
            written = f'constrain(x, {self.names!r})'
        else:
            axes = ', '.join(repr(from_tuple(a)) for a in self.layout)
            written = f'with_sharding_constraint(x, PartitionSpec({axes}))'
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
      names: the logical axes that have this layout, if those of the argument should be changed.
      likewise: the paths of the arguments that change with it, such as those of other layers.
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


SingleChange = RuleChange | ConstraintChange | ConstraintRemoval | LayoutChange | CodeChange


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedChange:
    """Changes of different kinds or places, which are made together.

    Attributes:
      parts: the changes, those of rules first.
    """

    parts: tuple[SingleChange, ...]

    def __str__(self) -> str:
        return '; and '.join(str(part) for part in self.parts)


Change = SingleChange | JoinedChange


def join_changes(one: Change, other: Change) -> Change:
    """Both changes as one: those of rules in a single line, and before those of other kinds.

    Raises:
      ValueError: if both change the same rule, line or layout.
    """
    rules, others = list[RuleChange](), list[SingleChange]()
    places = []
    for change in (one, other):
        for part in change.parts if isinstance(change, JoinedChange) else (change,):
            if isinstance(part, RuleChange):
                rules.append(part)
                places += [name for name, _ in part.after]
            else:
                others.append(part)
                places.append(part.path if isinstance(part, LayoutChange) else part.source)
    if len(set(places)) < len(places):
        raise ValueError(f'"{one}" and "{other}" change the same')
    if rules:
        before = tuple(pair for rule in rules for pair in rule.before)
        after = tuple(pair for rule in rules for pair in rule.after)
        others = [RuleChange(before=before, after=after), *others]
    return others[0] if len(others) == 1 else JoinedChange(parts=tuple(others))
