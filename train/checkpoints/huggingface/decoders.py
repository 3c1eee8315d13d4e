"""`config.json` of decoders, and the settings of the built-in transformer: in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from train.checkpoints.huggingface.config_json import ConfigJson
from train.models.config import RopeScaling, TransformerConfig

Settings = dict[str, Any]
# The settings of TransformerConfig that are numbers in config.json, by the names of most models.
SIZES = {
    'vocab_size': 'vocab_size',
    'num_layers': 'num_hidden_layers',
    'embed_dim': 'hidden_size',
    'num_heads': 'num_attention_heads',
    'mlp_dim': 'intermediate_size',
}
# Rotary positions have no table. transformers warns if a text is longer than this.
MAX_POSITIONS = 131_072
LOCAL, GLOBAL = 'sliding_attention', 'full_attention'
GEMMA = {'scale_embeddings': True, 'norm_scale_offset': True, 'activation': 'gelu_tanh'}
GELU_TANH = 'gelu_pytorch_tanh'


def read_llama(c: ConfigJson) -> Settings:
    """Llama 1 to 3.x."""
    c.require('hidden_act', 'silu', default='silu')
    biases = ('qkv', 'out') if c.get('attention_bias') else ()
    return read_common(c) | {'biases': (*biases, *(('mlp',) if c.get('mlp_bias') else ()))}


def write_llama(m: TransformerConfig) -> Settings:
    return _write_common(m) | {
        'hidden_act': 'silu',
        'attention_bias': 'qkv' in m.biases,
        'mlp_bias': 'mlp' in m.biases,
    }


def read_mistral(c: ConfigJson) -> Settings:
    """Mistral 7B and later, whose layers are all local or all global."""
    c.require('hidden_act', 'silu', default='silu')
    window = c.values.get('sliding_window', 4096)
    return read_common(c) | read_windows(c, window, lambda i: True)


def write_mistral(m: TransformerConfig) -> Settings:
    return _write_common(m) | {'hidden_act': 'silu', 'sliding_window': m.window}


def read_qwen2(c: ConfigJson) -> Settings:
    c.require('hidden_act', 'silu', default='silu')
    return read_common(c) | _qwen_windows(c) | {'biases': ('qkv',)}


def write_qwen2(m: TransformerConfig) -> Settings:
    known = {'hidden_act': 'silu', 'use_sliding_window': m.window is not None}
    return _write_common(m) | known | _write_windows(m)


def read_qwen3(c: ConfigJson) -> Settings:
    """Qwen 3 without experts."""
    c.require('hidden_act', 'silu', default='silu')
    biases = ('qkv', 'out') if c.get('attention_bias') else ()
    settings = read_common(c) | _qwen_windows(c)
    return settings | {'qk_norm': True, 'biases': biases, 'head_dim': c.get('head_dim', 128)}


def write_qwen3(m: TransformerConfig) -> Settings:
    return write_qwen2(m) | {'attention_bias': 'qkv' in m.biases}


def read_gemma(c: ConfigJson) -> Settings:
    """Gemma 1. Its first files name another activation than the one it was trained with."""
    c.require('hidden_activation', GELU_TANH, default=GELU_TANH)
    c.require('hidden_act', 'gelu', GELU_TANH, default=GELU_TANH)
    return read_common(c, is_tied=True) | GEMMA | {'head_dim': c.get('head_dim', 256)}


def write_gemma(m: TransformerConfig) -> Settings:
    return _write_common(m) | {'hidden_act': GELU_TANH, 'hidden_activation': GELU_TANH}


def read_gemma2(c: ConfigJson) -> Settings:
    """Gemma 2, in which every second layer is global."""
    window = c.values.get('sliding_window', 4096)
    settings = _read_gemma2(c) | read_windows(c, window, lambda i: i % 2 == 0)
    return settings | {
        'attention_soft_cap': c.values.get('attn_logit_softcapping', 50.0),
        'logit_soft_cap': c.values.get('final_logit_softcapping', 30.0),
    }


def write_gemma2(m: TransformerConfig) -> Settings:
    scale = m.attention_scale or m.head_dim**-0.5
    # The configuration has the whole number whose square root divides the products.
    return write_gemma(m) | {
        **_write_windows(m),
        'query_pre_attn_scalar': round(scale**-2, 6),
        'attn_logit_softcapping': m.attention_soft_cap,
        'final_logit_softcapping': m.logit_soft_cap,
    }


def read_gemma3(c: ConfigJson) -> Settings:
    """The text models of Gemma 3, in which every sixth layer is global."""
    c.require('use_bidirectional_attention', False, default=False)
    every = c.get('sliding_window_pattern', c.get('_sliding_window_pattern', 6))
    window = c.values.get('sliding_window', 4096)
    settings = _read_gemma2(c) | read_windows(c, window, lambda i: (i + 1) % every != 0)
    by_kind = c.get('rope_parameters', {})
    local = by_kind.get(LOCAL, {}).get('rope_theta', c.get('rope_local_base_freq', 10_000.0))
    return settings | {
        'qk_norm': True,
        'attention_soft_cap': c.get('attn_logit_softcapping'),
        'logit_soft_cap': c.get('final_logit_softcapping'),
        'local_rope_max_wavelength': float(local) if settings['window'] else None,
        'rope_max_wavelength': _rope(c, default=1_000_000.0)[0],
    }


def write_gemma3(m: TransformerConfig) -> Settings:
    local = m.local_rope_max_wavelength or m.rope_max_wavelength
    return write_gemma2(m) | {'rope_local_base_freq': local}


def read_gpt2(c: ConfigJson) -> Settings:
    """GPT-2. Its heads share no keys, and its positions are learned."""
    c.require('activation_function', 'gelu_new', GELU_TANH, default='gelu_new')
    c.require('scale_attn_weights', True, default=True)
    c.require('scale_attn_by_inverse_layer_idx', False, default=False)
    c.require('add_cross_attention', False, default=False)
    embed_dim, heads = c.need('n_embd'), c.need('n_head')
    return {
        'vocab_size': c.need('vocab_size'),
        'num_layers': c.need('n_layer'),
        'embed_dim': embed_dim,
        'num_heads': heads,
        'num_kv_heads': heads,
        'head_dim': _divide(c, 'n_embd', 'n_head'),
        'mlp_dim': c.get('n_inner', 4 * embed_dim),
        'positions': 'learned',
        'max_positions': c.get('n_positions', 1024),
        'scale_embeddings': False,
        'tie_embeddings': c.get('tie_word_embeddings', True),
        'activation': 'gelu_tanh',
        'gated_mlp': False,
        'biases': ('qkv', 'out', 'mlp', 'norm'),
        'norm': 'layer',
        'norm_epsilon': c.get('layer_norm_epsilon', 1e-5),
    }


def write_gpt2(m: TransformerConfig) -> Settings:
    return {
        'vocab_size': m.vocab_size,
        'n_layer': m.num_layers,
        'n_embd': m.embed_dim,
        'n_head': m.num_heads,
        'n_inner': m.mlp_dim,
        'n_positions': m.max_positions,
        'activation_function': 'gelu_new',
        'layer_norm_epsilon': m.norm_epsilon,
        'tie_word_embeddings': m.tie_embeddings,
    }


def read_common(c: ConfigJson, is_tied: bool = False) -> Settings:
    """The settings that all models after Llama have.

    `is_tied` is the default of transformers for tie_word_embeddings.
    """
    c.require('partial_rotary_factor', 1.0, default=1.0)
    wavelength, scaling = _rope(c)
    heads = c.need('num_attention_heads')
    return {name: c.need(key) for name, key in SIZES.items()} | {
        'num_kv_heads': c.get('num_key_value_heads', heads),
        'head_dim': c.get('head_dim') or _divide(c, 'hidden_size', 'num_attention_heads'),
        'norm_epsilon': c.get('rms_norm_eps', 1e-6),
        'rope_max_wavelength': wavelength,
        'rope_scaling': scaling,
        'tie_embeddings': c.get('tie_word_embeddings', is_tied),
        'scale_embeddings': False,
    }


def _write_common(m: TransformerConfig) -> Settings:
    settings: Settings = {key: getattr(m, name) for name, key in SIZES.items()}
    scaling, r = None, m.rope_scaling
    if r is not None and r.original_length:
        scaling = {
            'rope_type': 'llama3',
            'factor': r.factor,
            'original_max_position_embeddings': r.original_length,
            'low_freq_factor': r.low_frequency_factor,
            'high_freq_factor': r.high_frequency_factor,
        }
    elif r is not None:
        scaling = {'rope_type': 'linear', 'factor': r.factor}
    return settings | {
        'num_key_value_heads': m.num_kv_heads,
        'head_dim': m.head_dim,
        'rms_norm_eps': m.norm_epsilon,
        'rope_theta': m.rope_max_wavelength,
        'rope_scaling': scaling,
        'tie_word_embeddings': m.tie_embeddings,
        'max_position_embeddings': MAX_POSITIONS,
    }


def _read_gemma2(c: ConfigJson) -> Settings:
    """The settings that Gemma 2 and 3 share."""
    c.require('hidden_activation', GELU_TANH, default=GELU_TANH)
    head_dim, scalar = c.get('head_dim', 256), c.get('query_pre_attn_scalar', 256)
    biases = ('qkv', 'out') if c.get('attention_bias') else ()
    return read_common(c, is_tied=True) | {
        **GEMMA,
        'head_dim': head_dim,
        'post_norms': True,
        'biases': biases,
        'attention_scale': None if scalar == head_dim else scalar**-0.5,
    }


def _divide(c: ConfigJson, total: str, count: str) -> int:
    width, heads = c.need(total), c.need(count)
    if not isinstance(width, int) or not isinstance(heads, int) or not heads or width % heads:
        raise c.cannot(total, width, f'multiples of {count} ({heads!r})')
    return width // heads


def _rope(c: ConfigJson, default: float = 10_000.0) -> tuple[float, RopeScaling | None]:
    """The longest wavelength of global layers, and how it is scaled.

    transformers 5 has both in rope_parameters, for each kind of layer if there are several.
    """
    newer = c.get('rope_parameters', {})
    newer = newer.get(GLOBAL, newer)
    scaling = c.get('rope_scaling') or newer
    wavelength = float(newer.get('rope_theta', c.get('rope_theta', default)))
    kind = scaling.get('rope_type', scaling.get('type', 'default'))
    if kind == 'default':
        return wavelength, None
    if kind == 'linear':
        return wavelength, RopeScaling(factor=float(scaling['factor']))
    if kind != 'llama3':
        raise c.cannot('rope_type of rope_scaling', kind, "'default', 'linear' or 'llama3'")
    return wavelength, RopeScaling(
        factor=float(scaling['factor']),
        original_length=scaling['original_max_position_embeddings'],
        low_frequency_factor=float(scaling['low_freq_factor']),
        high_frequency_factor=float(scaling['high_freq_factor']),
    )


def _qwen_windows(c: ConfigJson) -> Settings:
    window = c.get('sliding_window', 4096) if c.get('use_sliding_window') else None
    first = c.get('max_window_layers', 28)
    return read_windows(c, window, lambda i: i >= first)


def read_windows(c: ConfigJson, window: int | None, is_local: Callable[[int], bool]) -> Settings:
    """The window of local layers, and which layers are local.

    `is_local` says whether a layer is local if the configuration has no layer_types. `window` is
    the number of positions that a token sees in local layers, or None.
    """
    count = c.need('num_hidden_layers')
    kinds: Sequence[str] = c.get(
        'layer_types', [LOCAL if is_local(i) else GLOBAL for i in range(count)]
    )
    if unknown := {*kinds} - {LOCAL, GLOBAL}:
        raise c.cannot('layer_types', min(unknown), f'{LOCAL!r} and {GLOBAL!r}')
    local = [window is not None and kind == LOCAL for kind in kinds]
    if not any(local):
        return {'window': None, 'global_every': 0}
    for every in (0, *range(2, count + 1)):
        if local == [not every or (i + 1) % every != 0 for i in range(count)]:
            return {'window': window, 'global_every': every}
    raise c.cannot('layer_types', list(kinds), 'layers that are local, except every n-th')


def _write_windows(m: TransformerConfig) -> Settings:
    return {
        'layer_types': [LOCAL if m.is_local(i) else GLOBAL for i in range(m.num_layers)],
        'sliding_window': m.window,
    }


# What changes how a model is trained or run, but not what it computes.
_RUNNING = {'dropout_rate', 'dtype', 'param_dtype', 'gradient_dtype', 'remat', 'scan_layers'}
_RUNNING |= {'scan_unroll', 'pipeline', 'attention'}


def computed(m: TransformerConfig) -> Settings:
    """What a model computes: settings that mean the same are equal."""
    fields = {f.name: getattr(m, f.name) for f in dataclasses.fields(m) if f.name not in _RUNNING}
    local = [m.is_local(i) for i in range(m.num_layers)]
    fields['biases'] = sorted({*m.biases})
    fields['attention_scale'] = round(m.attention_scale or m.head_dim**-0.5, 9)
    fields['local_rope_max_wavelength'] = None
    if any(local) and m.positions == 'rotary':
        # If local layers have no wavelengths in the settings, they use the scaled global ones.
        own = m.local_rope_max_wavelength
        fields['local_rope_max_wavelength'] = own or (m.rope_max_wavelength, m.rope_scaling)
    return fields | {'window': m.window if any(local) else None, 'global_every': local}
