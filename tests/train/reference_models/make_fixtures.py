"""Writes the folders of this folder: tiny models of Hugging Face's transformers, with their logits.

They were written with torch 2.13.0 (CPU) and transformers 4.57.6, in an environment without jax:

  pip install torch==2.13.0 transformers==4.57.6 numpy
  python tests/train/reference_models/make_fixtures.py

Each folder has what `save_pretrained` writes, and `logits.npz` with `tokens` and float32 `logits`;
for T5 also with the `inputs` of the encoder. Weights are larger than after an initialization, so
that every setting matters. With the path of a folder, the script loads the models in it, which this
project has written, and compares their logits with the fixtures of the same names:

  python tests/train/reference_models/make_fixtures.py CHECK FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

HERE = Path(__file__).parent
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
}
GPT2_SIZES = {'vocab_size': 48, 'n_embd': 16, 'n_layer': 3, 'n_head': 4, 'n_positions': 32}
T5_SIZES = {'vocab_size': 48, 'd_model': 16, 'd_ff': 24, 'd_kv': 8, 'num_heads': 4}
T5_SIZES |= {'num_layers': 2, 'num_decoder_layers': 3}
LOCAL = ['sliding_attention', 'full_attention']
LLAMA_3 = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LLAMA_3 |= {'rope_type': 'llama3', 'original_max_position_embeddings': 16}
GEMMA = {'sliding_window': 5, 'query_pre_attn_scalar': 12}
# The classes of configuration and model, what differs from the sizes, and the dtype in the files.
MODELS = {
    'llama3_1': (
        'Llama',
        {'rope_theta': 500.0, 'rope_scaling': LLAMA_3, 'rms_norm_eps': 1e-5, 'vocab_size': 264},
        'bfloat16',
    ),
    'qwen2': ('Qwen2', {'rope_theta': 1000.0}, 'float16'),
    'qwen3': ('Qwen3', {'rope_theta': 1000.0, 'tie_word_embeddings': True}, 'float16'),
    'gemma2': (
        'Gemma2',
        {
            **GEMMA,
            'layer_types': [LOCAL[0], LOCAL[1], LOCAL[0]],
            'attn_logit_softcapping': 2.0,
            'final_logit_softcapping': 3.0,
        },
        'float16',
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
        'float16',
    ),
    'mistral': ('Mistral', {'sliding_window': 6}, 'float16'),
    'gemma': ('Gemma', {}, 'float16'),
    'gpt2': ('GPT2', {}, 'float32'),
    't5': ('T5', {}, 'float32'),
    't5_1_1': ('T5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}, 'float32'),
}


def make_config(family: str, settings: dict) -> transformers.PretrainedConfig:
    """Returns the configuration of a model."""
    text = 'Text' if family == 'Gemma3' else ''
    sizes = {'GPT2': GPT2_SIZES, 'T5': T5_SIZES}.get(family, SIZES)
    return getattr(transformers, f'{family}{text}Config')(**{**sizes, **settings})


def make_model(family: str, config: transformers.PretrainedConfig) -> torch.nn.Module:
    """Returns a model with random weights, in float32."""
    names = {'GPT2': 'GPT2LMHeadModel', 'T5': 'T5ForConditionalGeneration'}
    config._attn_implementation = 'eager'  # others ignore soft caps
    kind = getattr(transformers, names.get(family, f'{family}ForCausalLM'))
    return kind(config).eval().float()


def randomize(family: str, model: torch.nn.Module, dtype: str, seed: int) -> None:
    """Gives a model new weights that the dtype of its files has exactly."""
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for key, weights in model.named_parameters():
            is_one = 'norm' in key or 'ln_' in key
            is_one = is_one and key.endswith('weight') and not family.startswith('Gemma')
            drawn = random.normal(float(is_one), 0.3, tuple(weights.shape)).astype(np.float32)
            weights.copy_(torch.from_numpy(drawn).to(getattr(torch, dtype)).float())
    model.tie_weights()


def compute_logits(model: torch.nn.Module, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the logits of the tokens, or of the tokens given inputs."""
    tokens = torch.from_numpy(arrays['tokens'].astype(np.int64))
    with torch.no_grad():
        if 'inputs' not in arrays:
            return model(tokens).logits.numpy()
        inputs = torch.from_numpy(arrays['inputs'].astype(np.int64))
        return model(
            input_ids=inputs,
            attention_mask=(inputs > 0).long(),
            decoder_input_ids=torch.nn.functional.pad(tokens, (1, 0))[:, :-1],
        ).logits.numpy()


def write_tokenizer(name: str, folder: Path) -> None:
    """Writes a tokenizer of bytes for Llama, and one of letters for T5."""
    if name == 'llama3_1':
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocab = {'<|end_of_text|>': 0} | {letter: i for i, letter in enumerate(letters, 1)}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(['<|end_of_text|>'])
    else:
        known = ['<pad>', '</s>', '<unk>', ' ', *'abcdefghijklmnopqrstuvwxyz']
        vocab = {letter: i for i, letter in enumerate(known)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, '<unk>'))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex('.'), 'isolated')
        made.decoder = tokenizers.decoders.Fuse()
        made.add_special_tokens(['<pad>', '</s>'])
    made.save(str(folder / 'tokenizer.json'), pretty=False)


def write() -> None:
    """Writes all folders."""
    for seed, (name, (family, settings, dtype)) in enumerate(MODELS.items()):
        config = make_config(family, settings)
        model, random = make_model(family, config), np.random.default_rng(seed)
        randomize(family, model, dtype, seed)
        arrays = {'tokens': random.integers(1, config.vocab_size, (2, 20)).astype(np.uint16)}
        if family == 'T5':
            # Long enough for the buckets that several distances share, and with padding.
            arrays['inputs'] = random.integers(1, config.vocab_size, (2, 40)).astype(np.uint16)
            arrays['inputs'][1, 30:] = 0
        logits = compute_logits(model, arrays)
        folder = HERE / name
        model.to(getattr(torch, dtype)).save_pretrained(folder, safe_serialization=True)
        (folder / 'generation_config.json').unlink(missing_ok=True)
        if name in ('llama3_1', 't5_1_1'):
            write_tokenizer(name, folder)
        np.savez_compressed(folder / 'logits.npz', logits=logits, **arrays)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f'{name}: {size / 1000:.0f} kB')


def check(folder: Path) -> None:
    """Compares the logits of written models with the fixtures."""
    for path in sorted(folder.iterdir()):
        arrays = dict(np.load(HERE / path.name / 'logits.npz'))
        family = MODELS[path.name][0]
        names = {'GPT2': 'GPT2LMHeadModel', 'T5': 'T5ForConditionalGeneration'}
        kind = getattr(transformers, names.get(family, f'{family}ForCausalLM'))
        model, report = kind.from_pretrained(
            path, output_loading_info=True, attn_implementation='eager', dtype=torch.float32
        )
        difference = np.abs(compute_logits(model.eval(), arrays) - arrays['logits']).max()
        problems = {k: v for k, v in report.items() if v}
        print(f'{path.name}: logits differ by at most {difference:.1e}; {problems or "all loaded"}')


if __name__ == '__main__':
    if sys.argv[1:2] == ['CHECK']:
        check(Path(sys.argv[2]))
    else:
        write()
