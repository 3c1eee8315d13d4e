"""Decoders whose layers have experts in place of their MLPs."""

from __future__ import annotations

from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.decoders import (
    Settings,
    read_common,
    read_llama,
    read_qwen3,
    read_windows,
)
from train.errors import ConfigError
from train.models.experts import ExpertsConfig


def read_mixtral(c: ConfigJson) -> Settings:
    """Mixtral, whose layers all have experts."""
    c.require('hidden_act', 'silu', default='silu')
    settings = read_common(c) | {'rope_max_wavelength': float(c.get('rope_theta', 1e6))}
    settings |= read_windows(c, c.get('sliding_window'), lambda i: True)
    loss = c.get('router_aux_loss_coef', 0.001)
    return settings | _experts(c.get('num_local_experts', 8), c.get('num_experts_per_tok', 2), loss)


def read_granitemoe(c: ConfigJson) -> Settings:
    """Granite 3 whose layers all have experts."""
    loss = c.get('router_aux_loss_coef', 0.001)
    experts = _experts(c.get('num_local_experts', 8), c.get('num_experts_per_tok', 2), loss)
    return read_llama(c) | experts | {'attention_scale': c.get('attention_multiplier')}


def read_qwen3_moe(c: ConfigJson) -> Settings:
    """Qwen 3 whose layers all have experts."""
    c.require('decoder_sparse_step', 1, default=1)
    c.require('mlp_only_layers', [], default=[])
    loss, normalized = c.get('router_aux_loss_coef', 0.001), c.get('norm_topk_prob', False)
    count, chosen = c.get('num_experts', 128), c.get('num_experts_per_tok', 8)
    experts = _experts(count, chosen, loss, normalize_weights=normalized)
    return read_qwen3(c) | experts | {'mlp_dim': c.get('moe_intermediate_size', 768)}


def read_olmoe(c: ConfigJson) -> Settings:
    """OLMoE."""
    loss, normalized = c.get('router_aux_loss_coef', 0.01), c.get('norm_topk_prob', False)
    count, chosen = c.get('num_experts', 64), c.get('num_experts_per_tok', 8)
    experts = _experts(count, chosen, loss, normalize_weights=normalized)
    return read_llama(c) | experts | {'qk_norm': True}


def read_gpt_oss(c: ConfigJson) -> Settings:
    """gpt-oss, of whose layers every second one is global."""
    c.require('hidden_act', 'silu', default='silu')
    window, loss = c.values.get('sliding_window', 128), c.get('router_aux_loss_coef', 0.9)
    experts = _experts(c.get('num_local_experts', 128), c.get('num_experts_per_tok', 4), loss)
    windows = read_windows(c, window, lambda i: i % 2 == 0)
    biases = ('qkv', 'out') if c.get('attention_bias', True) else ()
    return read_common(c) | windows | experts | {'biases': biases}


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
