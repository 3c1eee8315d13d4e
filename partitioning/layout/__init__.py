"""Tells which rows and chunks of global arrays each process holds.

A shard is one device's part of an array, a chunk is one process's part. What a process holds is
read from jax's index map of the sharding. Nothing assumes that the devices of a process are
neighbours: device orders that suit a torus often give a process strided rows.

`ownership`: the shards that each process holds, and the rows of the batch that it reads; `chunker`:
the chunks of any array; `arrays`: global arrays from the rows of each process, and back.
"""

from partitioning.layout.arrays import (
    global_to_local as global_to_local,
    host_local_array_to_global_array as host_local_array_to_global_array,
    local_to_global as local_to_global,
)
from partitioning.layout.chunker import (
    Indivisible as Indivisible,
    LocalChunker as LocalChunker,
    LocalChunkInfo as LocalChunkInfo,
)
from partitioning.layout.ownership import (
    DataLayout as DataLayout,
    data_layout as data_layout,
)
