"""Builds the mesh of any machine from a MeshConfig, and describes the order of its devices."""

from partitioning.mesh.config import MeshConfig as MeshConfig
from partitioning.mesh.order import (
    AxisRing as AxisRing,
    Placement as Placement,
    axis_rings as axis_rings,
    describe_devices as describe_devices,
    find_placement as find_placement,
    mesh_table as mesh_table,
)
from partitioning.mesh.validation import AxisTypes as AxisTypes
