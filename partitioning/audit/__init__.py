"""How a state is laid out, in numbers: `arrays` one by one, `report` in sums, `table` to read.

`fixed_point` checks that it stays so.
"""

from partitioning.audit.arrays import ArrayLayout
from partitioning.audit.fixed_point import check_compiled_once, check_fixed_point
from partitioning.audit.report import Audit, audit_state
from partitioning.audit.table import layout_table

__all__ = [
    'ArrayLayout',
    'Audit',
    'audit_state',
    'check_compiled_once',
    'check_fixed_point',
    'layout_table',
]
