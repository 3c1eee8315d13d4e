"""Says which rows and chunks of global arrays each process holds.

A shard is one device's part of an array, and a chunk is one process's part. The chunks of a process
are read from jax's index map of the sharding. The devices of a process need not be neighbours: on a
torus, the rows of a process are often not consecutive.

`ownership` finds the shards that each process holds, and the rows of the batch that it reads.
`chunker` lists the chunks of any array. `arrays` makes global arrays from the rows of each process,
and returns the rows of a process.
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
from partitioning.layout.ownership import DataLayout as DataLayout, data_layout as data_layout
