"""How a state is laid out, in numbers: `arrays` one by one, `report` in sums, `table` to read.

`fixed_point` checks that it stays so; `blocks` says which device holds which block of an array, and
`pictures` draws both.
"""

from partitioning.audit.arrays import ArrayLayout
from partitioning.audit.blocks import ShardingPicture, visualize_sharding
from partitioning.audit.fixed_point import check_compiled_once, check_fixed_point
from partitioning.audit.pictures import draw_audit
from partitioning.audit.report import Audit, audit_state
from partitioning.audit.table import layout_table

__all__ = [
    'ArrayLayout',
    'Audit',
    'ShardingPicture',
    'audit_state',
    'check_compiled_once',
    'check_fixed_point',
    'draw_audit',
    'layout_table',
    'visualize_sharding',
]
