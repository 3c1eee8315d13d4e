"""From a measured row of MaxText to the command that trains its program.

The commands are for MaxText of August 2026, whose settings have the names of older versions or
the names in `_RENAMED`. Each setting of a row is passed on, also where it is the default, because
the defaults have changed since.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from partitioning.hardware import CHIPS

from .rebuilding import describe_topology_of
from .rows import MeasuredRow

MODULE = 'maxtext.trainers.pre_train.train'
BASE = Path('configs', 'base.yml')
# What the run needs and the measurement does not say.
RUN = {
    'run_name': 'measured',
    'base_output_directory': 'runs',
    'steps': 5,
    'dataset_type': 'synthetic',
    'enable_checkpointing': False,
    'enable_tensorboard': False,
    'log_config': False,
    'jax_cache_dir': '',
    'override_model_config': True,
}
# The file of a model for each kind of layers; it gets the sizes of the row. A kind with experts
# can have another file.
_FILES = {
    'llama2': 'llama2-7b',
    'mistral': 'mistral-7b',
    'mixtral': 'mixtral-8x7b',
    'gemma': 'gemma-7b',
    'gemma2': 'gemma2-9b',
    'gemma3': 'gemma3-12b',
    'gemma4': 'gemma4-31b',
    'gemma4_small': 'gemma4-e2b',
    'gpt3': 'gpt3-175b',
    'gpt_oss': 'gpt-oss-120b',
    'deepseek': 'deepseek3-671b',
    'llama4': 'llama4-17b-16e',
    'qwen2': 'qwen2.5-7b',
    'qwen3': 'qwen3-8b',
    'qwen3_moe': 'qwen3-235b-a22b',
    'olmo3': 'olmo3-7b',
}
_OF_EXPERTS = {'mistral': 'mixtral-8x7b', 'gemma4': 'gemma4-26b'}
_SIZES = {
    'layers': 'base_num_decoder_layers',
    'd_model': 'base_emb_dim',
    'heads': 'base_num_query_heads',
    'kv_heads': 'base_num_kv_heads',
    'mlp_dim': 'base_mlp_dim',
    'moe_mlp_dim': 'base_moe_mlp_dim',
    'vocab': 'vocab_size',
    'tied_embeddings': 'logits_via_embedding',
    'experts': 'num_experts',
    'top_k': 'num_experts_per_tok',
}
_NOT_SETTINGS = ('decoder_block', 'gated_mlp', 'params_total', 'mlp_activations')
_RENAMED = {
    'fsdp_shard_on_exp': 'shard_exp_on_fsdp',
    'tile_batch_seq': 'wi_tile_fwd_batch_seq',
    'tile_embed_dim': 'wi_tile_fwd_embed_dim',
    'tile_mlp_dim': 'wi_tile_fwd_mlp_dim',
}
_AXES = ('data', 'fsdp', 'fsdp_transpose', 'context', 'tensor', 'expert')
_POLICIES = {'minimal_flash': 'minimal_with_context'}
# Since July 2026, models are written with nnx by default; rows of these commits were measured so.
_WITH_NNX = ('85b12b8',)
_FLAG_OF_CHIPS = re.compile(r'^[0-9a-f]{7}_')  # names a chip's settings, not the compiler's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """How a program is started, and on which machine.

    Attributes:
      topology: the machine, as `meshwright dry` takes it.
      arguments: the arguments of `python`.
      flags: the flags of the compiler, by name.
      variable: the variable of the environment that has them.
      notes: what is not as it was measured.
    """

    topology: str
    arguments: tuple[str, ...]
    flags: Mapping[str, str]
    variable: str
    notes: tuple[str, ...] = ()


def command_of(row: MeasuredRow, package: Path) -> Command | str:
    """Returns the command for a row, or in one line why there is none.

    `package` is the folder `maxtext` of the package, with its YAML files.
    """
    if not row['framework'].startswith('MaxText'):
        return f'its program is of {row["framework"]}'
    if row.chip not in CHIPS:
        return f'the chip {row.chip} is not described'
    block = row['model']['decoder_block'].removeprefix('maxtext ').split(',')[0].split()[0]
    if block not in ('default', *_FILES):
        return f'MaxText has no layers of the kind {block!r}'
    known = set(re.findall(r'^(\w+):', (package / BASE).read_text(), re.MULTILINE))
    settings = RUN | dict(_all_settings(row, block))
    given = {_RENAMED.get(name, name): value for name, value in settings.items()}
    lost = sorted(name for name in given if name not in known)
    written = (f'{name}={write_setting(given[name])}' for name in given if name in known)
    notes = tuple(f'MaxText has no setting {name!r}' for name in lost)
    return start_of(row, ('-m', MODULE, str(package / BASE), *written), notes)


def start_of(row: MeasuredRow, arguments: tuple[str, ...], notes: tuple[str, ...] = ()) -> Command:
    """The command with these arguments of `python`, on the machine and with the flags of a row."""
    topology, slices = describe_topology_of(row)
    return Command(
        topology=f'{slices}x{topology}' if slices > 1 else topology,
        arguments=arguments,
        flags={
            name: str(value)
            for name, value in (row['xla_flags'] or {}).items()
            if not _FLAG_OF_CHIPS.match(name)
        },
        variable='LIBTPU_INIT_ARGS' if CHIPS[row.chip].platform == 'tpu' else 'XLA_FLAGS',
        notes=notes,
    )


def _all_settings(row: MeasuredRow, block: str) -> Iterator[tuple[str, Any]]:
    yield from _model_settings(row, block)
    commit = (row.settings.get('software') or {}).get('maxtext') or ''
    for name in ('enable_nnx', 'pure_nnx', 'pure_nnx_decoder'):
        yield name, commit.startswith(_WITH_NNX)
    yield 'per_device_batch_size', row['per_device_batch']
    yield 'max_target_length', row['seq_len']
    yield 'gradient_accumulation_steps', row['gradient_accumulation']
    yield 'scan_layers', row['scan_layers']
    yield from _dtype_settings(row)
    yield from _layout_settings(row)
    yield from _remat_settings(row['remat'])
    # The newest settings last: they say best what was measured.
    parallelism = row['parallelism']
    alone = not any('expert' in parallelism[kind] for kind in ('ici', 'dcn'))
    for name, value in (row.settings.get('other_settings') or {}).items():
        # MaxText refuses it without devices that share experts, where it changes no work.
        if not (name == 'use_random_routing' and alone):
            yield name, value
    yield from _attention_settings(row)


def _model_settings(row: MeasuredRow, block: str) -> Iterator[tuple[str, Any]]:
    model = row['model']
    if block == 'default':
        yield 'decoder_block', block
        yield 'mlp_activations', model['mlp_activations']
        yield 'use_iota_embed', True  # as all scripts of this model say
    else:
        yield 'model_name', _file_of(model, block)
    for name, value in model.items():
        if value is not None and name not in _NOT_SETTINGS:
            yield _SIZES.get(name, name), value


def _file_of(model: Mapping[str, Any], block: str) -> str:
    if block == 'deepseek' and not model.get('q_lora_rank'):
        return 'deepseek2-16b'
    if block == 'llama4' and model.get('interleave_moe_layer_step') == 2:
        return 'llama4-17b-128e'
    return (_OF_EXPERTS if model['experts'] else {}).get(block, _FILES[block])


def _dtype_settings(row: MeasuredRow) -> Iterator[tuple[str, Any]]:
    dtype = row['dtype']
    yield 'dtype', dtype['compute']
    yield 'weight_dtype', dtype['params']
    yield 'grad_dtype', dtype['gradients']
    yield 'mu_dtype', dtype['optimizer']['mu']
    yield 'opt_type', row['optimizer']
    yield 'quantization', row['quantization'] or ''


def _layout_settings(row: MeasuredRow) -> Iterator[tuple[str, Any]]:
    parallelism = row['parallelism']
    for kind in ('ici', 'dcn'):
        for name in _AXES:
            yield f'{kind}_{name}_parallelism', parallelism[kind].get(name, 1)


def _remat_settings(remat: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    policy = remat['policy']
    yield 'remat_policy', _POLICIES.get(policy, policy)
    if policy == 'custom':
        yield from ((name, 'device') for name in remat['saved_on_device'])
        yield from ((name, 'offload') for name in remat['offloaded_to_host'])


def _attention_settings(row: MeasuredRow) -> Iterator[tuple[str, Any]]:
    if CHIPS[row.chip].platform == 'gpu':
        yield 'hardware', 'gpu'
        yield 'num_slices', row.num_slices  # hosts, of which GPUs say nothing
        # Transformer Engine calls the same kernels of cuDNN; it needs GPUs to be installed.
        yield 'attention', 'cudnn_flash_jax'
        yield 'packing', False
        return
    yield 'attention', 'flash'
    for name, value in (row['attention'].get('blocks') or {}).items():
        if value != 'None' and not name.startswith(('block_', 'note')):
            yield name, value
    if 'use_tokamax_splash' not in (row['attention'].get('blocks') or {}):
        yield 'use_tokamax_splash', False


def write_setting(value: Any) -> str:
    """A value as MaxText reads it from a command."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'[{",".join(value)}]' if isinstance(value, list) else str(value)
