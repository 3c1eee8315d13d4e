"""Machines: devices and their coordinates, chips and their rates, and described topologies."""

from partitioning.hardware.chips import CHIPS, Chip, chip_of, torus_wrap
from partitioning.hardware.devices import (
    HardwareMesh,
    JaxDevice,
    OtherMesh,
    TpuMesh,
    bounds_from_last_device,
    check_devices,
    get_coords,
    has_coords,
    num_slices,
    places_of,
    slice_bounds,
    slice_of,
)
from partitioning.hardware.granules import granules_of
from partitioning.hardware.topology import Topology, describe_topology, parse_topology

__all__ = [
    'CHIPS',
    'Chip',
    'HardwareMesh',
    'JaxDevice',
    'OtherMesh',
    'Topology',
    'TpuMesh',
    'bounds_from_last_device',
    'check_devices',
    'chip_of',
    'describe_topology',
    'get_coords',
    'granules_of',
    'has_coords',
    'num_slices',
    'parse_topology',
    'places_of',
    'slice_bounds',
    'slice_of',
    'torus_wrap',
]
