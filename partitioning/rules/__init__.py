"""Resolves logical axis names to PartitionSpecs, with reasons, and checks axes and sizes.

`checks` describes mesh axes and has every check of axes, ranks and sizes. `names` has logical axes
and the dimensions that they resolve to. `axis_rules` has both kinds of rules. `resolve` maps
names to mesh axes, with policies for sizes that are not divisible, and leaves out the Manual axes
of a shard_map. `standard` has ready-made rules.
"""

from partitioning.rules.axis_rules import (
    AxisRules as AxisRules,
    PathNames as PathNames,
    PathRules as PathRules,
    check_path_rules as check_path_rules,
    check_rules as check_rules,
    compiled as compiled,
)
from partitioning.rules.checks import (
    MeshAxes as MeshAxes,
    MeshLike as MeshLike,
    Problem as Problem,
    ProblemError as ProblemError,
    Report as Report,
    as_tuple as as_tuple,
    axis_sizes as axis_sizes,
    check_axes as check_axes,
    check_definite as check_definite,
    check_has_devices as check_has_devices,
    check_layout as check_layout,
    check_rank as check_rank,
    check_spec as check_spec,
    definite_problems as definite_problems,
    describe_axes as describe_axes,
    either as either,
    from_tuple as from_tuple,
    indivisible as indivisible,
    is_count as is_count,
    names_rank_problem as names_rank_problem,
    nearest as nearest,
    num_shards as num_shards,
    padding_problems as padding_problems,
    raise_problem as raise_problem,
    rank_problem as rank_problem,
    sharding_axes as sharding_axes,
    sharding_str as sharding_str,
    size_problems as size_problems,
    sizes_that_fit as sizes_that_fit,
    spec_str as spec_str,
)
from partitioning.rules.names import (
    AxisNames as AxisNames,
    LogicalAxisRules as LogicalAxisRules,
    OnIndivisible as OnIndivisible,
    OnUnmatched as OnUnmatched,
    PaddedSpec as PaddedSpec,
    ResolvedDimension as ResolvedDimension,
    Rule as Rule,
    Spec as Spec,
    add_axis as add_axis,
    boundary_spec as boundary_spec,
    dimension_axes as dimension_axes,
    fill_unconstrained as fill_unconstrained,
    remove_axis as remove_axis,
    to_spec as to_spec,
)
from partitioning.rules.resolve import (
    apply_policies as apply_policies,
    drop_axes as drop_axes,
    drop_axes_of_names as drop_axes_of_names,
    free_axes as free_axes,
    largest_divisor as largest_divisor,
    logical_to_mesh_axes as logical_to_mesh_axes,
    resolve_axes as resolve_axes,
    try_resolve as try_resolve,
)
from partitioning.rules.standard import (
    STANDARD_MESH_AXES as STANDARD_MESH_AXES,
    USUAL_BATCH_AXES as USUAL_BATCH_AXES,
    fsdp_logical_axis_rules as fsdp_logical_axis_rules,
    standard_logical_axis_rules as standard_logical_axis_rules,
)
