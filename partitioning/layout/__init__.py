"""Who holds what: each process's part of the batch and of any array, read off the mesh.

What a process holds is what jax's index map of the sharding says its devices hold, never an
assumption that they are neighbours: orders that suit a torus give a process strided rows, and that
is fine.
"""

from partitioning.layout.arrays import (
    global_to_local,
    host_local_array_to_global_array,
    local_to_global,
)
from partitioning.layout.chunker import Indivisible, LocalChunker, LocalChunkInfo
from partitioning.layout.proof import LayoutProof, verify, verify_chunks
from partitioning.layout.rows import DataLayout, data_layout

__all__ = [
    'DataLayout',
    'Indivisible',
    'LayoutProof',
    'LocalChunkInfo',
    'LocalChunker',
    'data_layout',
    'global_to_local',
    'host_local_array_to_global_array',
    'local_to_global',
    'verify',
    'verify_chunks',
]
