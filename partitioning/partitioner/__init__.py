"""The entry point most users need: a mesh, rules, and the plans and functions they make.

`base`, `base_pjit`, `pjit` and `moe` are the partitioners, with their settings and their behaviour
as objects in `settings`. `training_setup` creates states and gives a running step.
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
