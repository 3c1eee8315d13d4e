"""The entry point most users need: a mesh, rules, and the plans and functions they make."""

from partitioning.partitioner.base import BasePartitioner
from partitioning.partitioner.moe import MoePjitPartitioner
from partitioning.partitioner.partitioned import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    PjittedFnWithContext,
    check_compiled_once,
)
from partitioning.partitioner.pjit import BasePjitPartitioner, PjitPartitioner

__all__ = [
    'BasePartitioner',
    'BasePjitPartitioner',
    'CompiledPartitionedCallable',
    'MoePjitPartitioner',
    'PartitionedCallable',
    'PjitPartitioner',
    'PjittedFnWithContext',
    'check_compiled_once',
]
