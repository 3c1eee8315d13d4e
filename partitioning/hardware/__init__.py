"""Describes machines: coordinates of devices, rates of chips, compiler options and topologies."""

from partitioning.hardware.chips import (
    CHIPS as CHIPS,
    Chip as Chip,
    chip_of as chip_of,
    torus_wrap as torus_wrap,
)
from partitioning.hardware.compilers import (
    DEFAULT_OPTIONS as DEFAULT_OPTIONS,
    FLAG_VARIABLES as FLAG_VARIABLES,
    CompilerOption as CompilerOption,
    OptionValue as OptionValue,
    change_options as change_options,
    check_flags as check_flags,
    check_option as check_option,
    check_options as check_options,
    default_options as default_options,
    option_values as option_values,
)
from partitioning.hardware.devices import (
    HardwareMesh as HardwareMesh,
    JaxDevice as JaxDevice,
    OtherMesh as OtherMesh,
    TpuMesh as TpuMesh,
    bounds_from_last_device as bounds_from_last_device,
    check_devices as check_devices,
    get_coords as get_coords,
    granules_of as granules_of,
    has_coords as has_coords,
    num_slices as num_slices,
    places_of as places_of,
    slice_bounds as slice_bounds,
    slice_of as slice_of,
    stand_in_devices as stand_in_devices,
    use_cpu_without_accelerators as use_cpu_without_accelerators,
)
from partitioning.hardware.drawn import drawing_devices as drawing_devices
from partitioning.hardware.jax_private import (
    described_cudnn as described_cudnn,
    is_of_pmap as is_of_pmap,
    is_pmapped as is_pmapped,
    num_cached as num_cached,
    this_process as this_process,
)
from partitioning.hardware.topology import (
    Topology as Topology,
    describe_topology as describe_topology,
    parse_topology as parse_topology,
)
