"""What every device holds of a state: by category, what is replicated and why, and how evenly."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import numbers
from collections.abc import Iterable
from typing import Any

from jax.sharding import Mesh

from partitioning.plan.array_layouts import ArrayLayout, array_layouts
from partitioning.plan.rule_set import ResolvedState
from partitioning.plan.tables import audit_text, rich_audit
from partitioning.rules import spec_str

CATEGORIES = ('parameters', 'optimizer', 'other')


@dataclasses.dataclass(frozen=True)
class Audit:
    """The layout of a state, in numbers.

    Usage:
      audit = partitioner.audit(jax.eval_shape(init, key), budget=16 * 2**30)
      print(audit)  # or rich.print(audit); audit.as_dict() for programs

    Attributes:
      arrays: the layout of every array, in the order of the state.
      mesh: the mesh.
      bytes_by_device: what each device holds, by its id, of the devices of the mesh and of any
        others that hold a part.
      by_category: bytes of the parameters, the optimizer's state, and all other arrays on the
        device that holds the most.
    """

    arrays: tuple[ArrayLayout, ...]
    mesh: Mesh
    bytes_by_device: dict[int, int]
    by_category: dict[str, int]

    @property
    def bytes_total(self) -> int:
        """Of the global arrays."""
        return sum(row.bytes_total for row in self.arrays)

    @property
    def bytes_per_device(self) -> int:
        """On the device that holds the most."""
        return max(self.bytes_by_device.values(), default=0)

    @functools.cached_property
    def replicated(self) -> tuple[ArrayLayout, ...]:
        """Arrays of which a device holds more than its share, the most costly first."""
        rows = [row for row in self.arrays if row.replicated_bytes_per_device]
        return tuple(sorted(rows, key=lambda row: -row.replicated_bytes_per_device))

    @property
    def replicated_bytes_per_device(self) -> int:
        """What a device holds beyond its even share of every array."""
        return sum(row.replicated_bytes_per_device for row in self.arrays)

    @property
    def policies(self) -> tuple[ArrayLayout, ...]:
        """Arrays for which a policy had to decide."""
        return tuple(row for row in self.arrays if row.policy)

    @property
    def misplaced(self) -> tuple[ArrayLayout, ...]:
        """Arrays that are not laid out as the rules say."""
        return tuple(row for row in self.arrays if row.misplaced)

    @property
    def balance(self) -> float:
        """The mean over the devices of what they hold, of that of the fullest: 1 is even."""
        held = self.bytes_by_device.values()
        return sum(held) / (len(held) * max(held)) if any(held) else 1.0

    def check_budget(self, budget: float) -> None:
        """Raises ValueError where a device holds more than `budget` bytes, and says of what."""
        check_bytes(budget)
        if self.bytes_per_device <= budget:
            return
        largest = sorted(self.arrays, key=lambda row: -row.bytes_per_device)[:3]
        rows = ', '.join(f'{row.path} {row.bytes_per_device:,}' for row in largest)
        raise ValueError(
            f'a device would hold {self.bytes_per_device:,} bytes, '
            f'{self.bytes_per_device - budget:,.0f} more than the budget of {float(budget):,.0f}: '
            f'{", ".join(f"{name} {held:,}" for name, held in self.by_category.items())}; the '
            f'largest arrays: {rows}. {self._way_out()}'
        )

    def _way_out(self) -> str:
        replicated = self.replicated_bytes_per_device
        if 2 * replicated < self.bytes_per_device:
            return f'Only {replicated:,} of them are replicated: it takes more devices'
        row = self.replicated[0]
        return f'{replicated:,} of them are replicated, {row.path} first, {row.reason}'

    def as_dict(self) -> dict[str, Any]:
        """All of it in what JSON has."""
        rows = [dataclasses.asdict(row) for row in self.arrays]
        for row, array in zip(rows, self.arrays, strict=True):
            row |= {'logical_axes': list(array.logical_axes), 'spec': spec_str(array.spec)}
            row |= {'shape': list(array.shape), 'shard_shape': list(array.shard_shape)}
        return {
            'mesh': dict(self.mesh.shape),
            'bytes_total': self.bytes_total,
            'bytes_per_device': self.bytes_per_device,
            'by_category': self.by_category,
            'bytes_by_device': {str(k): held for k, held in self.bytes_by_device.items()},
            'replicated_bytes_per_device': self.replicated_bytes_per_device,
            'balance': self.balance,
            'arrays': rows,
        }

    def __str__(self) -> str:
        return audit_text(self)

    def __rich__(self) -> Any:
        return rich_audit(self)


def audit_state(state: Any, resolved: ResolvedState, *, budget: float | None = None) -> Audit:
    """The audit of a state.

    Args:
      state: arrays, which say how they are laid out themselves, or ShapeDtypeStructs.
      resolved: the state with the rules applied.
      budget: bytes that one device may hold.

    Raises:
      ValueError: a device holds more than `budget`; `state` is not that of `resolved`.
    """
    layouts = array_layouts(state, resolved)
    even = _bytes(row for row, own in layouts if own is None)
    held = {device.id: even for device in resolved.mesh.devices.flat}
    for row, own in layouts:
        if own is not None:
            for device in own.device_set:
                key = device.id  # type: ignore[attr-defined]
                held[key] = held.get(key, _bytes(())) + _bytes([row])
    totals = {device: sum(categories.values()) for device, categories in held.items()}
    fullest = held[max(totals, key=lambda device: totals[device])]
    audit = Audit(
        arrays=tuple(row for row, _ in layouts),
        mesh=resolved.mesh,
        bytes_by_device=totals,
        by_category={category: fullest[category] for category in CATEGORIES},
    )
    if budget is not None:
        audit.check_budget(budget)
    return audit


def check_bytes(budget: Any) -> None:
    """Raises ValueError for a budget that is no number of bytes above 0."""
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not number or not 0 < budget < math.inf:
        raise ValueError(f'budget={budget!r} must be a number of bytes above 0')


def _bytes(rows: Iterable[ArrayLayout]) -> collections.Counter[str]:
    """Bytes per device of arrays, by category."""
    held: collections.Counter[str] = collections.Counter()
    for row in rows:
        held[row.category] += row.bytes_per_device
    return held
