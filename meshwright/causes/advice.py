"""Which changes may help: other rules, other constraints, other layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from meshwright.causes.argument_layouts import RARELY_SHARDED, ArgumentAdvisor
from meshwright.causes.changes import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    LayoutChange,
    RuleChange,
)
from meshwright.causes.evidence import Evidence
from meshwright.causes.known_layouts import Axes, KnownLayouts
from meshwright.causes.value_graph import ValueGraph, lacks
from meshwright.jaxpr.linked_dimensions import LinkedDimensions
from meshwright.jaxpr.values import Value
from meshwright.user_lines import user_line
from partitioning.rules import sharding_axes


class Advisor(ArgumentAdvisor):
    """Knows the rules, the layouts and the constraints of a function.

    Args:
      layouts: the rules and the layouts of the arguments.
      graph: the values of the function and their uses.
      links: which dimensions of arguments belong together.
    """

    def __init__(self, layouts: KnownLayouts, graph: ValueGraph, links: LinkedDimensions):
        super().__init__(layouts, links)
        self.graph = graph

    def saves(self, changes: Sequence[Change]) -> bool:
        """Whether a change does more than to trade memory for exchanges over axes of the batch."""
        batch = set(self.layouts.batch_axes)
        return any(
            isinstance(change, ConstraintChange | ConstraintRemoval)
            or self._is_of_rows(change)
            or not self._added_axes(change) <= batch
            for change in changes
        )

    def trades(self, change: Change) -> bool:
        """Whether a change does no more than to shard parameters over axes of the batch."""
        added = self._added_axes(change)
        fully_sharded = bool(added) and added <= set(self.layouts.batch_axes)
        return fully_sharded and not self._is_of_rows(change)

    def _added_axes(self, change: Change) -> set[str]:
        """The mesh axes over which a change shards what is not sharded over them."""
        layouts = self.layouts
        added: set[str] = set()
        if isinstance(change, RuleChange):
            for name, axes in change.after:
                added |= {*sharding_axes(axes)} - {*layouts.axes_of(name)}
        elif isinstance(change, LayoutChange) and change.path in layouts.rows:
            row = layouts.rows[change.path]
            used = {a for d in row.dimensions for a in sharding_axes(d.mesh_axes)}
            added |= {a for axes in change.layout for a in axes} - used
        return added

    def _is_of_rows(self, change: Change) -> bool:
        """Whether a change is of the rows of the batch, or of a result of the function."""
        if isinstance(change, RuleChange):
            return any(name == 'batch' for name, _ in change.after)
        if isinstance(change, LayoutChange):
            row = self.layouts.rows.get(change.path)
            return row is None or row.role == 'other'
        return False

    def odd_rules(self, *values: Value | None) -> list[RuleChange]:
        """Changes of the rules of the names around some values that are not as usual."""
        names: dict[str, None] = {'batch': None}
        for value in values:
            if value is not None:
                dims = (*value.dims, *value.contracted)
                names.update(dict.fromkeys(d.name for d in dims if d is not None and d.name))
        odd = [name for name in names if self.layouts.is_unusual(name)]
        # A name with the wrong axes comes before one without any.
        odd.sort(key=lambda name: not self.layouts.axes_of(name))
        changes = [self.layouts.to_standard(name) for name in odd]
        # What the standard rules leave whole is on axes of the batch in fully sharded training.
        changes += [
            self.layouts.change({name: self.layouts.batch_axes})
            for name in odd
            if not self.layouts.standard[name] and name not in RARELY_SHARDED
        ]
        return list(dict.fromkeys(changes))

    def shard_value(self, value: Value, layout: Sequence[Axes]) -> Iterator[Change]:
        """Changes that shard an activation over mesh axes that its layout does not use."""
        layouts = self.layouts
        wanted = layouts.wanted(value.dims, value.shape)
        unused = layouts.unused_axes(layout)
        if {a for axes in wanted for a in axes} & {*unused}:
            yield from self.lay_out(value, layout)
        for axis in unused:
            for name, size in zip(value.names, value.shape, strict=True):
                usual = name is not None and axis in layouts.standard.get(name, ())
                fits = size % layouts.sizes[axis] == 0
                if usual and fits and name and axis not in layouts.axes_of(name):
                    yield layouts.to_standard(name)

    def other_rules(self, name: str) -> list[Change]:
        """Other mesh axes for a name: those of the standard rules, fewer, or none."""
        layouts = self.layouts
        usual = [layouts.to_standard(name)] if layouts.is_unusual(name) else []
        return [*usual, *layouts.fewer_axes(name)]

    def lay_out(self, value: Value, layout: Sequence[Axes]) -> Iterator[ConstraintChange]:
        """Constraints by its names for a value, or for the nearest value around it with names."""
        for near in self._around(value):
            wanted = self.layouts.wanted(near.dims, near.shape)
            held = {near.layout, *(u.layout for u in self.graph.users(near))}
            if any(wanted) and wanted not in held:
                if near is value and wanted == tuple(layout):
                    continue
                yield constraint_of(near, wanted)

    def relax(self, evidence: Evidence) -> list[Change]:
        """Constraints on what is computed from the result of an exchange, by its names."""
        found: list[Change] = []
        for user in evidence.taken_by:
            conflicting = [
                c
                for c in self.graph.constraints_after(user)
                if c.layout != (wanted := self.layouts.wanted(c.dims, c.shape)) and any(wanted)
            ]
            found += self.replace_constraints(conflicting, user)
            if not user.backward and not user.local and not conflicting:
                wanted = self.layouts.wanted(user.dims, user.shape)
                if any(wanted) and len(user.shape) > 1:
                    found.append(constraint_of(user, wanted))
        return found

    def keep_layout(self, evidence: Evidence) -> Iterator[ConstraintChange]:
        """Constraints that keep the layout of an argument in what is computed from it.

        Axes of the batch that shard a dimension of the argument are then taken from the rows, which
        move afterwards. That is less than the argument for the rows of a table.
        """
        path = evidence.value.argument if evidence.value else ''
        for user in evidence.taken_by:
            layout = tuple(
                d.axes if d is not None and d.argument == path else () for d in user.dims
            )
            wanted = self.layouts.wanted(user.dims, user.shape)
            if any(layout) and layout != wanted and not user.backward and not user.local:
                nameless = dataclasses.replace(user, dims=(None,) * len(user.shape))
                yield constraint_of(nameless, layout)

    def replace_constraints(
        self, constraints: Sequence[Value], value: Value, kept: tuple[Axes, ...] = ()
    ) -> list[ConstraintChange]:
        """Constraints by the names of the arrays, in place of constraints that say otherwise.

        Args:
          constraints: the constraints.
          value: the value that has names where a constraint has none.
          kept: the layout that the value has before the exchange, which a constraint may keep.
        """
        found = []
        for constraint in constraints:
            dims = constraint.dims if any(constraint.dims) else value.dims
            wanted = self.layouts.wanted(dims, constraint.shape)
            found.append(constraint_of(constraint, wanted, replaces=True))
            other = kept not in (wanted, constraint.layout)
            if any(kept) and other and constraint.shape == value.shape:
                nameless = dataclasses.replace(constraint, dims=(None,) * len(constraint.shape))
                found.append(constraint_of(nameless, kept, replaces=True))
        return found

    def misplaced_constraints(self, value: Value, axes: Axes) -> list[Value]:
        """The nearest constraint that does not shard a dimension over mesh axes as its name says.

        One that shards nothing over them comes before one that shards another dimension.
        """
        moved = []
        for near, wanted in self._constraints_near(value):
            pairs = zip(wanted, near.layout or (), strict=True)
            if any(set(theirs) & set(axes) - set(mine) for theirs, mine in pairs):
                if lacks(near, axes):
                    return [near]
                moved.append(near)
        return moved[:1]

    def needless_constraints(self, value: Value, axes: Axes) -> list[Value]:
        """The nearest constraint that shards a dimension over mesh axes that its name lacks."""
        for near, wanted in self._constraints_near(value):
            pairs = zip(wanted, near.layout or (), strict=True)
            if any(wanted) and any(set(mine) & set(axes) - set(theirs) for theirs, mine in pairs):
                return [near]
        return []

    def leave_out(self, value: Value, axes: Axes) -> list[ConstraintRemoval]:
        """The program without the nearest constraint that shards a value over mesh axes."""
        for near, _ in self._constraints_near(value):
            if any(set(held) & set(axes) for held in near.layout or ()):
                return [ConstraintRemoval(source=user_line(near.stack))]
        return []

    def _constraints_near(self, value: Value) -> Iterator[tuple[Value, tuple[Axes, ...]]]:
        """The constraints around a value, the near ones first, with the layout by their names."""
        for near in self.graph.near(value):
            if near.layout is not None and near.primitive != 'scan':
                yield near, self.layouts.wanted(near.dims, near.shape)

    def _around(self, value: Value) -> Iterator[Value]:
        """The value, then forward values near it that have names."""
        twin = self.graph.forward_twin(value)
        value = value if twin is None else twin
        named = [value] if value.shape and not value.argument else []
        named += [u for u in self.graph.users(value) if u.shape == value.shape]
        named += [o for o in value.operands if o.shape and not o.argument and o.primitive]
        for near in named:
            if any(near.dims) and not near.backward and len(near.shape) > 1 and not near.local:
                yield near


def constraint_of(
    value: Value, layout: Sequence[Axes], *, replaces: bool = False
) -> ConstraintChange:
    """The change that constrains a value."""
    return ConstraintChange(
        source=user_line(value.stack),
        shape=value.shape,
        names=value.names,
        layout=tuple(layout),
        replaces=replaces,
    )
