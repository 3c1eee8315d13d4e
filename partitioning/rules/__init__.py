"""Logical axis names -> PartitionSpec, with the reason for every dimension.

`names`: what names, rules and mesh axes are; `resolve`: the one resolution; `standard`: rule sets.
"""

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
    nearest,
    remove_axis,
)
from partitioning.rules.resolve import (
    PaddedSpec,
    Problem,
    ResolvedDimension,
    logical_to_mesh_axes,
    replicate_none,
    resolve_axes,
    spec_of,
    to_spec,
    try_resolve,
)
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
    'ResolvedDimension',
    'add_axis',
    'as_tuple',
    'axis_sizes',
    'check_rules',
    'describe_axes',
    'fsdp_logical_axis_rules',
    'logical_to_mesh_axes',
    'nearest',
    'remove_axis',
    'replicate_none',
    'resolve_axes',
    'spec_of',
    'standard_logical_axis_rules',
    'to_spec',
    'try_resolve',
]
