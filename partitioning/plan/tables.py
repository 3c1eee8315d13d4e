"""The audit of a state as text, and as tables of rich where that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from partitioning.plan.array_layouts import ArrayLayout
from partitioning.rules import describe_axes, spec_str

if TYPE_CHECKING:
    from partitioning.plan.audit import Audit

RANKED = 10  # so many replicated arrays are listed
Rows = Sequence[tuple[str, ...]]


def layout_table(layouts: Sequence[ArrayLayout], mesh: Mesh) -> str:
    """The layouts as plain text, one array a line, with the mesh above and the sums below."""
    head = ('array', 'shape', 'dtype', 'logical axes', 'spec', 'shard shape', 'bytes per device')
    rows = [
        (
            row.path,
            shape_str(row.shape),
            row.dtype,
            ', '.join(_name(name) for name in row.logical_axes) or '-',
            spec_str(row.spec),
            shape_str(row.shard_shape),
            f'{row.bytes_per_device:,}',
        )
        for row in layouts
    ]
    total, held = sum(r.bytes_total for r in layouts), sum(r.bytes_per_device for r in layouts)
    return '\n'.join(
        [
            f'mesh: {describe_axes(mesh.shape)} ({mesh.size} devices)',
            '',
            *text_table(head, rows),
            '',
            f'{len(layouts)} arrays, {total:,} bytes; {held:,} bytes per device '
            f'({held / max(total, 1):.1%} of the whole; evenly sharded {1 / mesh.size:.1%})',
            '',
        ]
    )


def audit_text(audit: Audit) -> str:
    """All of an audit as plain text."""
    parts = [layout_table(audit.arrays, audit.mesh)]
    for title, head, rows in _tables(audit):
        parts.append('\n'.join([title, '', *text_table(head, rows), '']))
    return '\n'.join(parts)


def rich_audit(audit: Audit) -> Any:
    """The sums of an audit, and what is replicated, as rich draws them."""
    from rich.console import Group  # rich calls this, so it is there
    from rich.table import Table
    from rich.text import Text

    drawn: list[Any] = []
    for title, head, rows in _tables(audit):
        table = Table(box=None, pad_edge=False, header_style='dim')
        for name in head:
            numbers = name in _NUMBERS
            table.add_column(name, justify='right' if numbers else 'left', overflow='fold')
        for row in rows:
            table.add_row(*row)
        drawn += [Text(title, style='bold'), table, '']
    return Group(*drawn[:-1])


_BYTES, _SHARE = 'bytes per device', 'share'
_NUMBERS = (_BYTES, _SHARE, 'more than its share')


_Table = tuple[str, tuple[str, ...], Rows]


def _tables(audit: Audit) -> list[_Table]:
    """Title, head and rows of each table but that of all arrays; empty ones left out."""
    held = max(sum(audit.by_category.values()), 1)
    categories = [(k, f'{v:,}', f'{v / held:.1%}') for k, v in audit.by_category.items()]
    fullest = (
        f'{describe_axes(audit.mesh.shape)}: the fullest device holds {audit.bytes_per_device:,} '
        f'of {audit.bytes_total:,} bytes; balance {audit.balance:.1%}'
    )
    ranked = audit.replicated[:RANKED]
    replicated = [(r.path, f'{r.replicated_bytes_per_device:,}', r.reason) for r in ranked]
    rest = len(audit.replicated) - len(ranked)
    title = (
        f'replicated: {audit.replicated_bytes_per_device:,} bytes per device more than an even '
        f'share{f"; {rest} smaller arrays not listed" if rest else ""}'
    )
    policies = [(r.path, f'{r.policy_bytes_per_device:,}', r.policy) for r in audit.policies]
    misplaced = [(r.path, r.reason) for r in audit.misplaced]
    tables: list[_Table] = [
        (fullest, ('category', _BYTES, _SHARE), categories),
        (title, ('array', 'more than its share', 'reason'), replicated),
        ('decided by a policy', ('array', _BYTES, 'policy'), policies),
        ('not as the rules say', ('array', 'reason'), misplaced),
    ]
    return [table for table in tables if table[2]]


def text_table(head: tuple[str, ...], rows: Rows) -> list[str]:
    """Columns of equal width, numbers to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        '  '.join(
            cell.rjust(w) if head[i] in _NUMBERS else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, tuple('-' * w for w in widths), *rows]
    ]
    return [line.rstrip() for line in lines]


def _name(name: Any) -> str:
    """Mesh axes in the place of a name are none: the spec says them."""
    return name if isinstance(name, str) else 'None'


def shape_str(shape: Sequence[int]) -> str:
    """A shape as text: `16 x 64`."""
    return ' x '.join(map(str, shape)) or 'scalar'
