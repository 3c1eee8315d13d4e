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
from partitioning.mesh.checks import AxisTypes, check_axis_types
from partitioning.mesh.config import MeshConfig
from partitioning.mesh.rings import AxisRing, axis_rings, mesh_table
from partitioning.mesh.t5x_settings import (
    MESH_AXES,
    MULTISLICE_MESH_AXES,
    check_mesh_settings,
)

__all__ = [
    'MESH_AXES',
    'MULTISLICE_MESH_AXES',
    'AxisRing',
    'AxisTypes',
    'MeshConfig',
    'axis_rings',
    'check_axis_types',
    'check_mesh_settings',
    'create_hybrid_mesh',
    'create_mesh',
    'default_mesh',
    'default_moe_mesh',
    'get_cpu_mesh',
    'get_gpu_mesh',
    'get_mesh',
    'mesh_table',
]
