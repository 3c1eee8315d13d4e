"""Shards the arrays of jax programs by named axes, on any mesh of TPUs, GPUs or CPUs.

Usage:
  from partitioning import PjitPartitioner
  partitioner = PjitPartitioner({'data': -1, 'model': 2})  # or layout='fsdp'
  state, step, data_spec = partitioner.setup(init, train_step, key)

Start with `help(PjitPartitioner)`. The other names, by what they are for:
  meshes: MeshConfig, create_mesh, draw_mesh, describe_topology, Topology, Chip, CHIPS
  rules: AxisRules, standard_logical_axis_rules, fsdp_logical_axis_rules, resolve_axes,
    logical_to_mesh_axes
  models without names: suggest_rules, explain_rules, override_params_axes_names
  states and their names: TrainState, AxisNames, Partitioned, LogicallyPartitioned,
    with_partitioning, with_logical_partitioning, unbox, to_linen_boxes, to_nnx_state,
    to_params_axes
  plans: Plan, PlanRow, plan_diff, draw_audit, visualize_sharding
  inside functions: constrain, with_sharding_constraint
  steps and batches: check_compiled_once, DataLayout, LocalChunker
  other partitioners: BasePartitioner, MoePjitPartitioner

The other public names of `t5x.partitioning`, and the types in signatures, can be imported from here
too. `__init__.pyi` lists every name with its module, which is imported when it is first used.
"""

from partitioning.lazy_names import attach

__getattr__, __dir__ = attach(__name__)
