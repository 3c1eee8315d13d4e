"""What each device holds of the arguments and results of a call, and what is replicated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.calls.held import ROLES, HeldArray, free_axes
from meshwright.report.page.html_tables import plain_table
from meshwright.report.page.markup import Html, tag
from partitioning.amounts import bytes_str, share_str
from partitioning.plan.audit import audit_rows
from partitioning.plan.tables import Table, shape_str, spec_or_padded_str, text_tables
from partitioning.rules import MeshLike, axis_sizes, describe_axes

_RANKED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedArray:
    """An array of the arguments or results.

    Attributes:
      path: its path, which begins with the name of the argument, or with 'result'.
      role: 'parameters', 'optimizer', 'batch', 'other' or 'result'.
      shape, dtype: its type.
      spec: its layout as code: "P('data', None)".
      bytes_total: the size of the whole array in bytes.
      bytes_per_device: what a device holds of it, in bytes.
      replicated_over: the mesh axes along which all devices hold the same.
      reason: why it is replicated along them; '' if it is not.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes_total: int
    bytes_per_device: int
    replicated_over: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CallAudit:
    """The layouts of the arguments and results of a call.

    Attributes:
      function: the name of the function.
      machine: the machine: 'v5p:4x4x4'.
      mesh: the size of each mesh axis.
      arguments: the arrays of the arguments, in their order.
      results: the arrays of the results, in their order; those whose layout is not known, because
        nothing was compiled, are left out.
    """

    function: str
    machine: str
    mesh: Mapping[str, int]
    arguments: tuple[AuditedArray, ...]
    results: tuple[AuditedArray, ...]

    @property
    def rows(self) -> tuple[AuditedArray, ...]:
        """The arrays of the arguments and of the results."""
        return (*self.arguments, *self.results)

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """What a device holds of each role, in bytes; results that reuse arguments count again."""
        held = dict.fromkeys((*ROLES, 'result'), 0)
        for row in self.rows:
            held[row.role] += row.bytes_per_device
        return held

    @property
    def replicated(self) -> tuple[AuditedArray, ...]:
        """The arrays that several devices hold in full or in part, the largest first."""
        found = [row for row in self.rows if row.reason and row.bytes_per_device > 1]
        return tuple(sorted(found, key=lambda row: -row.bytes_per_device))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return text_tables(_tables(self))

    def _repr_html_(self) -> str:
        return audit_tables(self)


def audit_arrays(
    function: str,
    machine: str,
    mesh: MeshLike,
    arguments: Sequence[HeldArray],
    results: Sequence[HeldArray],
) -> CallAudit:
    """The audit of the arrays of a call."""
    return CallAudit(
        function=function,
        machine=machine,
        mesh=dict(axis_sizes(mesh)),
        arguments=_audited(arguments, mesh, {}),
        results=_audited(results, mesh, {'role': 'result'}),
    )


def _audited(
    held: Sequence[HeldArray], mesh: MeshLike, other: Mapping[str, Any]
) -> tuple[AuditedArray, ...]:
    costs = audit_rows([array.row for array in held], mesh).replicated if held else ()
    why = {cost.row.path: cost.reason.partition(': ')[2] for cost in costs}
    return tuple(
        AuditedArray(
            **{
                'path': array.row.path,
                'role': array.role,
                'shape': tuple(array.row.shape),
                'dtype': array.row.dtype,
                'spec': spec_or_padded_str(array.row.spec),
                'bytes_total': array.row.bytes_total,
                'bytes_per_device': array.nbytes,
                'replicated_over': free_axes(array.row, mesh),
                'reason': why.get(array.row.path, ''),
                **other,
            }
        )
        for array in held
    )


def _title(audit: CallAudit) -> str:
    held = sum(row.bytes_per_device for row in audit.arguments)
    results = sum(row.bytes_per_device for row in audit.results)
    return (
        f'{audit.function} on {audit.machine}, {describe_axes(audit.mesh)}: a device holds '
        f'{bytes_str(held)} of arguments and {bytes_str(results)} of results'
    )


def _tables(audit: CallAudit) -> list[Table]:
    held = audit.bytes_per_device
    total = max(sum(n for role, n in held.items() if role != 'result'), 1)
    roles = [
        (role, f'{n:,}', share_str(n / total) if role != 'result' else '-')
        for role, n in held.items()
        if n
    ]
    arrays = [
        (r.path, shape_str(r.shape), r.dtype, r.spec, f'{r.bytes_per_device:,}') for r in audit.rows
    ]
    rest = len(audit.replicated) - _RANKED
    more = f'; {rest} smaller ones are not listed' if rest > 0 else ''
    replicated = [
        (r.path, f'{r.bytes_per_device:,}', ', '.join(r.replicated_over), r.reason)
        for r in audit.replicated[:_RANKED]
    ]
    tables = [
        Table(_title(audit), ('role', 'bytes per device', 'share'), roles),
        Table('layouts', ('array', 'shape', 'dtype', 'spec', 'bytes per device'), arrays),
        Table(
            f'replicated{more}',
            ('array', 'bytes per device', 'over', 'reason'),
            replicated,
        ),
    ]
    return [table for table in tables if table.rows]


def audit_tables(audit: CallAudit) -> Html:
    """The audit as tables of a page."""
    drawn = []
    for title, head, rows in _tables(audit):
        drawn += [tag('p', tag('b', title)), plain_table(head, rows)]
    return tag('div', *drawn)
