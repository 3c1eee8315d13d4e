"""What changes from one plan to another."""

from __future__ import annotations

import dataclasses
from typing import Any

from partitioning.hardware import option_values
from partitioning.plan.plan import Plan
from partitioning.plan.rows import PlanRow
from partitioning.plan.tables import shape_str, spec_or_padded_str
from partitioning.rules import axis_sizes, describe_axes

_COMPARED = ('shape', 'dtype', 'role', 'spec', 'shard_shape', 'bytes_total', 'bytes_per_device')


@dataclasses.dataclass(frozen=True)
class Change:
    """An array that two plans lay out differently."""

    path: str
    before: PlanRow
    after: PlanRow

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the properties that differ; logical axes and reasons are not compared."""
        return tuple(n for n in _COMPARED if getattr(self.before, n) != getattr(self.after, n))

    def __str__(self) -> str:
        changes = [
            f'{name.replace("_", " ")} {_text(self.before, name)} -> {_text(self.after, name)}'
            for name in self.fields
        ]
        return f'{self.path}: {"; ".join(changes)}'


@dataclasses.dataclass(frozen=True)
class PlanDiff:
    """The difference of two plans, as a reviewer reads it; false if there is none.

    `added` and `removed` are rows that only one plan has, and `changed` has the arrays of both
    whose rows differ.
    """

    before: Plan
    after: Plan
    added: tuple[PlanRow, ...]
    removed: tuple[PlanRow, ...]
    changed: tuple[Change, ...]

    @property
    def bytes_per_device(self) -> int:
        """How many more bytes a device holds after than before."""
        return self.after.bytes_per_device - self.before.bytes_per_device

    @property
    def changes_layout(self) -> bool:
        """Whether the meshes or the arrays differ, and not only the options of the compiler."""
        before, after = (list(axis_sizes(p.mesh).items()) for p in (self.before, self.after))
        return bool(self.added or self.removed or self.changed or before != after)

    def __bool__(self) -> bool:
        return self.changes_layout or bool(self._option_changes())

    def __str__(self) -> str:
        if not self:
            return 'the plans are the same'
        before, after = describe_axes(self.before.mesh), describe_axes(self.after.mesh)
        lines = [f'mesh: {before} -> {after}'] if before != after else []
        lines += [f'- {_line(row)}' for row in self.removed]
        lines += [f'+ {_line(row)}' for row in self.added]
        lines += [f'~ {change}' for change in self.changed]
        lines += [f'~ {change}' for change in self._option_changes()]
        lines.append(
            f'bytes per device: {self.before.bytes_per_device:,} -> '
            f'{self.after.bytes_per_device:,} ({self.bytes_per_device:+,})'
        )
        return '\n'.join(lines)

    def _option_changes(self) -> list[str]:
        """The compiler options that differ, with both values."""
        old, new = (option_values(p.compiler_options) for p in (self.before, self.after))
        return [
            f'compiler option {name}: {old.get(name, "not set")} -> {new.get(name, "not set")}'
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        ]


def plan_diff(before: Plan, after: Plan) -> PlanDiff:
    """What changes from one plan to another, except names and reasons.

    Raises:
      TypeError: if an argument is not a Plan.
    """
    for plan in before, after:
        if not isinstance(plan, Plan):
            raise TypeError(
                f'diff compares Plans, not a {type(plan).__name__}: make plans of states with '
                'partitioner.plan(state)'
            )
    old = {row.path: row for row in before.rows}
    new = {row.path: row for row in after.rows}
    return PlanDiff(
        before,
        after,
        added=tuple(row for path, row in new.items() if path not in old),
        removed=tuple(row for path, row in old.items() if path not in new),
        changed=tuple(
            change
            for path, row in old.items()
            if path in new and (change := Change(path, row, new[path])).fields
        ),
    )


def _line(row: PlanRow) -> str:
    return (
        f'{row.path}: {shape_str(row.shape)} {row.dtype}, {spec_or_padded_str(row.spec)}, '
        f'{row.bytes_per_device:,} bytes per device'
    )


def _text(row: PlanRow, name: str) -> str:
    value: Any = getattr(row, name)
    if name == 'spec':
        return spec_or_padded_str(value)
    if name in ('shape', 'shard_shape'):
        return shape_str(value)
    return f'{value:,}' if isinstance(value, int) else str(value)
