"""The entry point most users need: a mesh, rules, and the plans and functions they make."""

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
from partitioning.partitioner.partitioned import (
    CompiledPartitionedCallable as CompiledPartitionedCallable,
    PartitionedCallable as PartitionedCallable,
    PjittedFnWithContext as PjittedFnWithContext,
)
from partitioning.partitioner.pjit import (
    PjitPartitioner as PjitPartitioner,
)
from partitioning.partitioner.recompilation import (
    check_compiled_once as check_compiled_once,
)
