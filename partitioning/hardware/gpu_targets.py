"""Descriptions of GPUs for the compiler, as the text of XLA's GpuTargetConfigProto."""

from __future__ import annotations

import dataclasses

from partitioning.hardware.chips import Chip


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """The figures that differ between chips, from NVIDIA's white paper of each architecture.

    Attributes:
      compute_capability: the (major, minor) version.
      cores: the number of streaming multiprocessors.
      units_per_core: the number of float32 units per multiprocessor.
      shared_memory: the shared memory per multiprocessor, in bytes; a block can use 1 KiB less.
      l2_bytes: the size of the second-level cache, in bytes.
      clock_ghz: the boost clock.
    """

    compute_capability: tuple[int, int]
    cores: int
    units_per_core: int
    shared_memory: int
    l2_bytes: int
    clock_ghz: float


_ARCHITECTURES = {
    'a100': _Architecture((8, 0), 108, 64, 164 * 1024, 40 * 2**20, 1.41),
    'h100': _Architecture((9, 0), 132, 128, 228 * 1024, 50 * 2**20, 1.98),
    'h200': _Architecture((9, 0), 132, 128, 228 * 1024, 50 * 2**20, 1.98),
    'b200': _Architecture((10, 0), 148, 128, 228 * 1024, 126 * 2**20, 1.965),
}


def target_config(chip: Chip) -> str:
    """Returns the text for `get_topology_desc(platform='cuda', target_config=...)`."""
    a = _ARCHITECTURES[chip.name]
    major, minor = a.compute_capability
    device = {
        'threads_per_block_limit': 1024,
        'threads_per_warp': 32,
        'shared_memory_per_block': 48 * 1024,
        'shared_memory_per_core': a.shared_memory,
        'threads_per_core_limit': 2048,
        'core_count': a.cores,
        'fpus_per_core': a.units_per_core,
        'block_dim_limit_x': 2**31 - 1,
        'block_dim_limit_y': 2**16 - 1,
        'block_dim_limit_z': 2**16 - 1,
        'memory_bandwidth': int(chip.hbm_bandwidth),
        'l2_cache_size': a.l2_bytes,
        'clock_rate_ghz': a.clock_ghz,
        'device_memory_size': chip.hbm_bytes,
        'shared_memory_per_block_optin': a.shared_memory - 1024,
        'registers_per_core_limit': 2**16,
        'registers_per_block_limit': 2**16,
    }
    fields = '\n'.join(f'  {name}: {value}' for name, value in device.items())
    return (
        f'gpu_device_info {{\n{fields}\n'
        f'  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n'
        'platform_name: "CUDA"\n'
        'dnn_version_info { major: 9 minor: 8 }\n'
        f'device_description_str: "{chip.device_kind}"\n'
    )
