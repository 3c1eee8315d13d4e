"""Shards the arrays of jax programs by named axes, on any mesh of TPUs, GPUs or CPUs.

Usage:
  from partitioning import PjitPartitioner
  partitioner = PjitPartitioner(num_partitions=2)

`__all__` lists what programs need. The other public names of `t5x.partitioning`, and the types in
signatures, can be imported from here too. `__init__.pyi` lists every name with its module, which
is imported when the name is first used.
"""

from partitioning.lazy_names import attach

__getattr__, __dir__ = attach(__name__)
