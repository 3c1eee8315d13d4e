"""The changes that one can write for a function: other rules, constraints and layouts.

They follow from names and uses, not from costs: only compiling with a change shows whether it
helps. For a parameter 'params/down' with the names ('mlp', 'embed') under [('mlp', None), ('embed',
'data')] on axes 'data' and 'model':

    shard_more('params/down')  ->  write ('mlp', 'model') in place of ('mlp', None) in the rules

Without names, the uses of the parameter lead to the same layout: a product sums over its first
dimension and a dimension of the hidden layer, which a constraint shards over 'model':

    shard_more('params/down')  ->  lay out the argument params/down as PartitionSpec('model', None)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from meshwright.causes.cause import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    LayoutChange,
    RuleChange,
)
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import KnownLayouts, axes_of_row, sharding_of_row
from meshwright.causes.value_graph import ValueGraph, lacks
from meshwright.jaxpr.linked_dimensions import LinkedDimensions
from meshwright.jaxpr.values import Axes, Value
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

Layout = tuple[Axes, ...] | None
# Logical axes that are sharded last, because they are small or scanned over.
_RARELY_SHARDED = ('layers', 'kv', 'stack', 'relpos_buckets', 'abspos_buckets', 'length')


class PossibleChanges:
    """The changes that one can write for a function.

    Args:
      layouts: the rules and the layouts of the arguments.
      graph: the values of the function and their uses.
      links: which dimensions of arguments belong together.
    """

    def __init__(self, layouts: KnownLayouts, graph: ValueGraph, links: LinkedDimensions):
        self.layouts, self.graph, self.links = layouts, graph, links

    # Rules

    def standard_rules(self, *values: Value) -> list[RuleChange]:
        """Changes of the unusual rules of the names around some values to the standard ones."""
        dims = [d for value in values for d in (*value.dims, *value.contracted)]
        names = dict.fromkeys(d.name for d in dims if d is not None and d.name)
        unusual = [name for name in names if self.layouts.is_unusual(name)]
        changes = [self.layouts.to_standard(name) for name in unusual]
        # Fully sharded training shards a name over axes of the batch if the standard rules do not
        # shard it.
        changes += [
            self.layouts.change({name: self.layouts.batch_axes})
            for name in unusual
            if not self.layouts.standard[name] and name not in _RARELY_SHARDED
        ]
        return list(dict.fromkeys(changes))

    # Constraints

    def lay_out(self, value: Value, layout: Sequence[Axes]) -> Iterator[ConstraintChange]:
        """Constraints by its names for a value, or for the nearest value around it with names."""
        for near in self._around(value):
            wanted = self.layouts.wanted(near.dims, near.shape)
            held = {near.layout, *(u.layout for u in self.graph.users(near))}
            is_laid_out = wanted in held or (near is value and wanted == tuple(layout))
            if any(wanted) and not is_laid_out:
                yield _constrain(near, wanted)

    def shard_value(self, value: Value, layout: Sequence[Axes]) -> Iterator[ConstraintChange]:
        """Changes that shard an activation over mesh axes that its layout does not use."""
        wanted = self.layouts.wanted(value.dims, value.shape)
        if {a for axes in wanted for a in axes} & {*self.layouts.unused_axes(layout)}:
            yield from self.lay_out(value, layout)

    def relax(self, evidence: Evidence) -> list[Change]:
        """Constraints on what is computed from the result of an exchange, by its names."""
        found: list[Change] = []
        for user in evidence.taken_by:
            conflicting = self.conflicting(self.graph.constraints_after(user))
            found += self.replace_constraints(conflicting, user)
            if not user.backward and not user.manual and not conflicting:
                wanted = self.layouts.wanted(user.dims, user.shape)
                if any(wanted) and len(user.shape) > 1:
                    found.append(_constrain(user, wanted))
        return found

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
            found.append(_constrain(constraint, wanted, replaces=True))
            other = kept not in (wanted, constraint.layout)
            if any(kept) and other and constraint.shape == value.shape:
                nameless = dataclasses.replace(constraint, dims=(None,) * len(constraint.shape))
                found.append(_constrain(nameless, kept, replaces=True))
        return found

    def conflicting(self, constraints: Iterable[Value]) -> list[Value]:
        """The constraints that lay out their arrays in another way than by their names."""
        pairs = ((one, self.layouts.wanted(one.dims, one.shape)) for one in constraints)
        return [one for one, wanted in pairs if any(wanted) and one.layout != wanted]

    def misplaced_constraints(self, value: Value, axes: Axes) -> list[Value]:
        """The nearest constraint that does not shard a dimension over mesh axes as its name says.

        One that shards nothing over them comes before one that shards another dimension.
        """
        near = self._constraints_near(value)
        found = [one for one, wanted in near if _exceeds(wanted, one.layout, axes)]
        return sorted(found, key=lambda one: not lacks(one, axes))[:1]

    def needless_constraints(self, value: Value, axes: Axes) -> list[Value]:
        """The nearest constraint that shards a dimension over mesh axes that its name lacks."""
        near = self._constraints_near(value)
        found = [one for one, wanted in near if any(wanted) and _exceeds(one.layout, wanted, axes)]
        return found[:1]

    def leave_out(self, value: Value, axes: Axes) -> list[ConstraintRemoval]:
        """The program without the nearest constraint that shards a value over mesh axes."""
        for near, _ in self._constraints_near(value):
            if any(set(held) & set(axes) for held in near.layout or ()):
                return [ConstraintRemoval(source=near.line)]
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
            if any(near.dims) and not near.backward and len(near.shape) > 1 and not near.manual:
                yield near

    # Layouts of arguments

    def fitting_layouts(self, *values: Value) -> list[LayoutChange]:
        """Changes of arguments around some values whose layout does not fit their uses.

        These are batches whose rows the constraints shard over other mesh axes, and parameters some
        of whose logical axes have changed places.
        """
        paths: dict[str, None] = {}
        for value in values:
            dims = (*value.dims, *value.contracted)
            paths.update(dict.fromkeys((value.argument, value.gradient_of, value.update_of)))
            paths.update(dict.fromkeys(d.argument for d in dims if d is not None))
        rows = [self.layouts.rows[path] for path in paths if path in self.layouts.rows]
        found: list[LayoutChange] = []
        for row in rows:
            if row.role == 'other' and not any(row.logical_axes):
                wanted = self.links.axes_of(row.path, len(row.shape))
                if wanted and wanted[0] and axes_of_row(row)[0] != wanted[0]:
                    found.append(self._lay_out(row, wanted))
            elif row.role == 'parameters':
                found += self._with_names_in_place(row)
        return found

    def whole_name(self, path: str, axes: Sequence[str]) -> str | None:
        """The logical axis of an argument that would be the one to shard over mesh axes."""
        changes = list(self.shard_more(path, only=axes))
        return next((c.names[0] for c in changes if isinstance(c, RuleChange)), None)

    def shard_more(
        self, path: str, *, but: Sequence[str] = (), only: Sequence[str] = ()
    ) -> Iterator[Change]:
        """Changes that shard an argument over mesh axes that it does not use.

        Axes of the batch come last: sharding a parameter over them trades memory for exchanges.

        Args:
          path: the path of the argument.
          but: axes that are left out if they are axes of the batch.
          only: the axes to use; by default all.
        """
        row = self.layouts.rows.get(path)
        if row is None:
            return
        unused = [a for a in self.layouts.unused_by(row) if not only or a in only]
        unused = [a for a in unused if not (a in but and a in self.layouts.batch_axes)]
        for axis in sorted(unused, key=self.layouts.batch_axes.__contains__):
            shard = self._shard_nameless if _is_nameless(row) else self._shard_named
            yield from shard(row, axis)

    def like_its_uses(self, row: PlanRow) -> Iterator[LayoutChange]:
        """The layout of an argument that fits the constraints on what is computed from it."""
        now = axes_of_row(row)
        found = self.links.axes_of(row.path, len(row.shape))
        merged = list(found)
        taken = {a for axes in found for a in axes}
        if _is_nameless(row):
            names = self.links.names_of(row.path, len(row.shape))
            for number, axes in enumerate(self.layouts.resolve(names, row.shape)):
                if axes and not merged[number] and not taken & set(axes):
                    merged[number] = axes
                    taken |= set(axes)
        for axes in now:
            # Axes of the batch shard another dimension, if theirs is taken.
            if axes and set(axes) <= set(self.layouts.batch_axes) and not taken & set(axes):
                places = (now.index(axes), *range(len(now) - 1, -1, -1))
                free = [d for d in places if not merged[d]]
                place = next((d for d in free if self.layouts.divides(axes, row.shape[d])), None)
                if place is not None:
                    merged[place] = axes
                    taken |= set(axes)
        if all(set(f) <= set(n) for f, n in zip(merged, now, strict=True)):
            return
        for layout in (tuple(merged), found):
            fits = all(self.layouts.divides(a, n) for a, n in zip(layout, row.shape, strict=True))
            if any(layout) and fits and layout != now:
                yield self._lay_out(row, layout)

    def other_layouts(self, path: str) -> list[Change]:
        """Other layouts of an argument without names, one of whose dimensions is gathered."""
        row = self.layouts.rows.get(path)
        if row is None or not _is_nameless(row):
            return []
        found: list[Change] = list(self.like_its_uses(row))
        now = axes_of_row(row)
        for number, mine in enumerate(now):
            for axis in mine if len(mine) > 1 else ():
                fewer = tuple(a for a in mine if a != axis)
                layout = (*now[:number], fewer, *now[number + 1 :])
                found.append(self._lay_out(row, layout))
        axes = next((a for a in now if a), ())
        for number in _unscanned(row):
            if axes and not now[number] and self.layouts.divides(axes, row.shape[number]):
                new = tuple(axes if d == number else () for d in range(len(now)))
                found.append(self._lay_out(row, new))
        return found

    def _shard_named(self, row: PlanRow, axis: str) -> Iterator[RuleChange]:
        """Rules that shard an argument over a mesh axis, the usual ones first."""
        layouts = self.layouts
        free = [
            name
            for name, size, d in zip(row.logical_axes, row.shape, row.dimensions, strict=True)
            if isinstance(name, str)
            if not sharding_axes(d.mesh_axes) and size % layouts.sizes[axis] == 0
        ]
        usual = [n for n in free if axis in layouts.standard.get(n, ())]
        for name in usual:
            yield layouts.change({name: (axis,)})
        for name in free:
            if name not in (*usual, *_RARELY_SHARDED) and not layouts.axes_of(name):
                yield layouts.change({name: (axis,)})

    def _shard_nameless(self, row: PlanRow, axis: str) -> Iterator[LayoutChange]:
        """Layouts for an array without names: as its uses are laid out, or by its dimensions."""
        used = [change.layout for change in self.like_its_uses(row)]
        yield from (self._lay_out(row, u) for u in used if axis in sum(u, ()))
        for base in dict.fromkeys([*used, axes_of_row(row)]):
            for number in sorted(_unscanned(row), key=lambda d: -row.shape[d]):
                fits = self.layouts.divides((axis,), row.shape[number])
                if fits and not base[number] and axis not in sum(base, ()):
                    new = tuple((axis,) if d == number else axes for d, axes in enumerate(base))
                    yield self._lay_out(row, new)

    def _with_names_in_place(self, row: PlanRow) -> Iterator[LayoutChange]:
        """The change of a parameter whose names stand at the dimensions of other names."""
        names = [n if isinstance(n, str) else None for n in row.logical_axes]
        others = self.links.names_of(row.path, len(row.shape))
        for number, (mine, theirs) in enumerate(zip(names, others, strict=True)):
            if mine and theirs and mine != theirs and theirs in names:
                names[names.index(theirs)], names[number] = mine, theirs
                yield self._lay_out(row, self.layouts.resolve(names, row.shape), names)
                return

    def _lay_out(
        self, row: PlanRow, layout: Sequence[Axes], names: Sequence[str | None] = ()
    ) -> LayoutChange:
        """The change of an argument, and of the same argument in other layers."""
        kind = _kind(row)
        first, *others = (r.path for r in self.layouts.rows.values() if _kind(r) == kind)
        return LayoutChange(
            path=first, layout=tuple(layout), names=tuple(names), likewise=tuple(others)
        )

    # What a change adds

    def saves(self, changes: Sequence[Change]) -> bool:
        """Whether a change does more than trade memory for exchanges over axes of the batch."""
        return any(
            isinstance(change, ConstraintChange | ConstraintRemoval)
            or self._is_of_rows(change)
            or not self._added_axes(change) <= set(self.layouts.batch_axes)
            for change in changes
        )

    def trades(self, change: Change) -> bool:
        """Whether a change does no more than shard parameters over axes of the batch."""
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
            used = sharding_of_row(layouts.rows[change.path])
            added |= {a for axes in change.layout for a in axes} - used
        return added

    def _is_of_rows(self, change: Change) -> bool:
        """Whether a change concerns the rows of the batch, or a result of the function."""
        if isinstance(change, RuleChange):
            return 'batch' in change.names
        if isinstance(change, LayoutChange):
            row = self.layouts.rows.get(change.path)
            return row is None or row.role == 'other'
        return False


def _constrain(value: Value, layout: Sequence[Axes], *, replaces: bool = False) -> ConstraintChange:
    return ConstraintChange(
        source=value.line,
        shape=value.shape,
        names=value.names,
        layout=tuple(layout),
        replaces=replaces,
    )


def _exceeds(one: Layout, other: Layout, axes: Axes) -> bool:
    """Whether a layout shards a dimension over some mesh axes over which another does not."""
    pairs = zip(one or (), other or (), strict=True)
    return any(set(mine) & set(axes) - set(theirs) for mine, theirs in pairs)


def _kind(row: PlanRow) -> tuple[object, ...]:
    """What the same parameter, laid out alike, has in common in all layers.

    Their paths differ in numbers. Where they have logical axes, it is enough that the last parts of
    the paths are the same.
    """
    path = re.sub(r'\d+', '', row.path) if _is_nameless(row) else row.path.rpartition('/')[2]
    return row.role, path, row.shape, tuple(row.logical_axes), row.spec


def _is_nameless(row: PlanRow) -> bool:
    """Whether an array has no logical axes, except the axis of the layers it is stacked over."""
    return not any(isinstance(n, str) and n not in _RARELY_SHARDED for n in row.logical_axes)


def _unscanned(row: PlanRow) -> range:
    """The dimensions, the last one first, without the first of three or more: it may be scanned."""
    return range(len(row.shape) - 1, 0 if len(row.shape) > 2 else -1, -1)
