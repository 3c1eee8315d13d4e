"""Builds the mesh of any machine from a MeshConfig, and describes the order of its devices."""

from partitioning.mesh.aliases import (
    create_hybrid_mesh as create_hybrid_mesh,
    create_mesh as create_mesh,
    default_mesh as default_mesh,
    default_moe_mesh as default_moe_mesh,
    get_cpu_mesh as get_cpu_mesh,
    get_gpu_mesh as get_gpu_mesh,
    get_mesh as get_mesh,
)
from partitioning.mesh.config import (
    MeshConfig as MeshConfig,
)
from partitioning.mesh.order import (
    AxisRing as AxisRing,
    Placement as Placement,
    axis_rings as axis_rings,
    describe_devices as describe_devices,
    find_placement as find_placement,
    mesh_table as mesh_table,
)
from partitioning.mesh.validation import (
    AxisTypes as AxisTypes,
)
