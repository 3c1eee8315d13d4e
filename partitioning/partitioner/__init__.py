"""Partitioners, where most users start: they turn a mesh and rules into plans and functions.

`base`, `base_pjit`, `pjit` and `moe` are the partitioners. `settings` checks their settings and
defines their repr and copies. `training_setup` creates states in their shards and partitions steps.
"""

from partitioning.partitioner.base import (
    BasePartitioner as BasePartitioner,
)
from partitioning.partitioner.base_pjit import (
    BasePjitPartitioner as BasePjitPartitioner,
)
from partitioning.partitioner.moe import (
    MoePjitPartitioner as MoePjitPartitioner,
    compute_num_model_partitions as compute_num_model_partitions,
    override_partition_specs as override_partition_specs,
)
from partitioning.partitioner.pjit import (
    PjitPartitioner as PjitPartitioner,
)
