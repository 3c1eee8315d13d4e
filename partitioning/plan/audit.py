"""Says what every device holds of a state, what is replicated and why, and how even it is."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.plan.plan_file import row_to_json
from partitioning.plan.rows import PlanRow, dimension_str, join_reasons, policy_texts
from partitioning.plan.tables import Table, layout_table, rich_tables, text_tables
from partitioning.rules import (
    MeshLike,
    as_tuple,
    axis_sizes,
    boundary_spec,
    check_spec,
    describe_axes,
    num_shards,
    sharding_axes,
    sharding_str,
    spec_str,
)
from partitioning.short_help import ShortHelp
from partitioning.state import array_leaves, path_str, shape_of
from partitioning.state.structures import like
from partitioning.values import value_str

ROLES = ('parameters', 'optimizer', 'other')
_RANKED = 10  # the number of replicated arrays that a table lists


class Cost(NamedTuple):
    """An array that costs a device more than it should, or that is not where the plan puts it.

    One device holds `bytes_per_device` only because of the reason.
    """

    row: PlanRow
    bytes_per_device: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Audit(metaclass=ShortHelp):
    """The layout of a state in numbers.

    Usage:
      audit = plan.audit(budget=16 * 2**30)
      print(audit)  # or rich.print(audit); audit.as_dict() for programs

    Attributes:
      rows: every array as it is laid out, in the order of the plan.
      mesh: the mesh, or the size of each of its axes.
      bytes_by_device: what each device holds, in bytes, by the id of the device. It covers the
        devices of the mesh and all others that hold a part.
      by_role: what the fullest device holds of each role, in bytes.
      misplaced: arrays that are not where the plan puts them.
      bytes_total, bytes_per_device: the size of all global arrays, and what the fullest device
        holds.
      replicated, replicated_bytes_per_device: the arrays with more than an even share on a device,
        the most costly first, and what a device holds above that share, in bytes.
      policies: the arrays that a policy decided, with the bytes that this costs a device.
      balance: the mean of what devices hold, divided by what the fullest holds: 1 is even.
    """

    rows: tuple[PlanRow, ...]
    mesh: MeshLike
    bytes_by_device: Mapping[int, int]
    by_role: Mapping[str, int]
    misplaced: tuple[Cost, ...] = ()

    @property
    def bytes_total(self) -> int:
        """The size of all global arrays, in bytes."""
        return sum(row.bytes_total for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """What the fullest device holds, in bytes."""
        return max(self.bytes_by_device.values(), default=0)

    @functools.cached_property
    def replicated(self) -> tuple[Cost, ...]:
        """The arrays with more than an even share on a device, the most costly first."""
        wrong = {cost.row.path: cost.reason for cost in self.misplaced}
        found = []
        for row in self.rows:
            if extra := _more_than_even(row, self.mesh):
                reason = wrong.get(row.path) or _why_replicated(row, self.mesh)
                found.append(Cost(row, extra, reason))
        return tuple(sorted(found, key=lambda cost: -cost.bytes_per_device))

    @property
    def replicated_bytes_per_device(self) -> int:
        """The bytes that a device holds in addition to an even share of every array."""
        return sum(cost.bytes_per_device for cost in self.replicated)

    @functools.cached_property
    def policies(self) -> tuple[Cost, ...]:
        """The arrays that a policy decided, with the bytes that this costs a device."""
        costs = []
        for row in self.rows:
            if texts := policy_texts(row):
                wanted = [axis for d in row.dimensions for axis in sharding_axes(d.wanted)]
                even = -(-row.bytes_total // num_shards(wanted, self.mesh))
                costs.append(Cost(row, max(row.bytes_per_device - even, 0), '; '.join(texts)))
        return tuple(costs)

    @property
    def balance(self) -> float:
        """The mean of what devices hold, divided by what the fullest holds: 1 is even."""
        held = self.bytes_by_device.values()
        return sum(held) / (len(held) * max(held)) if any(held) else 1.0

    def check_budget(self, budget: float) -> None:
        """Raises ValueError if a device holds more than `budget` bytes, and lists the arrays."""
        check_bytes(budget)
        if self.bytes_per_device <= budget:
            return
        largest = sorted(self.rows, key=lambda row: -row.bytes_per_device)[:3]
        arrays = ', '.join(f'{row.path} {row.bytes_per_device:,}' for row in largest)
        roles = ', '.join(f'{role} {held:,}' for role, held in self.by_role.items())
        replicated = self.replicated_bytes_per_device
        if 2 * replicated < self.bytes_per_device:
            way_out = f'Only {replicated:,} of the bytes are replicated, so use more devices'
        else:
            row, _, reason = self.replicated[0]
            over, _, why = reason.partition(': ')
            where = f'{row.path}, {over} ({why or "misplaced"})'
            way_out = (
                f'{replicated:,} of the bytes are replicated; the largest such array is {where}'
            )
        raise ValueError(
            f'a device would hold {self.bytes_per_device:,} bytes, '
            f'{self.bytes_per_device - budget:,.0f} more than the budget of {float(budget):,.0f}: '
            f'{roles}; the largest arrays are {arrays}. {way_out}'
        )

    def as_dict(self) -> dict[str, Any]:
        """The audit as values that JSON can hold."""
        costs = {cost.row.path: cost for cost in self.replicated}
        rows = []
        for row in self.rows:
            _, extra, reason = costs.get(row.path, Cost(row, 0, ''))
            spec = spec_str(boundary_spec(row.spec))
            costly = {'spec': spec, 'replicated_bytes_per_device': extra, 'reason': reason}
            rows.append(row_to_json(row) | costly)
        return {
            'mesh': dict(axis_sizes(self.mesh)),
            'bytes_total': self.bytes_total,
            'bytes_per_device': self.bytes_per_device,
            'by_role': dict(self.by_role),
            'bytes_by_device': {str(k): held for k, held in self.bytes_by_device.items()},
            'replicated_bytes_per_device': self.replicated_bytes_per_device,
            'balance': self.balance,
            'rows': rows,
        }

    def __str__(self) -> str:
        return f'{layout_table(self.rows, self.mesh)}\n{text_tables(self._tables())}'

    def __rich__(self) -> Any:
        return rich_tables(self._tables())

    def _tables(self) -> list[Table]:
        """The sums, and what is replicated, decided by a policy or misplaced."""
        held = max(sum(self.by_role.values()), 1)
        roles = [(role, f'{n:,}', f'{n / held:.1%}') for role, n in self.by_role.items()]
        ranked = self.replicated[:_RANKED]
        rest = len(self.replicated) - len(ranked)
        tables = [
            Table(
                f'{describe_axes(self.mesh)}: the fullest device holds {self.bytes_per_device:,} '
                f'of {self.bytes_total:,} bytes; balance {self.balance:.1%}',
                ('role', 'bytes per device', 'share'),
                roles,
            ),
            Table(
                f'replicated: {self.replicated_bytes_per_device:,} bytes per device more than an '
                f'even share{f"; {rest} smaller arrays not listed" if rest else ""}',
                ('array', 'more than its share', 'reason'),
                [(c.row.path, f'{c.bytes_per_device:,}', c.reason) for c in ranked],
            ),
            Table(
                'decided by a policy',
                ('array', 'bytes per device', 'policy'),
                [(c.row.path, f'{c.bytes_per_device:,}', c.reason) for c in self.policies],
            ),
            Table(
                'not where the plan puts them',
                ('array', 'reason'),
                [(c.row.path, c.reason) for c in self.misplaced],
            ),
        ]
        return [table for table in tables if table.rows]


def audit_rows(
    rows: Sequence[PlanRow], mesh: MeshLike, state: Any = None, *, budget: float | None = None
) -> Audit:
    """The audit of the rows of a plan; see `Plan.audit`."""
    actual = {} if state is None else _misplaced(rows, mesh, state)
    costs = []
    laid_out = []
    for row in rows:
        if (held := actual.get(row.path)) is not None:
            planned = spec_str(boundary_spec(row.spec))
            why = f'it is laid out as {sharding_str(held)}, but the plan says {planned}'
            row = row._replace(
                spec=getattr(held, 'spec', boundary_spec(row.spec)),
                shard_shape=tuple(held.shard_shape(row.shape)),
            )
            costs.append(Cost(row, _more_than_even(row, mesh), why))
        laid_out.append(row)
    held_by_device = bytes_by_device(laid_out, mesh, actual)
    totals = {device: sum(roles.values()) for device, roles in held_by_device.items()}
    fullest = held_by_device[max(totals, key=lambda device: totals[device])]
    audit = Audit(
        rows=tuple(laid_out),
        mesh=mesh,
        bytes_by_device=totals,
        by_role={role: fullest[role] for role in ROLES},
        misplaced=tuple(costs),
    )
    if budget is not None:
        audit.check_budget(budget)
    return audit


def check_fixed_point(state: Any, shardings: Any) -> None:
    """Checks that the arrays of a state are laid out by these shardings; see `Plan.check`.

    The tree of the shardings may be a prefix of the state. Static fields, such as the optimizer in
    Flax's TrainState, may differ. Trees with other arrays are a ValueError.
    """

    def check(path: Any, expected: Sharding, arrays: Any) -> None:
        for below, array in jax.tree_util.tree_leaves_with_path(arrays):
            where, held = path_str((*path, *below)), getattr(array, 'sharding', None)
            if isinstance(array, PartitionSpec | Sharding):
                shown = spec_str(array) if isinstance(array, PartitionSpec) else str(array)
                raise ValueError(
                    f'{where or "the state"} is the layout {shown}, not an array: '
                    'pass the state, not its specs or shardings'
                )
            if held is None:
                raise ValueError(
                    f'{where} is of type {type(array).__name__}, not an array on devices: '
                    'partitioner.move_params_to_devices puts it there'
                )
            if isinstance(expected, NamedSharding):
                check_spec(expected.spec, expected.mesh, where, array.shape)
            if not held.is_equivalent_to(expected, array.ndim):
                raise ValueError(
                    f'{where} of shape {array.shape} is laid out as {sharding_str(held)}, but the '
                    f'plan says {sharding_str(expected)}: pass plan.specs as out_shardings '
                    'when you partition the function that makes this state'
                )

    adapted = like(shardings, state)
    expected = shardings if adapted is None else adapted
    try:
        jax.tree.map(lambda *_: None, expected, state)
    except ValueError:
        raise ValueError(_other_arrays(expected, state)) from None
    jax.tree_util.tree_map_with_path(check, expected, state)


def _other_arrays(planned: Any, state: Any) -> str:
    """Says which arrays a state lacks, and which it has that its plan lacks."""
    wanted, held = (
        [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (planned, state)
    )
    lack, more = sorted({*wanted} - {*held}), sorted({*held} - {*wanted})
    parts = [f'lacks {len(lack)} of {len(wanted)} arrays, first {lack[0]}'] if lack else []
    parts += [f'has {more[0]}, which the plan lacks'] if more else []
    found = ', and '.join(parts) or 'has another structure'
    return f'the state {found}: pass the state for which the plan was made'


def check_bytes(budget: Any) -> None:
    """Raises ValueError unless a budget is a number of bytes above 0."""
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not number or not 0 < budget < math.inf:
        raise ValueError(f'budget={value_str(budget)} must be a number of bytes above 0')


def _misplaced(rows: Sequence[PlanRow], mesh: MeshLike, state: Any) -> dict[str, Sharding]:
    """The shardings of the arrays that are not where the plan puts them, by path."""
    planned = {row.path: row for row in rows}
    found: dict[str, Sharding] = {}
    if isinstance(state, numbers.Real):
        raise ValueError(f'{state!r} is not a state: for the bytes of a device, budget={state!r}')
    for path, array in array_leaves(state):
        name, shape = '/'.join(path), shape_of(array)
        row = planned.pop(name, None)
        if row is None:
            raise ValueError(f'{name} is not in the plan: audit the state that was planned')
        if row.shape != shape:
            raise ValueError(
                f'{name} has shape {shape}, but {row.shape} in the plan: audit the state that was '
                'planned'
            )
        if isinstance(array, jax.Array) and isinstance(mesh, Mesh):
            expected = NamedSharding(mesh, boundary_spec(row.spec))
            if not array.sharding.is_equivalent_to(expected, len(shape)):
                found[name] = array.sharding
    if planned:
        raise ValueError(
            f'{next(iter(planned))} of the plan is not in the state: pass the whole state'
        )
    return found


def bytes_by_device(
    rows: Sequence[PlanRow], mesh: MeshLike, actual: Mapping[str, Sharding]
) -> dict[int, collections.Counter[str]]:
    """What each device holds of each role, in bytes."""
    even: collections.Counter[str] = collections.Counter()
    for row in rows:
        if row.path not in actual:
            even[row.role] += row.bytes_per_device
    devices = (
        [device.id for device in mesh.devices.flat]
        if isinstance(mesh, Mesh)
        else range(math.prod(axis_sizes(mesh).values()))
    )
    held = {device: collections.Counter(even) for device in devices}
    for row in rows:
        if row.path in actual:
            for device in actual[row.path].device_set:
                of_device = held.setdefault(device.id, collections.Counter())  # type: ignore[attr-defined]
                of_device[row.role] += row.bytes_per_device
    return held


def _more_than_even(row: PlanRow, mesh: MeshLike) -> int:
    """What a device holds beyond its even share; an array of one element cannot be shared."""
    if math.prod(row.shape) <= 1:
        return 0
    devices = math.prod(axis_sizes(mesh).values())
    return max(row.bytes_per_device - -(-row.bytes_total // devices), 0)


def _why_replicated(row: PlanRow, mesh: MeshLike) -> str:
    """Why devices along some mesh axes hold the same part of an array."""
    used = {axis for entry in boundary_spec(row.spec) for axis in sharding_axes(entry)}
    free = [axis for axis, size in axis_sizes(mesh).items() if size > 1 and axis not in used]
    whys = []
    for dim, d in enumerate(row.dimensions):
        if row.shape[dim] > 1 and d.mesh_axes is None:
            whys.append((dimension_str(d.name, dim), d.reason))
        elif row.shape[dim] > 1:
            lost = ((f'rule {r!r}', why) for r, why in d.lost if {*free} & {*as_tuple(r[1])})
            whys.extend(lost)
    return f'over {", ".join(free)}: {join_reasons(whys) or "no dimension is left"}'
