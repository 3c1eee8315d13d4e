"""Devices -> Mesh, for every machine."""

from partitioning.mesh.create import AxisTypes, check_axis_types, create_hybrid_mesh, create_mesh
from partitioning.mesh.default import (
    MESH_AXES,
    MULTISLICE_MESH_AXES,
    check_mesh_settings,
    default_mesh,
    default_moe_mesh,
    get_cpu_mesh,
    get_gpu_mesh,
)
from partitioning.mesh.rings import AxisRing, axis_rings, mesh_table
from partitioning.mesh.t5x import get_mesh

__all__ = [
    'MESH_AXES',
    'MULTISLICE_MESH_AXES',
    'AxisRing',
    'AxisTypes',
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
