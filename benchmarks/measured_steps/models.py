"""The models of measured rows, as settings of the built-in transformer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from train.attention import AttentionSettings, SplashBlocks
from train.models.experts.config import ExpertsConfig
from train.models.remat import Remat
from train.models.transformer import TransformerConfig

from .rows import MeasuredRow

# What MaxText and axlearn call the arrays of a layer -> our names.
_NAMES = {
    'decoder_layer_input': ('residual',),
    'query_proj': ('query',),
    'key_proj': ('key',),
    'value_proj': ('value',),
    'qkv_proj': ('query', 'key', 'value'),
    'context': ('attended',),
    'out_proj': ('attention_out',),
    'mlpwi_0': ('mlp_gate',),
    'mlpwi_1': ('mlp_up',),
    'mlpwo': ('mlp_out',),
    'q_proj': ('query',),
    'k_proj': ('key',),
    'v_proj': ('value',),
    'o_proj': ('attention_out',),
}
# Products of four of the seven matrices of a layer, every second in the order of the program.
_SELECTIVE = Remat(save=('query', 'value', 'attended', 'mlp_gate', 'mlp_out'))
_POLICIES: dict[str, Remat] = {
    'full': Remat(),
    'minimal': Remat(save=('dots',)),
    'minimal_flash': Remat(save=('dots', 'attended')),
    'dots_saveable': Remat(save=('dots',)),
}
# Sizes of `SplashBlocks`, and both sides of the same blocks in MaxText's splash attention.
_BLOCKS = {
    'keys': ('sa_block_q', 'sa_block_kv'),
    'dkv_keys': ('sa_block_q_dkv', 'sa_block_kv_dkv'),
    'dq_keys': ('sa_block_q_dq', 'sa_block_kv_dq'),
}
_ACTIVATIONS = {'silu': 'silu', 'relu': 'relu', 'gelu': 'gelu_tanh'}
_LLAMA_LIKE = ('llama2', 'mistral', 'llama-like', 'llama-like with q/k norm', None)
_WITH_EXPERTS = ('mixtral', 'mistral', 'qwen3_moe')


def model_problems(row: MeasuredRow) -> Iterator[str]:
    """Yields why the built-in transformer cannot express the model of a row."""
    m, block = row['model'], row['model'].get('decoder_block')
    if m['experts'] and 'dropped' in (row['source'].get('config_name') or ''):
        yield 'its experts drop tokens, and the built-in transformer drops none'
    known = _WITH_EXPERTS if m['experts'] else (*_LLAMA_LIKE, 'gemma3', 'gpt3')
    if block not in known and not str(block).startswith('maxtext'):
        yield f'the built-in transformer has no layers of the kind of {block}'
    if row['quantization']:
        yield f'products are quantized ({row["quantization"]}), and ours are computed in bfloat16'
    activation = m['mlp_activations'][0]
    if activation not in _ACTIVATIONS:
        yield f'the built-in transformer has no activation {activation!r}'
    yield from _remat_problems(row)


def _remat_problems(row: MeasuredRow) -> Iterator[str]:
    remat, policy = row['remat'], row['remat']['policy']
    saved, offloaded = remat['saved_on_device'], remat['offloaded_to_host']
    if policy is None:
        yield 'what its layers keep for the backward pass is not published'
    elif _remat_of_policy(policy, saved) is None:
        if saved is None or offloaded is None:
            yield f'what {policy!r} keeps for the backward pass is not published'
            return
        for name in (*saved, *offloaded):
            if name not in _NAMES:
                yield f'its layers keep {name!r}, an array that ours do not name'


def _remat_of_policy(policy: str, saved: list[str] | None) -> Remat | None:
    """What a policy keeps, if its name decides that; else the row lists it."""
    if policy.startswith('selective'):
        return _SELECTIVE
    if saved is None and policy.startswith('offload'):
        # The names are not known; these are the ones that the same model offloads elsewhere.
        return Remat(offload=_translate(['q_proj', 'k_proj', 'v_proj', 'o_proj']))
    return _POLICIES.get(policy)


def describe_model(row: MeasuredRow) -> TransformerConfig:
    """Returns the settings of the model of a row, with its dtypes, remat and attention."""
    m, block = row['model'], row['model'].get('decoder_block')
    settings: dict[str, Any] = {}
    if block == 'gemma3':
        settings |= {
            'qk_norm': True,
            'post_norms': True,
            'norm_scale_offset': True,
            'scale_embeddings': True,
            'window': m['sliding_window_size'],
            'global_every': 6,
            'rope_max_wavelength': 1e6,
            'local_rope_max_wavelength': 1e4,
        }
    if block == 'gpt3':
        settings |= {
            'norm': 'layer',
            'biases': ('qkv', 'out', 'mlp', 'norm'),
            'positions': 'learned',
            'max_positions': m['trainable_position_size'],
        }
    if m.get('use_qk_norm'):
        settings['qk_norm'] = True
    if m['experts']:
        settings['experts'] = ExpertsConfig(
            num_experts=m['experts'], num_selected_experts=m['top_k'], dropless=True
        )
    dtype = row['dtype']
    return TransformerConfig(
        **{'scale_embeddings': False} | settings,
        vocab_size=m['vocab'],
        num_layers=m['layers'],
        embed_dim=m['d_model'],
        num_heads=m['heads'],
        num_kv_heads=m['kv_heads'],
        head_dim=m['head_dim'],
        mlp_dim=m['mlp_dim'],
        activation=_ACTIVATIONS[m['mlp_activations'][0]],
        gated_mlp=m['gated_mlp'],
        tie_embeddings=m['tied_embeddings'],
        dtype='bfloat16',
        param_dtype=dtype['params'].split()[0],
        gradient_dtype='float32' if dtype['gradients'] == 'float32 reduce' else None,
        remat=choose_remat(row),
        attention=_choose_attention(row),
    )


def choose_remat(row: MeasuredRow) -> Remat:
    """Returns what the layers of a row keep for the backward pass."""
    remat = row['remat']
    if (decided := _remat_of_policy(remat['policy'], remat['saved_on_device'])) is not None:
        return decided
    save, offload = _translate(remat['saved_on_device']), _translate(remat['offloaded_to_host'])
    # The input of a layer is kept on the device in any case.
    return Remat(save=[name for name in save if name != 'residual'], offload=offload)


def _translate(names: list[str]) -> list[Any]:
    """Our names of arrays, each once."""
    return list(dict.fromkeys(ours for name in names for ours in _NAMES[name]))


def _choose_attention(row: MeasuredRow) -> AttentionSettings:
    """The blocks of the measured kernels, of which fewer scores are computed at a time.

    Large ones take the compiler many minutes, and nothing that is read from the program depends on
    them: the compiler does not estimate kernels, and the larger side of a block, which is kept,
    decides how many blocks the mask leaves out.
    """
    if not row['hardware']['topology']:
        return AttentionSettings()
    names = [field.name for field in dataclasses.fields(SplashBlocks) if field.name != 'fused']
    sizes = dict.fromkeys(names, 128)
    for ours, sides in _BLOCKS.items():
        usual = getattr(SplashBlocks, ours)
        sizes[ours] = max(row['attention']['blocks'].get(side, usual) for side in sides)
    return AttentionSettings(splash_blocks=SplashBlocks(**sizes))
