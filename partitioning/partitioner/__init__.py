"""The entry point most users need: a mesh, rules, and the plans and functions they make."""

from partitioning.partitioner.base import (
    BasePartitioner as BasePartitioner,
)
from partitioning.partitioner.moe import (
    MoePjitPartitioner as MoePjitPartitioner,
)
from partitioning.partitioner.partitioned import (
    CompiledPartitionedCallable as CompiledPartitionedCallable,
    PartitionedCallable as PartitionedCallable,
    PjittedFnWithContext as PjittedFnWithContext,
    check_compiled_once as check_compiled_once,
)
from partitioning.partitioner.pjit import (
    BasePjitPartitioner as BasePjitPartitioner,
    PjitPartitioner as PjitPartitioner,
)
