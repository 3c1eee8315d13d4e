"""Which changes may help: other rules, other constraints, other layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from partitioning.aot.blame.changes import Change, ConstraintChange, LayoutChange, RuleChange
from partitioning.aot.blame.evidence import Evidence
from partitioning.aot.blame.known_layouts import Axes, KnownLayouts
from partitioning.aot.blame.linked_dimensions import LinkedDimensions
from partitioning.aot.blame.user_lines import user_line
from partitioning.aot.blame.value_graph import ValueGraph, lacks
from partitioning.aot.blame.values import Value
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

# Logical axes that are sharded last, because they are small or scanned over.
_RARELY = ('layers', 'kv', 'stack', 'relpos_buckets', 'abspos_buckets', 'length')


class Advisor:
    """Knows the rules, the layouts and the constraints of a function.

    Args:
      layouts: the rules and the layouts of the arguments.
      graph: the values of the function and their uses.
      links: which dimensions of arguments belong together.
    """

    def __init__(self, layouts: KnownLayouts, graph: ValueGraph, links: LinkedDimensions):
        self.layouts, self.graph, self.links = layouts, graph, links

    def saves(self, changes: Sequence[Change]) -> bool:
        """Whether a change does more than to trade memory for exchanges over axes of the batch."""
        batch = set(self.layouts.batch_axes)
        for change in changes:
            if isinstance(change, RuleChange):
                axes = {a for _, new in change.after for a in sharding_axes(new)}
                named = {name for name, _ in change.after}
                if not axes <= batch or 'batch' in named:
                    return True
            elif isinstance(change, ConstraintChange):
                return True
            elif isinstance(change, LayoutChange):
                row = self.layouts.rows.get(change.path)
                if row is None or not {a for one in change.layout for a in one} <= batch:
                    return True
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
            if not self.layouts.standard[name] and name not in _RARELY
        ]
        return list(dict.fromkeys(changes))

    def odd_layouts(self, *values: Value | None) -> list[LayoutChange]:
        """Changes of arguments around some values whose layout does not fit their uses.

        These are batches whose rows the constraints shard over other mesh axes, and parameters some
        of whose logical axes have changed places.
        """
        paths: dict[str, None] = {}
        for value in values:
            if value is not None:
                dims = (*value.dims, *value.contracted)
                paths.update(dict.fromkeys((value.argument, value.gradient_of, value.update_of)))
                paths.update(dict.fromkeys(d.argument for d in dims if d is not None))
        rows = [self.layouts.rows[path] for path in paths if path in self.layouts.rows]
        found: list[LayoutChange] = []
        for row in rows:
            if row.role == 'other' and not any(row.logical_axes):
                wanted = self.links.axes_of(row.path, len(row.shape))[:1]
                now = tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
                if wanted and wanted[0] and now[0] != wanted[0]:
                    found.append(LayoutChange(path=row.path, layout=(*wanted, *now[1:])))
            elif row.role == 'parameters':
                found += self._with_names_in_place(row)
        return found

    def _with_names_in_place(self, row: PlanRow) -> Iterator[LayoutChange]:
        """The change of a parameter whose names stand at the dimensions of other names."""
        names = [n if isinstance(n, str) else None for n in row.logical_axes]
        others = self.links.names_of(row.path, len(row.shape))
        for number, (mine, theirs) in enumerate(zip(names, others, strict=True)):
            if mine and theirs and mine != theirs and theirs in names:
                names[names.index(theirs)], names[number] = mine, theirs
                resolved = self.layouts.resolve(names, row.shape)
                layout = tuple(sharding_axes(d.mesh_axes) for d in resolved)
                yield LayoutChange(path=row.path, layout=layout, names=tuple(names))
                return

    def unused_by(self, row: PlanRow | None) -> Axes:
        """The mesh axes over which an argument is not sharded."""
        if row is None:
            return ()
        return self.layouts.unused_axes([sharding_axes(d.mesh_axes) for d in row.dimensions])

    def whole_name(self, path: str, axes: Sequence[str]) -> str | None:
        """The logical axis of an argument that would be the one to shard over mesh axes."""
        changes = list(self.shard_more(path, only=axes))
        return next((c.after[0][0] for c in changes if isinstance(c, RuleChange)), None)

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
        unused = [a for a in self.unused_by(row) if not only or a in only]
        unused = [a for a in unused if not (a in but and a in self.layouts.batch_axes)]
        for axis in sorted(unused, key=self.layouts.batch_axes.__contains__):
            yield from self._shard_over(row, axis)

    def _shard_over(self, row: PlanRow, axis: str) -> Iterator[Change]:
        layouts = self.layouts
        names = row.logical_axes
        free = [
            (name, size)
            for name, size, d in zip(names, row.shape, row.dimensions, strict=True)
            if not sharding_axes(d.mesh_axes) and size % layouts.sizes[axis] == 0
        ]
        if _is_nameless(row):
            yield from self._shard_nameless(row, axis)
            return
        usual = [n for n, _ in free if n and axis in layouts.standard.get(n, ())]
        if axis in layouts.batch_axes and any(n == 'embed' for n, _ in free):
            usual.append('embed')
        # A name that the standard rules put on this axis may be on another one.
        wrong = [n for n in names if n and n not in usual and axis in layouts.standard.get(n, ())]
        for name in usual:
            yield layouts.change({name: (axis,)})
        for name in wrong:
            yield layouts.to_standard(name)
        rest = [n for n, _ in free if n and n not in usual and n not in _RARELY]
        for name in rest:
            if not layouts.axes_of(name):
                yield layouts.change({name: (axis,)})

    def _shard_nameless(self, row: PlanRow, axis: str) -> Iterator[Change]:
        """Layouts for an array without names: as its uses are laid out, or by its dimensions."""
        layouts = self.layouts
        now = tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
        used = [change.layout for change in self.like_its_uses(row)]
        yield from (LayoutChange(path=row.path, layout=u) for u in used if axis in sum(u, ()))
        # The first dimension of three or more is that of layers, which are scanned over.
        order = range(len(row.shape) - 1, 0 if len(row.shape) > 2 else -1, -1)
        for base in dict.fromkeys([*used, now]):
            for number in sorted(order, key=lambda d: -row.shape[d]):
                fits = layouts.divides((axis,), row.shape[number])
                if fits and not base[number] and axis not in sum(base, ()):
                    new = tuple((axis,) if d == number else axes for d, axes in enumerate(base))
                    yield LayoutChange(path=row.path, layout=new)

    def like_its_uses(self, row: PlanRow) -> Iterator[LayoutChange]:
        """The layout of an argument that fits the constraints on what is computed from it."""
        now = tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
        found = self.links.axes_of(row.path, len(row.shape))
        merged = list(found)
        taken = {a for axes in found for a in axes}
        if _is_nameless(row):
            names = self.links.names_of(row.path, len(row.shape))
            resolved = self.layouts.resolve(names, row.shape)
            for number, dimension in enumerate(resolved):
                axes = sharding_axes(dimension.mesh_axes)
                if axes and not merged[number] and not taken & set(axes):
                    merged[number] = axes
                    taken |= set(axes)
        for axes in now:
            # Axes of the batch shard another dimension, if theirs is taken.
            if axes and set(axes) <= set(self.layouts.batch_axes) and not taken & set(axes):
                place = next(
                    (
                        d
                        for d in (now.index(axes), *range(len(now) - 1, -1, -1))
                        if not merged[d] and self.layouts.divides(axes, row.shape[d])
                    ),
                    None,
                )
                if place is not None:
                    merged[place] = axes
                    taken |= set(axes)
        if all(set(f) <= set(n) for f, n in zip(merged, now, strict=True)):
            return
        for layout in (tuple(merged), found):
            fits = all(self.layouts.divides(a, n) for a, n in zip(layout, row.shape, strict=True))
            if any(layout) and fits and layout != now:
                yield LayoutChange(path=row.path, layout=layout)

    def other_layouts(self, path: str) -> list[Change]:
        """Other layouts of an argument without names, one of whose dimensions is gathered."""
        row = self.layouts.rows.get(path)
        if row is None or not _is_nameless(row):
            return []
        found = list(self.like_its_uses(row))
        now = tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
        axes = next((a for a in now if a), ())
        order = range(len(row.shape) - 1, 0 if len(row.shape) > 2 else -1, -1)
        for number in order:
            if axes and not now[number] and self.layouts.divides(axes, row.shape[number]):
                new = tuple(axes if d == number else () for d in range(len(now)))
                found.append(LayoutChange(path=path, layout=new))
        return found

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

    def like_parameter(self, path: str) -> list[Change]:
        """The change that lays out an array as its names say, if it is laid out differently."""
        row = self.layouts.rows.get(path)
        if row is None:
            return []
        return list(self.shard_more(path))

    def other_rules(self, name: str) -> list[Change]:
        """Other mesh axes for a name: those of the standard rules, or none."""
        layouts = self.layouts
        found: list[Change] = []
        if layouts.is_unusual(name):
            found.append(layouts.to_standard(name))
        if layouts.axes_of(name):
            found.append(layouts.change({name: ()}))
        return found

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
        for near in self.graph.near(value):
            if near.layout is None or near.primitive == 'scan':
                continue
            wanted = self.layouts.wanted(near.dims, near.shape)
            pairs = zip(wanted, near.layout, strict=True)
            if any(set(theirs) & set(axes) - set(mine) for theirs, mine in pairs):
                if lacks(near, axes):
                    return [near]
                moved.append(near)
        return moved[:1]

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


def _is_nameless(row: PlanRow) -> bool:
    """Whether an array has no logical axes, apart from that of the layers it is stacked over."""
    return not any(isinstance(n, str) and n not in _RARELY for n in row.logical_axes)


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
