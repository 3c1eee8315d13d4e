"""Logical axis names -> PartitionSpec, with a reason for every dimension; and every check.

`axes` describes mesh axes; `names` logical axes and rules; `checks` holds each check of axes, ranks
and sizes once; `resolve` is the one resolution; `policies` treats sizes that are not divisible;
`dimensions` is the result; `standard` has ready-made rules.
"""

from partitioning.rules.axes import (
    MeshAxes,
    MeshLike,
    as_tuple,
    axis_sizes,
    describe_axes,
    from_tuple,
    is_count,
    nearest,
    num_shards,
    sharding_axes,
)
from partitioning.rules.checks import (
    Problem,
    ProblemError,
    Report,
    check_axes,
    check_layout,
    check_rank,
    check_spec,
    indivisible,
    names_rank_problem,
    raise_problem,
    rank_problem,
    sizes_that_fit,
    spec_str,
)
from partitioning.rules.dimensions import (
    PaddedSpec,
    ResolvedDimension,
    Rule,
    Spec,
    boundary_spec,
    dimension_axes,
    to_spec,
)
from partitioning.rules.names import (
    AxisNames,
    AxisRules,
    LogicalAxisRules,
    OnIndivisible,
    OnUnmatched,
    add_axis,
    check_rules,
    remove_axis,
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
    'Spec',
    'add_axis',
    'as_tuple',
    'axis_sizes',
    'boundary_spec',
    'check_axes',
    'check_layout',
    'check_rank',
    'check_rules',
    'check_spec',
    'describe_axes',
    'dimension_axes',
    'from_tuple',
    'fsdp_logical_axis_rules',
    'indivisible',
    'is_count',
    'logical_to_mesh_axes',
    'names_rank_problem',
    'nearest',
    'num_shards',
    'raise_problem',
    'rank_problem',
    'remove_axis',
    'resolve_axes',
    'sharding_axes',
    'sizes_that_fit',
    'spec_str',
    'standard_logical_axis_rules',
    'to_spec',
    'try_resolve',
]
