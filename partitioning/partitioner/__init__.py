"""The one door most users need: a mesh, rules, and functions partitioned by them."""

from partitioning.partitioner.base import BasePartitioner
from partitioning.partitioner.moe import MoePjitPartitioner
from partitioning.partitioner.pjit import BasePjitPartitioner, PjitPartitioner

__all__ = [
    'BasePartitioner',
    'BasePjitPartitioner',
    'MoePjitPartitioner',
    'PjitPartitioner',
]
