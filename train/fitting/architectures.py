"""Architectures of Hugging Face whose size and cost our models have, and what differs.

Those that our models compute exactly are in `train.checkpoints.huggingface`. Those here have the
same parameters and the same matrix products as our model; each row says what is computed in another
way, which hardly changes memory and time. None of them can load weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.decoders import (
    GELU_TANH,
    read_common,
    read_gpt2,
    read_llama,
    read_qwen3,
    read_windows,
)
from train.errors import ConfigError
from train.models.experts import ExpertsConfig

Settings = dict[str, Any]
GELU = {'gelu': 'gelu', 'gelu_new': 'gelu_tanh', 'gelu_fast': 'gelu_tanh', GELU_TANH: 'gelu_tanh'}
PARTIAL = 'rotary positions turn whole heads, not only a part of each'
PARALLEL = 'attention and MLP of a layer run one after the other, not both on the same input'


@dataclasses.dataclass(frozen=True)
class Similar:
    """An architecture with the parameters and products of our model.

    Attributes:
      read: the settings of our model from `config.json`.
      differs: what our model computes in another way.
    """

    read: Callable[[ConfigJson], Settings]
    differs: tuple[str, ...] = ()


def read_phi3(c: ConfigJson) -> Settings:
    """Phi 3 and 4, which store queries, keys and values as one matrix."""
    c.require('hidden_act', 'silu', default='silu')
    return read_common(c) | read_windows(c, c.get('sliding_window'), lambda i: True)


def read_starcoder2(c: ConfigJson) -> Settings:
    """StarCoder 2."""
    biased = c.get('use_bias', True)
    settings = read_common(c, is_tied=True) | _with_layer_norm(c, 'norm_epsilon')
    settings |= read_windows(c, c.get('sliding_window'), lambda i: True)
    return settings | {
        'biases': ('qkv', 'out', 'mlp', 'norm') if biased else ('norm',),
        'activation': _gelu(c, 'hidden_act'),
        'gated_mlp': False,
    }


def read_gpt_neox(c: ConfigJson) -> Settings:
    """GPT-NeoX and Pythia."""
    heads = {'num_key_value_heads': c.need('num_attention_heads')}
    theta = {'rope_theta': c.get('rotary_emb_base', 10_000.0)}
    of_llama = dataclasses.replace(c, values={**c.values, **heads, **theta})
    biases = ('qkv', 'out') if c.get('attention_bias', True) else ()
    return read_common(of_llama) | {
        **_with_layer_norm(c, 'layer_norm_eps'),
        'biases': (*biases, 'mlp', 'norm'),
        'activation': _gelu(c, 'hidden_act'),
        'gated_mlp': False,
    }


def read_stablelm(c: ConfigJson) -> Settings:
    """StableLM 2 and 3B. 12B has other norms."""
    c.require('hidden_act', 'silu', default='silu')
    c.require('qk_layernorm', False, default=False)
    c.require('use_parallel_residual', False, default=False)
    biases = ('qkv', 'norm') if c.get('use_qkv_bias') else ('norm',)
    return read_common(c) | _with_layer_norm(c, 'layer_norm_eps') | {'biases': biases}


def read_granite(c: ConfigJson) -> Settings:
    """Granite 3, without experts."""
    return read_llama(c) | {'attention_scale': c.get('attention_multiplier')}


def read_nemotron(c: ConfigJson) -> Settings:
    """Nemotron 3 and 4, and Minitron."""
    c.require('hidden_act', 'relu2', default='relu2')
    qkv = ('qkv', 'out') if c.get('attention_bias') else ()
    mlp = ('mlp',) if c.get('mlp_bias') else ()
    return read_common(c) | {
        **_with_layer_norm(c, 'norm_eps'),
        'norm_scale_offset': True,
        'biases': (*qkv, *mlp, 'norm'),
        'activation': 'relu2',
        'gated_mlp': False,
    }


def read_falcon(c: ConfigJson) -> Settings:
    """Falcon 40B and 180B. In 7B and 11B, attention and MLP share a norm."""
    c.require('new_decoder_architecture', True, default=False)
    c.require('num_ln_in_parallel_attn', 2, default=2)
    c.require('alibi', False, default=False)
    heads, width = c.need('num_attention_heads'), c.need('hidden_size')
    sizes = {
        'num_key_value_heads': c.get('num_kv_heads', heads),
        'intermediate_size': c.get('ffn_hidden_size', 4 * width),
    }
    of_llama = dataclasses.replace(c, values={**c.values, **sizes})
    biases = ('qkv', 'out', 'mlp') if c.get('bias') else ()
    return read_common(of_llama, is_tied=True) | {
        **_with_layer_norm(c, 'layer_norm_epsilon'),
        'biases': (*biases, 'norm'),
        'activation': _gelu(c, 'activation'),
        'gated_mlp': False,
    }


def read_gpt_bigcode(c: ConfigJson) -> Settings:
    """StarCoder 1 and SantaCoder: GPT-2 whose heads share one key."""
    values = {**c.values, 'activation_function': 'gelu_new'}
    shared = {'num_kv_heads': 1} if c.get('multi_query', True) else {}
    return read_gpt2(dataclasses.replace(c, values=values)) | shared


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
        'biases': ('qkv', 'out', 'mlp', 'norm'),
        'norm': 'layer',
        'norm_epsilon': 1e-5,
    }


def read_mixtral(c: ConfigJson) -> Settings:
    """Mixtral, whose layers all have experts."""
    c.require('hidden_act', 'silu', default='silu')
    settings = read_common(c) | {'rope_max_wavelength': float(c.get('rope_theta', 1e6))}
    settings |= read_windows(c, c.get('sliding_window'), lambda i: True)
    loss = c.get('router_aux_loss_coef', 0.001)
    return settings | _experts(c.get('num_local_experts', 8), c.get('num_experts_per_tok', 2), loss)


def read_qwen3_moe(c: ConfigJson) -> Settings:
    """Qwen 3 whose layers all have experts."""
    c.require('decoder_sparse_step', 1, default=1)
    c.require('mlp_only_layers', [], default=[])
    loss, normalized = c.get('router_aux_loss_coef', 0.001), c.get('norm_topk_prob', False)
    count, chosen = c.get('num_experts', 128), c.get('num_experts_per_tok', 8)
    experts = _experts(count, chosen, loss, normalize_weights=normalized)
    return read_qwen3(c) | experts | {'mlp_dim': c.get('moe_intermediate_size', 768)}


def read_qwen2_moe(c: ConfigJson) -> Settings:
    """Qwen 2 with experts, which also has an expert that all tokens share."""
    raise ConfigError(
        f'{c.where}: a qwen2_moe has an expert that all tokens share, which the model here does '
        'not: use a mixtral or a qwen3_moe'
    )


def _experts(count: int, chosen: int, loss: float, *, normalize_weights: bool = True) -> Settings:
    experts = ExpertsConfig(
        num_experts=count,
        num_selected_experts=chosen,
        dropless=True,
        normalize_weights=normalize_weights,
        auxiliary_loss_factor=loss,
    )
    return {'experts': experts}


def _with_layer_norm(c: ConfigJson, epsilon: str) -> Settings:
    return {'norm': 'layer', 'norm_epsilon': c.get(epsilon, 1e-5)}


def _gelu(c: ConfigJson, key: str) -> str:
    c.require(key, *GELU, default='gelu')
    return GELU[c.get(key, 'gelu')]


SIMILAR = {
    'phi3': Similar(read_phi3),
    'starcoder2': Similar(read_starcoder2),
    'gpt_neox': Similar(read_gpt_neox, (PARALLEL,)),
    'stablelm': Similar(read_stablelm),
    'granite': Similar(read_granite, ('the multipliers of embeddings, branches and logits are 1',)),
    'smollm3': Similar(read_llama, ('all layers have rotary positions',)),
    'nemotron': Similar(read_nemotron),
    'falcon': Similar(read_falcon, (PARALLEL,)),
    'gpt_bigcode': Similar(read_gpt_bigcode),
    'opt': Similar(read_opt),
    'mixtral': Similar(read_mixtral),
    'qwen3_moe': Similar(read_qwen3_moe),
    'qwen2_moe': Similar(read_qwen2_moe),
}
