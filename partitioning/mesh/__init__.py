"""MeshConfig -> Mesh, for every machine."""

from partitioning.mesh.aliases import (
    create_hybrid_mesh,
    create_mesh,
    default_mesh,
    default_moe_mesh,
    get_cpu_mesh,
    get_gpu_mesh,
    get_mesh,
)
from partitioning.mesh.config import MeshConfig
from partitioning.mesh.rings import AxisRing, axis_rings, mesh_table
from partitioning.mesh.validation import AxisTypes

__all__ = [
    'AxisRing',
    'AxisTypes',
    'MeshConfig',
    'axis_rings',
    'create_hybrid_mesh',
    'create_mesh',
    'default_mesh',
    'default_moe_mesh',
    'get_cpu_mesh',
    'get_gpu_mesh',
    'get_mesh',
    'mesh_table',
]
