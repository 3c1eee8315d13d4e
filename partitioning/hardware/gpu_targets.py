"""Descriptions of GPUs for the compiler, as the text of XLA's GpuTargetConfigProto."""

from __future__ import annotations

from partitioning.hardware.chips import Chip

# From NVIDIA's white papers: compute capability; streaming multiprocessors, and float32 units and
# bytes of shared memory of each; bytes of second-level cache; boost clock in GHz.
_ARCHITECTURES = {
    'a100': ((8, 0), 108, 64, 164 * 1024, 40 * 2**20, 1.41),
    'h100': ((9, 0), 132, 128, 228 * 1024, 50 * 2**20, 1.98),
    'h200': ((9, 0), 132, 128, 228 * 1024, 50 * 2**20, 1.98),
    'b200': ((10, 0), 148, 128, 228 * 1024, 126 * 2**20, 1.965),
}


def target_config(chip: Chip) -> str:
    """Returns the text for `get_topology_desc(platform='cuda', target_config=...)`."""
    (major, minor), cores, units, shared_memory, l2_bytes, clock_ghz = _ARCHITECTURES[chip.name]
    device = {
        'threads_per_block_limit': 1024,
        'threads_per_warp': 32,
        'shared_memory_per_block': 48 * 1024,
        'shared_memory_per_core': shared_memory,
        'threads_per_core_limit': 2048,
        'core_count': cores,
        'fpus_per_core': units,
        'block_dim_limit_x': 2**31 - 1,
        'block_dim_limit_y': 2**16 - 1,
        'block_dim_limit_z': 2**16 - 1,
        'memory_bandwidth': int(chip.hbm_bandwidth),
        'l2_cache_size': l2_bytes,
        'clock_rate_ghz': clock_ghz,
        'device_memory_size': chip.hbm_bytes,
        # A block can use 1 KiB less than the whole.
        'shared_memory_per_block_optin': shared_memory - 1024,
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
