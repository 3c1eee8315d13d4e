"""Decoders that followed Llama: rotary positions, mostly gated MLPs and RMSNorm, or experts."""

from __future__ import annotations

from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.decoders import (
    Settings,
    read_common,
    read_llama,
    read_qwen3,
    read_windows,
)
from train.models.experts import ExpertsConfig


def read_phi3(c: ConfigJson, default_window: int | None = None) -> Settings:
    """Phi 3 and 4, which store queries, keys and values as one matrix; Ministral has a window."""
    window = c.get('sliding_window', default_window)
    return _read_silu(c) | read_windows(c, window, lambda i: True)


def read_stablelm(c: ConfigJson) -> Settings:
    """StableLM 2 and 3B. 12B has other norms."""
    c.require('qk_layernorm', False, default=False)
    c.require('use_parallel_residual', False, default=False)
    biases = ('qkv', 'norm') if c.get('use_qkv_bias') else ('norm',)
    return _read_silu(c) | layer_norm(c, 'layer_norm_eps') | {'biases': biases}


def read_arcee(c: ConfigJson) -> Settings:
    """Arcee's foundation models: Llama with an MLP that has no gate."""
    c.require('hidden_act', 'relu2', default='relu2')
    qkv = ('qkv', 'out') if c.get('attention_bias') else ()
    mlp = ('mlp',) if c.get('mlp_bias') else ()
    return read_common(c) | {'biases': (*qkv, *mlp), 'activation': 'relu2', 'gated_mlp': False}


def read_nemotron(c: ConfigJson) -> Settings:
    """Nemotron 3 and 4, and Minitron."""
    settings = read_arcee(c)
    biases = (*settings['biases'], 'norm')
    return settings | layer_norm(c, 'norm_eps') | {'norm_scale_offset': True, 'biases': biases}


def read_ernie(c: ConfigJson) -> Settings:
    """Ernie 4.5 without experts."""
    biases = ('qkv', 'out', 'mlp') if c.get('use_bias') else ()
    return _read_silu(c, is_tied=True) | {'biases': biases, 'head_dim': c.get('head_dim', 128)}


def read_seed_oss(c: ConfigJson) -> Settings:
    """Seed OSS, which says for each matrix of attention whether it has a bias."""
    biases = {
        'qkv': c.get('attention_bias', True),
        'out': c.get('attention_out_bias', False),
        'mlp': c.get('mlp_bias', False),
    }
    return _read_silu(c) | {
        'biases': tuple(name for name, has_it in biases.items() if has_it),
        'head_dim': c.get('head_dim', 128),
    }


def read_glm(c: ConfigJson) -> Settings:
    biases = ('qkv',) if c.get('attention_bias', True) else ()
    return _read_silu(c) | {'biases': biases, 'head_dim': c.get('head_dim', 128)}


def read_exaone4(c: ConfigJson) -> Settings:
    """EXAONE 4. In the large model, every fourth layer is global."""
    every = c.get('sliding_window_pattern', 4)
    # Small models have no window, and older files say so with a pattern of null.
    window = c.values.get('sliding_window', 4096)
    windows = read_windows(c, window, lambda i: not isinstance(every, int) or (i + 1) % every != 0)
    return _read_silu(c) | windows | {'qk_norm': True}


def read_olmo3(c: ConfigJson) -> Settings:
    """OLMo 3, in which every fourth layer is global."""
    windows = read_windows(c, c.values.get('sliding_window', 4096), lambda i: (i + 1) % 4 != 0)
    return read_llama(c) | windows | {'qk_norm': True}


def read_cohere(c: ConfigJson) -> Settings:
    """Command R."""
    biases = ('qkv', 'out') if c.get('attention_bias') else ()
    return _read_silu(c, is_tied=True) | {
        **layer_norm(c, 'layer_norm_eps'),
        'biases': biases,
        'qk_norm': bool(c.get('use_qk_norm', False)),
    }


def read_cohere2(c: ConfigJson) -> Settings:
    """Command R7B and Command A, in which every fourth layer is global."""
    window, every = c.values.get('sliding_window', 4096), c.get('sliding_window_pattern', 4)
    return read_cohere(c) | read_windows(c, window, lambda i: (i + 1) % every != 0)


def read_mixtral(c: ConfigJson) -> Settings:
    """Mixtral. All its layers have experts."""
    settings = _read_silu(c) | {'rope_max_wavelength': float(c.get('rope_theta', 1e6))}
    settings |= read_windows(c, c.get('sliding_window'), lambda i: True)
    return settings | _experts(c, 'num_local_experts', 8, 2)


def read_granitemoe(c: ConfigJson) -> Settings:
    """Granite 3 whose layers all have experts."""
    experts = _experts(c, 'num_local_experts', 8, 2)
    return read_llama(c) | experts | {'attention_scale': c.get('attention_multiplier')}


def read_qwen3_moe(c: ConfigJson) -> Settings:
    """Qwen 3 whose layers all have experts."""
    c.require('decoder_sparse_step', 1, default=1)
    c.require('mlp_only_layers', [], default=[])
    experts = _experts(c, 'num_experts', 128, 8, normalizes=c.get('norm_topk_prob', False))
    return read_qwen3(c) | experts | {'mlp_dim': c.get('moe_intermediate_size', 768)}


def read_olmoe(c: ConfigJson) -> Settings:
    """OLMoE."""
    normalizes = c.get('norm_topk_prob', False)
    experts = _experts(c, 'num_experts', 64, 8, loss=0.01, normalizes=normalizes)
    return read_llama(c) | experts | {'qk_norm': True}


def read_gpt_oss(c: ConfigJson) -> Settings:
    """gpt-oss, in which every second layer is global."""
    experts = _experts(c, 'num_local_experts', 128, 4, loss=0.9)
    windows = read_windows(c, c.values.get('sliding_window', 128), lambda i: i % 2 == 0)
    biases = ('qkv', 'out') if c.get('attention_bias', True) else ()
    return _read_silu(c) | windows | experts | {'biases': biases}


def _experts(
    c: ConfigJson,
    name: str,
    count: int,
    chosen: int,
    *,
    loss: float = 0.001,
    normalizes: bool = True,
) -> Settings:
    """The layer of experts, whose number the file has under this name, and its defaults."""
    experts = ExpertsConfig(
        num_experts=c.get(name, count),
        num_selected_experts=c.get('num_experts_per_tok', chosen),
        dropless=True,
        normalize_weights=normalizes,
        auxiliary_loss_factor=c.get('router_aux_loss_coef', loss),
    )
    return {'experts': experts}


def _read_silu(c: ConfigJson, *, is_tied: bool = False) -> Settings:
    """The settings that all have in common, if the activation is SiLU."""
    c.require('hidden_act', 'silu', default='silu')
    return read_common(c, is_tied=is_tied)


def layer_norm(c: ConfigJson, epsilon: str) -> Settings:
    """LayerNorm with an epsilon that the file has under this name."""
    return {'norm': 'layer', 'norm_epsilon': c.get(epsilon, 1e-5)}
