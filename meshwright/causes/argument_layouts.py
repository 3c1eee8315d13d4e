"""Which other layouts of the arguments of a function may help."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from meshwright.causes.changes import Change, LayoutChange, RuleChange
from meshwright.causes.known_layouts import Axes, KnownLayouts
from meshwright.jaxpr.linked_dimensions import LinkedDimensions
from meshwright.jaxpr.values import Value
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

# Logical axes that are sharded last, because they are small or scanned over.
RARELY_SHARDED = ('layers', 'kv', 'stack', 'relpos_buckets', 'abspos_buckets', 'length')


class ArgumentAdvisor:
    """Knows the rules, the layouts of the arguments, and the constraints on what they are for.

    Args:
      layouts: the rules and the layouts of the arguments.
      links: which dimensions of arguments belong together.
    """

    def __init__(self, layouts: KnownLayouts, links: LinkedDimensions):
        self.layouts, self.links = layouts, links

    def _lay_out(
        self, row: PlanRow, layout: Sequence[Axes], names: Sequence[str | None] = ()
    ) -> LayoutChange:
        """The change of an argument, and of those like it in other layers."""
        kind = _kind(row)
        first, *others = (r.path for r in self.layouts.rows.values() if _kind(r) == kind)
        return LayoutChange(
            path=first, layout=tuple(layout), names=tuple(names), likewise=tuple(others)
        )

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
                wanted = self.links.axes_of(row.path, len(row.shape))
                now = tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
                if wanted and wanted[0] and now[0] != wanted[0]:
                    found.append(self._lay_out(row, wanted))
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
                yield self._lay_out(row, layout, names)
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
        rest = [n for n, _ in free if n and n not in usual and n not in RARELY_SHARDED]
        for name in rest:
            if not layouts.axes_of(name):
                yield layouts.change({name: (axis,)})

    def _shard_nameless(self, row: PlanRow, axis: str) -> Iterator[Change]:
        """Layouts for an array without names: as its uses are laid out, or by its dimensions."""
        layouts = self.layouts
        now = tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
        used = [change.layout for change in self.like_its_uses(row)]
        yield from (self._lay_out(row, u) for u in used if axis in sum(u, ()))
        # The first dimension of three or more is that of layers, which are scanned over.
        order = range(len(row.shape) - 1, 0 if len(row.shape) > 2 else -1, -1)
        for base in dict.fromkeys([*used, now]):
            for number in sorted(order, key=lambda d: -row.shape[d]):
                fits = layouts.divides((axis,), row.shape[number])
                if fits and not base[number] and axis not in sum(base, ()):
                    new = tuple((axis,) if d == number else axes for d, axes in enumerate(base))
                    yield self._lay_out(row, new)

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
                yield self._lay_out(row, layout)

    def other_layouts(self, path: str) -> list[Change]:
        """Other layouts of an argument without names, one of whose dimensions is gathered."""
        row = self.layouts.rows.get(path)
        if row is None or not _is_nameless(row):
            return []
        found: list[Change] = list(self.like_its_uses(row))
        now = tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
        for number, mine in enumerate(now):
            for axis in mine if len(mine) > 1 else ():
                fewer = tuple(a for a in mine if a != axis)
                layout = (*now[:number], fewer, *now[number + 1 :])
                found.append(self._lay_out(row, layout))
        axes = next((a for a in now if a), ())
        order = range(len(row.shape) - 1, 0 if len(row.shape) > 2 else -1, -1)
        for number in order:
            if axes and not now[number] and self.layouts.divides(axes, row.shape[number]):
                new = tuple(axes if d == number else () for d in range(len(now)))
                found.append(self._lay_out(row, new))
        return found

    def like_parameter(self, path: str) -> list[Change]:
        """The change that lays out an array as its names say, if it is laid out differently."""
        row = self.layouts.rows.get(path)
        if row is None:
            return []
        return list(self.shard_more(path))


def _kind(row: PlanRow) -> tuple[object, ...]:
    """What the same parameter, laid out alike, has in common in all layers.

    Their paths differ in numbers. Where they have logical axes, it is enough that the last parts of
    the paths are the same.
    """
    path = re.sub(r'\d+', '', row.path) if _is_nameless(row) else row.path.rpartition('/')[2]
    return row.role, path, row.shape, tuple(row.logical_axes), row.spec


def _is_nameless(row: PlanRow) -> bool:
    """Whether an array has no logical axes, apart from that of the layers it is stacked over."""
    return not any(isinstance(n, str) and n not in RARELY_SHARDED for n in row.logical_axes)
