"""Writes the .npz files of this folder: tiny models of Hugging Face's transformers, with logits.

They were written with torch 2.15.0 (CPU) and transformers 4.57.6, in an environment without jax:

  pip install torch==2.15.0 transformers==4.57.6 numpy
  python tests/train/reference_models/make_fixtures.py

Each file has the weights by their PyTorch names (float16), `tokens` and `logits` (float32, computed
from these weights). Weights are larger than after an initialization, so that every setting matters.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

SIZES = {
    'vocab_size': 48,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 8,
    'max_position_embeddings': 64,
    'pad_token_id': 0,
    'attn_implementation': 'eager',  # others ignore soft caps
}
LOCAL = ['sliding_attention', 'full_attention']
LLAMA_3 = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LLAMA_3 |= {'rope_type': 'llama3', 'original_max_position_embeddings': 16}
GEMMA = {'sliding_window': 5, 'query_pre_attn_scalar': 12}
# The classes of configuration and model, and what differs from SIZES.
MODELS = {
    'llama3_1': ('Llama', {'rope_theta': 500.0, 'rope_scaling': LLAMA_3, 'rms_norm_eps': 1e-5}),
    'qwen2': ('Qwen2', {'rope_theta': 1000.0}),
    'qwen3': ('Qwen3', {'rope_theta': 1000.0, 'tie_word_embeddings': True}),
    'gemma2': (
        'Gemma2',
        {
            **GEMMA,
            'layer_types': [LOCAL[0], LOCAL[1], LOCAL[0]],
            'attn_logit_softcapping': 2.0,
            'final_logit_softcapping': 3.0,
        },
    ),
    'gemma3': (
        'Gemma3',
        {
            **GEMMA,
            'layer_types': [LOCAL[0], LOCAL[0], LOCAL[1]],
            'rope_theta': 1000.0,
            'rope_local_base_freq': 100.0,
            'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
        },
    ),
}


def main() -> None:
    """Writes all files."""
    for number, (name, (family, settings)) in enumerate(MODELS.items()):
        text = 'Text' if family == 'Gemma3' else ''
        config = getattr(transformers, f'{family}{text}Config')(**SIZES, **settings)
        model = getattr(transformers, f'{family}ForCausalLM')(config).eval().float()
        random = np.random.default_rng(number)
        state = {}
        for key, value in model.state_dict().items():
            is_one = key.endswith('norm.weight') and not family.startswith('Gemma')
            weights = random.normal(float(is_one), 0.3, tuple(value.shape)).astype(np.float16)
            if key != 'lm_head.weight' or not config.tie_word_embeddings:
                state[key] = weights
        model.load_state_dict(
            {k: torch.from_numpy(v.astype(np.float32)) for k, v in state.items()}, strict=False
        )
        model.tie_weights()
        tokens = random.integers(0, config.vocab_size, (2, 20))
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.numpy()
        path = Path(__file__).parent / f'{name}.npz'
        np.savez_compressed(path, tokens=tokens.astype(np.uint8), logits=logits, **state)
        print(f'{path.name}: {path.stat().st_size / 1000:.0f} kB, {len(state)} weights')


if __name__ == '__main__':
    main()
