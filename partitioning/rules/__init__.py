"""Logical axis names -> PartitionSpec, with the reason for every dimension.

`names`: what names, rules and mesh axes are; `resolve`: the one resolution; `divide`: sizes that
their mesh axes do not divide; `outcome`: reasons and specs; `standard`: rule sets.
"""

from partitioning.rules.divide import check_layout
from partitioning.rules.names import (
    AxisNames,
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    MeshLike,
    OnIndivisible,
    OnUnmatched,
    add_axis,
    as_tuple,
    axis_sizes,
    check_rules,
    describe_axes,
    is_count,
    nearest,
    remove_axis,
)
from partitioning.rules.outcome import (
    PaddedSpec,
    Problem,
    ProblemError,
    Report,
    ResolvedDimension,
    Rule,
    check_spec,
    names_of,
    raise_problem,
    replicate_none,
    spec_of,
    spec_str,
    to_spec,
)
from partitioning.rules.resolve import logical_to_mesh_axes, resolve_axes, try_resolve
from partitioning.rules.standard import (
    STANDARD_MESH_AXES,
    fsdp_logical_axis_rules,
    standard_logical_axis_rules,
)

__all__ = [
    'STANDARD_MESH_AXES',
    'AxisNames',
    'AxisRules',
    'LogicalAxisRules',
    'MeshAxes',
    'MeshLike',
    'OnIndivisible',
    'OnUnmatched',
    'PaddedSpec',
    'Problem',
    'ProblemError',
    'Report',
    'ResolvedDimension',
    'Rule',
    'add_axis',
    'as_tuple',
    'axis_sizes',
    'check_layout',
    'check_rules',
    'check_spec',
    'describe_axes',
    'fsdp_logical_axis_rules',
    'is_count',
    'logical_to_mesh_axes',
    'names_of',
    'nearest',
    'raise_problem',
    'remove_axis',
    'replicate_none',
    'resolve_axes',
    'spec_of',
    'spec_str',
    'standard_logical_axis_rules',
    'to_spec',
    'try_resolve',
]
