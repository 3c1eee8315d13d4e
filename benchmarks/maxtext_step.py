"""MaxText's train steps of the sizes of shipped runs, by its own command: the peer of
compiled_step.py.

MaxText has its own file of settings for most of the models. The others are what makes its steps
short: all products with parameters and the results of attention are kept, blocks of attention of
1,024, one backward kernel, whole products with gathered weights, and larger tiles in vector memory.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from shipped_runs import ShippedRun

from benchmarks.measured_steps.maxtext import BASE, MODULE, RUN, write_setting
from benchmarks.measured_steps.own_programs import STORE, start
from benchmarks.measured_steps.recording import RECORD
from partitioning.hardware import parse_topology

_1B = {
    'decoder_block': 'llama2',
    'base_emb_dim': 2048,
    'base_num_query_heads': 32,
    'base_num_kv_heads': 8,
    'head_dim': 64,
    'base_mlp_dim': 8192,
    'base_num_decoder_layers': 16,
    'vocab_size': 32_768,
}
_8B, _70B = {'model_name': 'llama3-8b'}, {'model_name': 'llama3-70b'}
# With experts, its word for all products leaves out half of the hidden layers, and more of its
# default tiles of 512 rows are of two experts.
_EXPERTS = {
    'max_target_length': 4096,
    'remat_policy': 'custom',
    **dict.fromkeys(
        (
            *('query_proj', 'key_proj', 'value_proj', 'context', 'out_proj'),
            *('moe_mlpwi_0', 'moe_mlpwi_1', 'moe_mlpwo'),
        ),
        'device',
    ),
    **{f'w{k}_tile_{of}_batch_seq': 256 for k in 'io' for of in ('fwd', 'dlhs', 'drhs')},
}
# The runs that MaxText can repeat, and what it needs for them besides the layout.
PEERS: dict[str, dict[str, Any]] = {
    '1b_auto': _1B,
    '1b_128k_words_auto': _1B | {'vocab_size': 131_072},
    '8b_fsdp_auto': _8B,
    '8b_fsdp_int8': _8B | {'quantization': 'int8', 'use_qwix_quantization': True},
    '8b_fsdp8_tensor8_auto': _8B | {'ici_tensor_parallelism': 8},
    '8b_fsdp16_tensor4_auto': _8B | {'ici_tensor_parallelism': 4},
    '70b_v5p_auto': _70B | {'ici_tensor_parallelism': 8},
    # With the hidden layers kept, it needs more than a device has.
    '70b_v6e_auto': _70B
    | {'ici_tensor_parallelism': 8, 'remat_policy': 'save_dot_with_context_except_mlp'},
    'mixtral': _EXPERTS | {'model_name': 'mixtral-8x7b'},
    'qwen3_30b': _EXPERTS
    | {'model_name': 'qwen3-30b-a3b'}
    | {f'w{k}_tile_{of}_mlp_dim': 768 for k in 'io' for of in ('fwd', 'dlhs', 'drhs')},
}
_BEST = {
    'remat_policy': 'minimal_with_context',
    'attention': 'flash',
    'use_iota_embed': True,
    'sa_use_fused_bwd_kernel': True,
    **dict.fromkeys(
        (
            *('sa_block_q', 'sa_block_kv', 'sa_block_kv_compute', 'sa_block_q_dkv'),
            *('sa_block_kv_dkv', 'sa_block_kv_dkv_compute', 'sa_block_q_dq', 'sa_block_kv_dq'),
        ),
        1024,
    ),
}
_WHOLE = '--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000 --xla_tpu_scoped_vmem_limit_kib='
# The flags of its scripts that libtpu takes for v5e alone.
_FUSION = (
    '--xla_tpu_enable_async_collective_fusion=true '
    '--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true '
    '--xla_tpu_enable_async_collective_fusion_multiple_steps=true '
    '--xla_tpu_overlap_compute_collective_tc=true --xla_enable_async_all_gather=true'
)
_FLAGS = {
    'v5e': f'{_WHOLE}32768 {_FUSION}',
    'v5p': f'{_WHOLE}32768',
    'v6e': f'{_WHOLE}98304',
}


def list_settings(run: ShippedRun, devices: int) -> dict[str, Any]:
    """The settings with which MaxText makes the step of a run, on a number of devices."""
    layout = {
        'ici_fsdp_parallelism': -1,
        'allow_split_physical_axes': True,
        'per_device_batch_size': run.batch / devices,
        'max_target_length': 2048,
    }
    return RUN | _BEST | layout | PEERS[run.name]


def schedule_maxtext(run: ShippedRun, python: str, source: str) -> dict[str, Any]:
    """Compiles MaxText's step until it is scheduled, and returns what is known about it.

    Args:
      run: one of `PEERS`.
      python: the Python that has what MaxText needs.
      source: the folder with the package `maxtext`.

    Raises:
      RuntimeError: if MaxText ended before its step was compiled, with its last words.
    """
    chip, shape = parse_topology(run.topology)
    settings = list_settings(run, math.prod(shape))
    written = [f'{name}={write_setting(value)}' for name, value in settings.items()]
    package = Path(source).absolute()
    target = STORE.absolute() / f'maxtext_{run.name}'
    command = ['--', 'python', '-m', MODULE, str(package / 'maxtext' / BASE), *written]
    path = [str(package), str(Path(__file__).resolve().parents[1])]
    environment = {'PYTHONPATH': os.pathsep.join(path), 'LIBTPU_INIT_ARGS': _FLAGS[chip.name]}
    said = start(python, [run.topology, str(target), 'early', *command], environment)
    if said:
        raise RuntimeError(f'MaxText: {said}')
    found = json.loads(target.with_name(f'{target.name}{RECORD}').read_text())
    return found | {'stored_as': target.name}
