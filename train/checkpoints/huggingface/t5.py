"""`config.json` of T5, and the settings of our T5: in both directions."""

from __future__ import annotations

from typing import Any

from train.checkpoints.huggingface.config_json import ConfigJson
from train.models.t5 import T5Config
from train.models.t5.config import MAX_DISTANCE, NUM_BUCKETS

SIZES = {
    'vocab_size': 'vocab_size',
    'emb_dim': 'd_model',
    'num_heads': 'num_heads',
    'head_dim': 'd_kv',
    'mlp_dim': 'd_ff',
    'num_encoder_layers': 'num_layers',
}
# The feed_forward_proj of a configuration -> our activations. gelu is exact in transformers, unless
# it is a gate.
ACTIVATIONS = {
    'relu': ('relu',),
    'gelu_new': ('gelu',),
    'silu': ('silu',),
    'gated-gelu': ('gelu', 'linear'),
    'gated-gelu_new': ('gelu', 'linear'),
    'gated-relu': ('relu', 'linear'),
    'gated-silu': ('silu', 'linear'),
}


def read_t5(c: ConfigJson) -> dict[str, Any]:
    """T5 1.0, T5 1.1 and what has grown from them, such as Flan-T5 and ByT5."""
    return _read(c, 'relu', is_tied=True)


def read_mt5(c: ConfigJson) -> dict[str, Any]:
    """The multilingual T5, which differs in what a configuration may leave out."""
    return _read(c, 'gated-gelu', is_tied=False)


def _read(c: ConfigJson, activation: str, is_tied: bool) -> dict[str, Any]:
    c.require('relative_attention_num_buckets', NUM_BUCKETS, default=NUM_BUCKETS)
    c.require('relative_attention_max_distance', MAX_DISTANCE, default=MAX_DISTANCE)
    c.require('layer_norm_epsilon', 1e-6, default=1e-6)
    c.require('is_encoder_decoder', True, default=True)
    activation = c.get('feed_forward_proj', activation)
    if activation not in ACTIVATIONS:
        raise c.cannot('feed_forward_proj', activation, ', '.join(map(repr, ACTIVATIONS)))
    return {name: c.need(key) for name, key in SIZES.items()} | {
        'num_decoder_layers': c.get('num_decoder_layers', c.need('num_layers')),
        'mlp_activations': ACTIVATIONS[activation],
        'dropout_rate': c.get('dropout_rate', 0.1),
        'logits_via_embedding': c.get('tie_word_embeddings', is_tied),
    }


def write_t5(m: T5Config) -> dict[str, Any]:
    # Of two names for the same functions, the first.
    known: dict[Any, str] = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {key: getattr(m, name) for name, key in SIZES.items()} | {
        'num_decoder_layers': m.num_decoder_layers,
        'feed_forward_proj': known.get(m.mlp_activations),
        'dropout_rate': m.dropout_rate,
        'tie_word_embeddings': m.logits_via_embedding,
        'relative_attention_num_buckets': NUM_BUCKETS,
        'relative_attention_max_distance': MAX_DISTANCE,
        'layer_norm_epsilon': 1e-6,
        'is_encoder_decoder': True,
        'pad_token_id': 0,
        'eos_token_id': 1,
        'decoder_start_token_id': 0,
    }


# What changes how a model is trained or run, but not what it computes.
_RUNNING = ('dropout_rate', 'dtype', 'remat_policy', 'float32_attention_logits', 'param_scan_axis')


def computed(m: T5Config) -> dict[str, Any]:
    """What a model computes, as settings."""
    names = [name for name in T5Config.__dataclass_fields__ if name not in _RUNNING]
    return {name: getattr(m, name) for name in names}
