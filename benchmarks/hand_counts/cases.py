"""The cases of benchmarks/forecast_cases.py."""

from __future__ import annotations

from typing import Any

from shipped_runs import RUNS

from hand_counts.sizes import Case
from hand_counts.wire import (
    count_data_parallel,
    count_dcn,
    count_fsdp,
    count_fsdp_tensor,
    count_tensor,
)

_TENSOR: dict[str, Any] = {'wire': count_fsdp_tensor, 'tensor': 8, 'chunks': 16_384}


def _case(name: str, shards: int, norm_shards: int, row_shards: int, **counts: Any) -> Case:
    shared = {'shards': shards, 'norm_shards': norm_shards, 'row_shards': row_shards}
    return Case(**vars(RUNS[name]), **shared, **counts)


# The name of a run, and the numbers of devices that share matrices, scales of norms, and rows.
CASES = (
    _case('125m', 4, 4, 4, wire=count_fsdp, rounds=(4,), chunks=32_768),
    _case('125m_data_parallel', 1, 1, 4, wire=count_data_parallel),
    _case('125m_tensor', 4, 1, 1, wire=count_tensor, tensor=4),
    _case('1b', 16, 16, 16, wire=count_fsdp, rounds=(4, 4), chunks=32_768, sums_to_gather=False),
    _case('8b_fsdp', 64, 64, 64, wire=count_fsdp, rounds=(16, 4), chunks=8 * 16_128),
    _case('8b_fsdp8_tensor8', 64, 8, 8, **_TENSOR),
    _case('70b_v5p', 512, 64, 64, **_TENSOR),
    _case('70b_v6e', 256, 32, 32, **_TENSOR),
    _case('8b_two_slices', 256, 256, 512, wire=count_dcn),
    _case('8b_h100', 8, 8, 8),
    _case('8b_data_parallel', 1, 1, 64, fits=False),
)
