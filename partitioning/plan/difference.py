"""What changes from one plan to another."""

from __future__ import annotations

import dataclasses
from typing import Any

from partitioning.plan.resolved import ResolvedPlan
from partitioning.plan.rows import PlannedArray
from partitioning.plan.tables import shape_str
from partitioning.rules import describe_axes, spec_str


@dataclasses.dataclass(frozen=True)
class Change:
    """An array that two plans lay out differently.

    Attributes:
      path: its path.
      before, after: its rows.
    """

    path: str
    before: PlannedArray
    after: PlannedArray

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of what differs."""
        names = (field.name for field in dataclasses.fields(PlannedArray))
        compared = (name for name in names if name not in ('logical_axes', 'reason'))
        return tuple(n for n in compared if getattr(self.before, n) != getattr(self.after, n))

    def __str__(self) -> str:
        whats = [
            f'{name.replace("_", " ")} {_text(self.before, name)} -> {_text(self.after, name)}'
            for name in self.fields
        ]
        return f'{self.path}: {"; ".join(whats)}'


@dataclasses.dataclass(frozen=True)
class PlanDiff:
    """The difference of two plans; false where there is none. Printed, it is for a reviewer.

    Attributes:
      before, after: the plans.
      added, removed: arrays that only one of them has.
      changed: arrays of both whose rows differ.
    """

    before: ResolvedPlan
    after: ResolvedPlan
    added: tuple[PlannedArray, ...]
    removed: tuple[PlannedArray, ...]
    changed: tuple[Change, ...]

    @property
    def bytes_per_device(self) -> int:
        """How many more bytes a device holds after than before."""
        return self.after.bytes_per_device - self.before.bytes_per_device

    def __bool__(self) -> bool:
        meshes = list(self.before.mesh.items()), list(self.after.mesh.items())
        return bool(self.added or self.removed or self.changed or meshes[0] != meshes[1])

    def __str__(self) -> str:
        if not self:
            return 'the plans are the same'
        meshes = describe_axes(self.before.mesh), describe_axes(self.after.mesh)
        lines = [f'mesh: {meshes[0]} -> {meshes[1]}'] if meshes[0] != meshes[1] else []
        lines += [f'- {_line(row)}' for row in self.removed]
        lines += [f'+ {_line(row)}' for row in self.added]
        lines += [f'~ {change}' for change in self.changed]
        lines.append(
            f'bytes per device: {self.before.bytes_per_device:,} -> '
            f'{self.after.bytes_per_device:,} ({self.bytes_per_device:+,})'
        )
        return '\n'.join(lines)


def diff(before: ResolvedPlan, after: ResolvedPlan) -> PlanDiff:
    """What changes from one plan to another: layouts and figures, not names and reasons.

    Raises:
      TypeError: no ResolvedPlans.
    """
    for plan in before, after:
        if not isinstance(plan, ResolvedPlan):
            raise TypeError(f'a {type(plan).__name__} is no ResolvedPlan: give plan.resolve(...)')
    old = {row.path: row for row in before.arrays}
    new = {row.path: row for row in after.arrays}
    return PlanDiff(
        before,
        after,
        added=tuple(row for path, row in new.items() if path not in old),
        removed=tuple(row for path, row in old.items() if path not in new),
        changed=tuple(
            Change(path, row, new[path])
            for path, row in old.items()
            if path in new and Change(path, row, new[path]).fields
        ),
    )


def _line(row: PlannedArray) -> str:
    return (
        f'{row.path}: {shape_str(row.shape)} {row.dtype}, {spec_str(row.spec)}, '
        f'{row.bytes_per_device:,} bytes per device'
    )


def _text(row: PlannedArray, name: str) -> str:
    value: Any = getattr(row, name)
    if value is None:
        return 'none'
    if name in ('spec', 'padded_spec'):
        return spec_str(value)
    if name in ('shape', 'shard_shape'):
        return shape_str(value)
    return f'{value:,}' if isinstance(value, int) else str(value)
