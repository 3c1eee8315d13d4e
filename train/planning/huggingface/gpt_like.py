"""Decoders that followed GPT-2 and GPT-J: LayerNorm, and MLPs without gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.decoders import (
    GELU_TANH,
    Settings,
    read_common,
    read_gpt2,
    read_windows,
)
from train.planning.huggingface.llama_like import layer_norm

GELU = {'gelu': 'gelu', 'gelu_new': 'gelu_tanh', 'gelu_fast': 'gelu_tanh', GELU_TANH: 'gelu_tanh'}
ALL_BIASES = ('qkv', 'out', 'mlp', 'norm')


def read_gpt_neox(c: ConfigJson) -> Settings:
    """GPT-NeoX and Pythia."""
    theta = {'rope_theta': c.get('rotary_emb_base', 10_000.0)}
    biases = ('qkv', 'out') if c.get('attention_bias', True) else ()
    return read_common(_with(c, theta)) | _norm_and_mlp(c, (*biases, 'mlp', 'norm'))


def read_gptj(c: ConfigJson) -> Settings:
    """GPT-J."""
    width = c.need('n_embd')
    names = {
        'hidden_size': width,
        'num_hidden_layers': c.need('n_layer'),
        'num_attention_heads': c.need('n_head'),
        'intermediate_size': c.get('n_inner', 4 * width),
    }
    return read_common(_with(c, names)) | _norm_and_mlp(
        c, ('mlp', 'norm'), epsilon='layer_norm_epsilon', activation='activation_function'
    )


def read_phi(c: ConfigJson) -> Settings:
    c.require('qk_layernorm', False, default=False)
    return read_common(c) | _norm_and_mlp(c, ALL_BIASES)


def read_falcon(c: ConfigJson) -> Settings:
    """Falcon with rotary positions. In the first 7B, all heads share one key."""
    c.require('alibi', False, default=False)
    c.require('parallel_attn', True, default=True)
    heads, width = c.need('num_attention_heads'), c.need('hidden_size')
    if c.get('new_decoder_architecture', False):
        keys = c.get('num_kv_heads', heads)
    else:
        keys = 1 if c.get('multi_query', True) else heads
    sizes = {'num_key_value_heads': keys, 'intermediate_size': c.get('ffn_hidden_size', 4 * width)}
    biases = ('qkv', 'out', 'mlp') if c.get('bias') else ()
    return read_common(_with(c, sizes), is_tied=True) | _norm_and_mlp(
        c, (*biases, 'norm'), epsilon='layer_norm_epsilon', activation='activation'
    )


def shares_norm_in_falcon(c: ConfigJson) -> bool:
    """Whether attention and MLP of a layer of this Falcon have one norm in common."""
    two = 2 if c.get('new_decoder_architecture', False) else 1
    return c.get('num_ln_in_parallel_attn', two) == 1


def read_starcoder2(c: ConfigJson) -> Settings:
    """StarCoder 2."""
    settings = read_common(c, is_tied=True)
    settings |= read_windows(c, c.get('sliding_window'), lambda i: True)
    biases = ALL_BIASES if c.get('use_bias', True) else ('norm',)
    return settings | _norm_and_mlp(c, biases, epsilon='norm_epsilon')


def read_gpt_bigcode(c: ConfigJson) -> Settings:
    """StarCoder 1 and SantaCoder: GPT-2 whose heads share one key."""
    shared = {'num_kv_heads': 1} if c.get('multi_query', True) else {}
    return read_gpt2(_with(c, {'activation_function': 'gelu_new'})) | shared


def read_bloom(c: ConfigJson) -> Settings:
    c.require('apply_residual_connection_post_layernorm', False, default=False)
    width = c.get('hidden_size', c.get('n_embed'))
    names = {
        'hidden_size': width,
        'num_hidden_layers': c.get('n_layer', c.get('num_hidden_layers')),
        'num_attention_heads': c.get('n_head', c.get('num_attention_heads')),
        'intermediate_size': 4 * width if isinstance(width, int) else None,
    }
    return read_common(_with(c, names), is_tied=True) | {
        **layer_norm(c, 'layer_norm_epsilon'),
        'biases': ALL_BIASES,
        'activation': 'gelu_tanh',
        'gated_mlp': False,
    }


def read_opt(c: ConfigJson) -> Settings:
    """OPT, except 350M, which norms elsewhere."""
    c.require('do_layer_norm_before', True, default=True)
    c.require('enable_bias', True, default=True)
    c.require('word_embed_proj_dim', c.need('hidden_size'), default=c.need('hidden_size'))
    activation = c.get('activation_function', 'relu')
    c.require('activation_function', 'relu', *GELU, default='relu')
    heads, width = c.need('num_attention_heads'), c.need('hidden_size')
    return {
        'vocab_size': c.need('vocab_size'),
        'num_layers': c.need('num_hidden_layers'),
        'embed_dim': width,
        'num_heads': heads,
        'num_kv_heads': heads,
        'head_dim': width // heads,
        'mlp_dim': c.need('ffn_dim'),
        'positions': 'learned',
        'max_positions': c.need('max_position_embeddings') + 2,  # two more than it uses
        'scale_embeddings': False,
        'tie_embeddings': c.get('tie_word_embeddings', True),
        'activation': GELU.get(activation, activation),
        'gated_mlp': False,
        'biases': ALL_BIASES,
        'norm': 'layer',
        'norm_epsilon': 1e-5,
    }


def _norm_and_mlp(
    c: ConfigJson,
    biases: Sequence[str],
    *,
    epsilon: str = 'layer_norm_eps',
    activation: str = 'hidden_act',
) -> Settings:
    """LayerNorm and an MLP without a gate, with the names of their settings in the file."""
    return {
        **layer_norm(c, epsilon),
        'biases': tuple(biases),
        'activation': _gelu(c, activation),
        'gated_mlp': False,
    }


def _with(c: ConfigJson, values: Settings) -> ConfigJson:
    return dataclasses.replace(c, values={**c.values, **values})


def _gelu(c: ConfigJson, key: str) -> str:
    c.require(key, *GELU, default='gelu')
    return GELU[c.get(key, 'gelu')]
